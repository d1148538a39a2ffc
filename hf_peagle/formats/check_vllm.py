"""
Checks a folder against what vLLM's EAGLE-3 loader does with it, so that a wrong export is found without vLLM.

The rules restate the loader's documented behaviour (`llama_eagle3.py`, `qwen3_eagle3.py`, the speculators config
translation, the proposer's search for the mask id). They are written apart from this library's reader on purpose: a
mistake shared by writer and reader would pass a round trip, not this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .common import FormatError, Values, open_tensors, read_json, weight_files

FLAT_ARCHITECTURES = {
    "Eagle3LlamaForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
FLOATS = ("BF16", "F16", "F32")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass
class Report:
    """Errors stop vLLM or make it draft nonsense; warnings depend on the release or lose quality."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.errors


@dataclass
class _Tensor:
    shape: tuple[int, ...]
    dtype: str


def check(folder: str | Path) -> Report:
    """Checks a P-EAGLE head in vLLM's flat layout or in the speculators format. Reads headers, and `d2t` only."""
    folder, report = Path(folder), Report()
    try:
        config = read_json(folder / "config.json")
        tensors = {name: _Tensor(tuple(piece.get_shape()), piece.get_dtype()) for name, piece in open_tensors(weight_files(folder))}
    except FormatError as error:
        report.errors.append(str(error))
        return report
    if not tensors:
        report.errors.append(f"{folder}: no *.safetensors file; vLLM needs model.safetensors (or shards with an index).")
        return report
    try:
        config, family = _served_config(config, report)
        _check_config(config, report)
        _check_tensors(config, family, tensors, report)
        _check_map(folder, config, tensors, report)
    except FormatError as error:
        report.errors.append(str(error))
    return report


def _served_config(config: dict[str, Any], report: Report) -> tuple[Values, str]:
    """The config as vLLM's model sees it, and the layer family it builds."""
    values = Values(config, "config.json")
    kind = values.text("speculators_model_type")
    if kind is None:
        return values, _flat_family(values)
    if kind != "peagle":
        raise values.error("speculators_model_type", 'vLLM turns on parallel drafting for "peagle" only.')
    decoder = values.section("transformer_layer_config")
    if not decoder.values:
        raise FormatError("config.json: transformer_layer_config is missing; vLLM builds the model from it.")
    if decoder.text("model_type", "llama") not in ("llama", "qwen3"):
        raise decoder.error("model_type", "vLLM serves speculators P-EAGLE heads of llama and qwen3 layers only.")
    spec = values.section("speculators_config")
    methods = spec.values.get("proposal_methods")
    if not isinstance(methods, list) or not methods or "speculative_tokens" not in methods[0]:
        raise FormatError("config.json: speculators_config: proposal_methods[0].speculative_tokens is missing.")
    if "name_or_path" not in spec.section("verifier").values:
        raise FormatError("config.json: speculators_config: verifier.name_or_path is missing.")
    if spec.section("verifier").values["name_or_path"] is None:
        report.warnings.append("verifier.name_or_path is null: `vllm serve FOLDER` cannot find the target; name it yourself.")
    if "mask_token_id" not in values:
        raise FormatError("config.json: mask_token_id is missing; vLLM takes it for the mask slots.")
    if values.flag("fc_norm"):
        report.errors.append("fc_norm is true, but vLLM does not pass it on from a speculators config: use the flat layout.")
    merged = dict(decoder.values)
    for key in ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc"):
        if key in values:
            merged[key] = config[key]
    merged["pard_token"] = config["mask_token_id"]
    if values.integers("eagle_aux_hidden_state_layer_ids"):
        merged["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    return Values(merged, "config.json (as vLLM translates it)"), decoder.text("model_type", "llama") or "llama"


def _flat_family(values: Values) -> str:
    architectures = values.texts("architectures")
    if len(architectures) != 1:
        raise values.error("architectures", f"expected one of {sorted(FLAT_ARCHITECTURES)}.")
    name = architectures[0]
    # method "eagle3" puts this prefix before every architecture that does not carry the name yet
    served = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
    if served not in FLAT_ARCHITECTURES:
        raise values.error("architectures", f"vLLM would look for {served}; expected one of {sorted(FLAT_ARCHITECTURES)}.")
    family = FLAT_ARCHITECTURES[served]
    if values.text("model_type") != family:
        raise values.error("model_type", f"expected {family!r} for {served}.")
    return family


def _check_config(config: Values, report: Report) -> None:
    errors = report.errors
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if key not in config:
            errors.append(f"{config.where}: {key} is missing.")
    if "rms_norm_eps" not in config:
        errors.append(f"{config.where}: rms_norm_eps is missing.")
    config.number("rms_norm_eps")
    if "quantization_config" in config:
        report.warnings.append("quantization_config is present: this checker knows unquantised heads only.")
    if "norm_before_residual" not in config:
        report.warnings.append("norm_before_residual is missing; vLLM takes false.")
    _check_mask_id(config, report)
    _check_rope(config, report)
    if config.section("eagle_config").flag("use_aux_hidden_state", True) is False:
        errors.append("eagle_config.use_aux_hidden_state is false: a P-EAGLE head needs the captured streams.")


def _check_mask_id(config: Values, report: Report) -> None:
    found = {"dflash_config.mask_token_id": config.section("dflash_config").integer("mask_token_id", minimum=0)}
    found |= {key: config.integer(key, minimum=0) for key in _MASK_KEYS}
    found = {key: value for key, value in found.items() if value is not None}
    if not found:
        report.errors.append("the mask token's id is missing: vLLM looks for dflash_config.mask_token_id, " + ", ".join(_MASK_KEYS) + ".")
        return
    if len(set(found.values())) > 1:
        report.errors.append(f"the mask token's id differs between keys ({found}); vLLM releases differ in which they read.")
    if "pard_token" not in found and "ptd_token_id" not in found:
        report.warnings.append("neither pard_token nor ptd_token_id is present; older vLLM releases read only these.")
    vocab = config.integer("vocab_size")
    for key, value in found.items():
        if vocab is not None and value >= vocab:
            report.errors.append(f"{key} is {value}, outside the vocabulary of {vocab}.")


def _check_rope(config: Values, report: Report) -> None:
    seen = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.section(key)
        if not rope.values:
            continue
        rope_type = rope.text("rope_type", rope.text("type", "default"))
        if rope_type not in ROPE_TYPES:
            report.errors.append(f"{key}: rope_type {rope_type!r} is not one that vLLM's Llama layers know: {ROPE_TYPES}.")
        ignored = ("rope_theta", "type", "rope_type")
        seen[key] = {"rope_type": rope_type, **{k: v for k, v in rope.values.items() if k not in ignored}}
    if len(seen) == 2 and seen["rope_scaling"] != seen["rope_parameters"]:
        report.errors.append(f"rope_scaling and rope_parameters differ ({seen}); releases read one or the other.")
    theta = config.section("rope_parameters").number("rope_theta")
    if theta is not None and "rope_theta" in config and config.number("rope_theta") != theta:
        report.errors.append("rope_theta differs between the top level and rope_parameters.")
    if theta is None and "rope_theta" not in config:
        report.warnings.append("rope_theta is missing; vLLM takes 10000.")


def _check_tensors(config: Values, family: str, tensors: dict[str, _Tensor], report: Report) -> None:
    expected = _expected(config, family, tensors, report)
    served: dict[str, str] = {}
    for name in tensors:
        if name.startswith("model."):
            report.errors.append(f"{name}: vLLM puts `model.` before every name itself; store it without.")
        loaded = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if loaded in served:
            report.errors.append(f"{name} and {served[loaded]} are the same parameter in vLLM ({loaded}).")
        served[loaded] = name
    for name, shape in expected.items():
        if name not in served:
            report.errors.append(f"{name} is missing (shape {shape}).")
            continue
        found = tensors[served[name]]
        elements = int(torch.Size(found.shape).numel())
        if found.shape != shape and not (name == "mask_hidden" and elements == shape[0]):
            report.errors.append(f"{served[name]} has shape {found.shape}, expected {shape}.")
        if found.dtype not in FLOATS:
            report.errors.append(f"{served[name]} has dtype {found.dtype}, expected one of {FLOATS}.")
    for name in served:
        if name not in expected and name not in ("d2t", "t2d"):
            report.errors.append(f"{served[name]} has no parameter in vLLM's {family} EAGLE-3 model; loading stops there.")
    kinds = sorted({tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} & set(FLOATS))
    if len(kinds) > 1:
        report.warnings.append(f"tensors have different dtypes ({', '.join(kinds)}); vLLM converts all to the served one.")


def _expected(config: Values, family: str, tensors: dict[str, _Tensor], report: Report) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of the model that vLLM builds from this config."""
    hidden, layers = config.integer("hidden_size") or 1, config.integer("num_hidden_layers") or 1
    heads = config.integer("num_attention_heads") or 1
    kv_heads = config.integer("num_key_value_heads", heads) or heads
    head_dim = config.integer("head_dim", hidden // heads) or 1
    inner, vocab = config.integer("intermediate_size") or 1, config.integer("vocab_size") or 1
    streams, width = _streams(config, report), config.integer("target_hidden_size", hidden) or hidden
    query, key = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, streams * width),
        "mask_hidden": (streams * width,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.integer("draft_vocab_size", vocab) or vocab, hidden),
    }
    if config.section("eagle_config").flag("norm_before_fc", config.flag("norm_before_fc")):
        shapes["input_norm.weight"] = (streams * width,)
    if config.flag("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(streams)}
        report.warnings.append("fc_norm is true: vLLM releases without per-stream norms stop at fc_norm.0.weight.")
    if width != hidden:
        report.warnings.append("target_hidden_size differs from hidden_size: early releases size mask_hidden by hidden_size.")
    for i in range(layers):
        prefix, inputs = f"layers.{i}.", 2 * hidden if i == 0 else hidden
        projections = {"q": (query, inputs), "k": (key, inputs), "v": (key, inputs), "o": (hidden, query)}
        for name, shape in projections.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if config.flag("attention_bias"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
            if config.flag("mlp_bias") and family == "llama":
                shapes[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if family == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    return shapes


def _streams(config: Values, report: Report) -> int:
    """Captured streams: vLLM's count comes from its own keys and is 3 without them."""
    top = config.integers("eagle_aux_hidden_state_layer_ids")
    nested = config.section("eagle_config").integers("eagle_aux_hidden_state_layer_ids")
    counts = [config.integer(key) for key in ("num_aux_layers", "num_aux_hidden_states")]
    said = sorted({count for count in counts if count is not None})
    if len(said) > 1:
        report.errors.append(f"num_aux_layers and num_aux_hidden_states differ: {said}.")
    if top is None and nested is not None:
        report.errors.append(
            f"eagle_config.eagle_aux_hidden_state_layer_ids {nested} counts layer outputs and stock vLLM does not read it: "
            f"write a top-level eagle_aux_hidden_state_layer_ids {[i + 1 for i in nested]}."
        )
    if top is None:
        report.warnings.append("eagle_aux_hidden_state_layer_ids is missing; vLLM captures streams 2, n // 2 and n - 3.")
    if top and said and len(top) != said[0]:
        report.errors.append(f"eagle_aux_hidden_state_layer_ids {top} has not num_aux_hidden_states {said[0]} entries.")
    if top and not said and len(top) != 3:
        message = f"{len(top)} captured streams need num_aux_hidden_states: without it vLLM's Llama model takes 3."
        (report.warnings if "as vLLM translates" in config.where else report.errors).append(message)
    return said[0] if said else len(top) if top else 3


def _check_map(folder: Path, config: Values, tensors: dict[str, _Tensor], report: Report) -> None:
    vocab = config.integer("vocab_size") or 1
    size = config.integer("draft_vocab_size", vocab) or vocab
    name = next((key for key in tensors if re.fullmatch(r"(model\.)?d2t", key)), None)
    if name is None:
        if size != vocab:
            report.errors.append(f"d2t is missing: draft_vocab_size {size} needs the map to the vocabulary of {vocab}.")
        return
    if tensors[name].dtype != "I64" or tensors[name].shape != (size,):
        report.errors.append(f"{name} has dtype {tensors[name].dtype} and shape {tensors[name].shape}, expected I64 ({size},).")
        return
    ids = torch.arange(size) + _values_of(folder, name)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != size:
        report.errors.append(f"{name} must hold offsets that lead to {size} distinct ids below {vocab} (draft id + d2t).")


def _values_of(folder: Path, name: str) -> torch.Tensor:
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as f:
            if name in f.keys():  # noqa: SIM118
                return f.get_tensor(name)
    raise FormatError(f"{name} is in no file of {folder}.")
