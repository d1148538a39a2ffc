"""From named tensors to a head: one set of names, shapes that explain themselves, and checks that name the culprit."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..configuration_peagle import PEagleConfig, default_target_layer_ids
from ..modeling_peagle import PEagleDrafterModel
from .common import Checkpoint, FormatError, ReadOptions, Values, text_config
from .rope import read_rope

logger = logging.getLogger(__name__)

# The order in which vLLM looks for the mask token's id (some releases know only the last two).
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Not weights of the head: a table of angles that is computed, and the trainer's copies of target weights.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.|^verifier_(norm|lm_head)\.")

_WHY = {
    "mask_hidden": "without it mask slots have no input: the export dropped it, or this is an EAGLE-3 head and its "
    "config wrongly promises parallel drafting.",
    "embed_tokens.weight": "a P-EAGLE head trains its own table (the mask token's row above all), so the target's cannot stand in.",
    "d2t": "a pruned draft vocabulary needs the map to target ids.",
}


@dataclass
class ForeignHead:
    """A checkpoint translated into this library's terms: what `PEagleDrafterModel` needs to be built."""

    config: PEagleConfig
    tensors: dict[str, torch.Tensor]
    checkpoint_format: str


@dataclass
class Described:
    """What a format's reader knows beyond the common rules."""

    checkpoint_format: str
    algorithm: str
    values: Values
    target_name: str | None = None
    rope_by_theta_only: bool = False
    missing_flags: tuple[str, ...] = ()  # flags whose absence is an error, since implementations disagree
    draft_length: int | None = None


def canonical_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """
    Tensors by this library's names: no `model.` prefix, `midlayer.` is `layers.0.`.

    Raises `FormatError` if two tensors of the file come to the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in tensors:
            raise FormatError(f"{checkpoint.name}: {name} is a second tensor for {canonical}; export the checkpoint again.")
        tensors[canonical] = tensor
    return tensors


def canonical_name(name: str) -> str | None:
    """This library's name of a stored tensor; `None` for tensors that are no weights of the head."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    return None if _IGNORED.search(name) else name


def build_head(checkpoint: Checkpoint, described: Described, options: ReadOptions) -> ForeignHead:
    """The configuration that the tensors and the config give together, and the tensors in its shapes."""
    tensors = canonical_tensors(checkpoint)
    config = _head_config(checkpoint, tensors, described, options)
    tensors = _vocabulary_map(checkpoint, tensors, config)
    _check_tensors(checkpoint, tensors, config)
    dtype = _common_dtype(checkpoint, tensors)
    config.dtype = dtype
    shapes = expected_shapes(config)
    ready = {name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).reshape(shapes[name]) for name, tensor in tensors.items()}
    return ForeignHead(config, ready, described.checkpoint_format)


def expected_shapes(config: PEagleConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor that a head of this configuration stores."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in PEagleDrafterModel(config).state_dict().items()}


# ---------------------------------------------------------------------- the configuration


def _head_config(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], described: Described, options: ReadOptions) -> PEagleConfig:
    values = described.values
    if "quantization_config" in values:
        raise values.error("quantization_config", "quantised heads are not read; export the head unquantised.")
    if values.section("eagle_config").flag("use_aux_hidden_state", True) is False:
        raise FormatError(
            f"{values.where}: eagle_config: use_aux_hidden_state is false; heads that read the target's last state only (EAGLE-1) are not supported."
        )
    if "sliding_attention" in values.texts("layer_types") or values.flag("use_sliding_window"):
        raise values.error("layer_types", "heads with sliding-window layers are not supported.")
    target = None if options.target_config is None else text_config(options.target_config)
    fc = _matrix(checkpoint, tensors, "fc.weight")
    hidden, fc_width = fc.shape
    attention = _attention_shape(checkpoint, tensors, values, hidden)
    layers = _layer_count(checkpoint, tensors, values)
    layer_ids, target_width, target = _captured_streams(checkpoint, described, options, hidden, fc_width, target)
    has_table, has_output = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    if not has_table and described.algorithm == "peagle":
        raise FormatError(f"{checkpoint.name}: embed_tokens.weight is missing; {_WHY['embed_tokens.weight']}")
    for name, present in (("embed_tokens.weight", has_table), ("lm_head.weight", has_output)):
        if not present and hidden != target_width:
            raise FormatError(
                f"{checkpoint.name}: {name} is missing, and the target's cannot stand in, as the head is {hidden} wide "
                f"(fc.weight) and its target {target_width}."
            )
    vocab, draft_vocab = _vocabulary_sizes(checkpoint, tensors, values, target)
    activation = values.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise values.error("hidden_act", "expected the name of an activation function that transformers knows.")
    layer = "layers.0."
    depths = values.integer("num_depths", max(8, described.draft_length or 0))
    return PEagleConfig(
        algorithm=described.algorithm,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        target_hidden_size=target_width,
        target_layer_ids=layer_ids,
        target_num_hidden_layers=_layer_total(target) or values.integer("target_num_hidden_layers"),
        target_model_type=getattr(target, "model_type", None) or values.text("target_model_type"),
        target_name_or_path=described.target_name
        or values.text("target_name_or_path")
        or getattr(target, "_name_or_path", None)
        or checkpoint.base_model,
        mask_token_id=_mask_token_id(values, options, vocab) if described.algorithm == "peagle" else None,
        num_hidden_layers=layers,
        intermediate_size=_matrix(checkpoint, tensors, layer + "mlp.gate_proj.weight").shape[0],
        hidden_act=activation,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        attention_bias=layer + "self_attn.q_proj.bias" in tensors,
        mlp_bias=layer + "mlp.gate_proj.bias" in tensors,
        max_position_embeddings=values.integer("max_position_embeddings", 2048),
        rope_parameters=read_rope(values, attention["head_dim"], described.rope_by_theta_only),
        initializer_range=values.number("initializer_range", 0.02),
        layer_family="qwen3" if layer + "self_attn.q_norm.weight" in tensors else "llama",
        norm_before_residual=_norm_before_residual(described),
        norm_before_fc=_norm_flag(checkpoint, tensors, values, "input_norm.weight", ("norm_before_fc",)),
        fc_norm=_norm_flag(checkpoint, tensors, values, "fc_norm.0.weight", ("fc_norm", "use_aux_norm")),
        norm_output=bool(values.flag("norm_output")) and described.algorithm == "eagle3",
        share_embeddings=not has_table,
        share_lm_head=not has_output,
        num_depths=depths,
        draft_length=described.draft_length,
        pad_token_id=_special_id(values, "pad_token_id"),
        bos_token_id=_special_id(values, "bos_token_id"),
        eos_token_id=_special_id(values, "eos_token_id"),
        **attention,
    )  # fmt: skip


def _matrix(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise FormatError(f"{checkpoint.name}: {name} is missing; this is no P-EAGLE or EAGLE-3 head, or a damaged one.")
    if tensors[name].dim() != 2:
        raise FormatError(f"{checkpoint.name}: {name} has shape {tuple(tensors[name].shape)}, expected a matrix.")
    return tensors[name]


def _attention_shape(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], values: Values, hidden: int) -> dict[str, int]:
    """head_dim and head counts from the config's numbers, checked against the projections of layer 0."""
    query = _matrix(checkpoint, tensors, "layers.0.self_attn.q_proj.weight").shape[0]
    key = _matrix(checkpoint, tensors, "layers.0.self_attn.k_proj.weight").shape[0]
    heads, head_dim = values.integer("num_attention_heads"), values.integer("head_dim")
    if head_dim is None and "layers.0.self_attn.q_norm.weight" in tensors:
        head_dim = tensors["layers.0.self_attn.q_norm.weight"].shape[0]
    if head_dim is None:
        if heads is None:
            raise FormatError(f"{values.where}: head_dim and num_attention_heads are both missing; add one of them.")
        head_dim = hidden // heads
    for name, width in (("q_proj", query), ("k_proj", key)):
        if width % head_dim:
            raise FormatError(
                f"{checkpoint.name}: layers.0.self_attn.{name}.weight has {width} rows, not a multiple of head_dim {head_dim} ({values.where})."
            )
    if heads is not None and heads * head_dim != query:
        raise FormatError(
            f"{checkpoint.name}: layers.0.self_attn.q_proj.weight has {query} rows, but num_attention_heads {heads} x "
            f"head_dim {head_dim} is {heads * head_dim} ({values.where})."
        )
    kv_heads = values.integer("num_key_value_heads")
    if kv_heads is not None and kv_heads * head_dim != key:
        raise FormatError(
            f"{checkpoint.name}: layers.0.self_attn.k_proj.weight has {key} rows, but num_key_value_heads {kv_heads} x "
            f"head_dim {head_dim} is {kv_heads * head_dim} ({values.where})."
        )
    return {
        "num_attention_heads": query // head_dim,
        "num_key_value_heads": key // head_dim,
        "head_dim": head_dim,
    }


def _layer_count(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], values: Values) -> int:
    """From the tensor names: some published configs carry the target's number."""
    numbers = {int(match.group(1)) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    count = max(numbers) + 1
    if gaps := sorted(set(range(count)) - numbers):
        raise FormatError(f"{checkpoint.name}: tensors of layers.{gaps[0]} are missing, while layers.{count - 1} has some.")
    claimed = values.integer("num_hidden_layers")
    if claimed is not None and claimed != count:
        logger.warning("%s says num_hidden_layers %d, but holds %d layers; the tensors count.", values.where, claimed, count)
    return count


def _captured_streams(
    checkpoint: Checkpoint,
    described: Described,
    options: ReadOptions,
    hidden: int,
    fc_width: int,
    target: PreTrainedConfig | None,
) -> tuple[list[int], int, PreTrainedConfig | None]:
    """The ids of the captured streams (entering), the target's width, and its configuration if it was looked up."""
    values = described.values
    layer_ids = options.target_layer_ids or entering_layer_ids(values)
    width = None if target is None else target.hidden_size
    claimed = values.integer("target_hidden_size")
    if width is not None and claimed is not None and width != claimed:
        raise values.error("target_hidden_size", f"but target_config has hidden_size {width}: another target's head.")
    width = width or claimed
    count = len(layer_ids) if layer_ids else values.integer("num_aux_hidden_states", values.integer("num_aux_layers"))
    if width is None and count is None:
        # Three streams are the rule; other numbers come with their ids.
        if fc_width % 3 or (fc_width % hidden == 0 and fc_width != 3 * hidden):
            raise FormatError(
                f"{checkpoint.name}: target_hidden_size is unknown: fc.weight takes {fc_width} inputs, which does not tell "
                "how many streams of which width. Pass target_config= (scripts/convert.py: --target)."
            )
        count = 3
    count = count if count is not None else fc_width // (width or 1)
    width = width or fc_width // count
    if count * width != fc_width:
        raise FormatError(
            f"{checkpoint.name}: fc.weight takes {fc_width} inputs, which is not {count} captured streams x target width "
            f"{width}. Check eagle_aux_hidden_state_layer_ids and target_hidden_size in {values.where}, or target_config."
        )
    if layer_ids is None:
        target = target or _look_up_target(described.target_name or checkpoint.base_model)
        total = _layer_total(target)
        if total is None:
            raise FormatError(
                f"{checkpoint.name}: eagle_aux_hidden_state_layer_ids is missing, and the default (2, n // 2, n - 3) needs "
                "the target's number of layers. Pass target_config= (scripts/convert.py: --target), or "
                "target_layer_ids=[...] with streams numbered by the layer they enter."
            )
        layer_ids = list(default_target_layer_ids(total))
        if count != len(layer_ids):
            raise FormatError(
                f"{checkpoint.name}: eagle_aux_hidden_state_layer_ids is missing, and fc.weight reads {count} streams, for "
                "which there is no default. Pass target_layer_ids=[...]."
            )
    return list(layer_ids), width, target


def entering_layer_ids(values: Values) -> list[int] | None:
    """
    Captured streams, numbered by the layer they enter: a top-level list is taken as it is, the nested one in
    `eagle_config` counts layer *outputs* and is one lower. The top-level one wins, as in vLLM.
    """
    top = values.integers("eagle_aux_hidden_state_layer_ids")
    nested = values.section("eagle_config").integers("eagle_aux_hidden_state_layer_ids")
    if top and nested and top != [i + 1 for i in nested]:
        logger.warning(
            "%s: top-level eagle_aux_hidden_state_layer_ids %s (streams entering) and eagle_config's %s (layer outputs) "
            "name different streams; the top-level list counts.",
            values.where,
            top,
            nested,
        )
    if top:
        return top
    return [i + 1 for i in nested] if nested else None


def _look_up_target(name: str | None) -> PreTrainedConfig | None:
    """The configuration of the target that the checkpoint names, if it can be had."""
    if name is None:
        return None
    try:
        return text_config(name)
    except (OSError, ValueError) as error:
        logger.warning("The configuration of the target %s could not be read (%s).", name, error)
        return None


def _layer_total(target: PreTrainedConfig | None) -> int | None:
    return getattr(target, "num_hidden_layers", None) or getattr(target, "n_layer", None)


def _vocabulary_sizes(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], values: Values, target: PreTrainedConfig | None) -> tuple[int, int]:
    """Target and draft vocabulary from the tables, else the map, else the config, else the target."""
    claims = [
        ("embed_tokens.weight", tensors["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in tensors else None),
        ("t2d", tensors["t2d"].shape[0] if "t2d" in tensors else None),
        ("vocab_size in config.json", values.integer("vocab_size")),
        ("vocab_size of target_config", getattr(target, "vocab_size", None)),
    ]
    vocab = _agreed(checkpoint, "vocabulary sizes", claims)
    claims = [
        ("lm_head.weight", tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None),
        ("d2t", tensors["d2t"].shape[0] if "d2t" in tensors else None),
        ("draft_vocab_size in config.json", values.integer("draft_vocab_size")),
    ]
    if all(size is None for _, size in claims):
        return vocab, vocab
    return vocab, _agreed(checkpoint, "draft vocabulary sizes", claims)


def _agreed(checkpoint: Checkpoint, what: str, claims: list[tuple[str, int | None]]) -> int:
    known = [(name, size) for name, size in claims if size is not None]
    if not known:
        raise FormatError(
            f"{checkpoint.name}: vocab_size is unknown: no embed_tokens.weight, no t2d, no key. Pass target_config= (scripts/convert.py: --target)."
        )
    for name, size in known[1:]:
        if size != known[0][1]:
            raise FormatError(f"{checkpoint.name}: {what} differ: {known[0][0]} has {known[0][1]}, {name} {size}.")
    return known[0][1]


def _mask_token_id(values: Values, options: ReadOptions, vocab: int) -> int:
    """The first of the known keys, in vLLM's order, unless the caller gives one."""
    said = {"dflash_config.mask_token_id": values.section("dflash_config").integer("mask_token_id", minimum=0)}
    said |= {key: values.integer(key, minimum=0) for key in MASK_KEYS}
    found = {key: value for key, value in said.items() if value is not None}
    if options.mask_token_id is not None:
        found = {"mask_token_id=": options.mask_token_id}
    if not found:
        raise FormatError(
            f"{values.where}: the mask token's id is missing (none of dflash_config.mask_token_id, "
            f"{', '.join(MASK_KEYS)}). Pass mask_token_id= (scripts/convert.py: --mask-token-id) with the id the "
            "head was trained with."
        )
    key, mask = next(iter(found.items()))
    if len(set(found.values())) > 1:
        logger.warning("%s names several mask ids (%s); %s counts, as in vLLM.", values.where, found, key)
    if mask >= vocab:
        raise FormatError(f"{values.where}: {key} is {mask}, outside the vocabulary of {vocab} (embed_tokens.weight).")
    return mask


def _norm_before_residual(described: Described) -> bool:
    key = "norm_before_residual"
    if key in described.missing_flags and key not in described.values:
        raise FormatError(
            f"{described.values.where}: {key} is missing; readers of this format disagree about its default (true in vLLM, "
            "false in speculators). Add the value the head was trained with to config.json."
        )
    return bool(described.values.flag(key))


def _norm_flag(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], values: Values, tensor: str, keys: tuple[str, ...]) -> bool:
    """A norm before `fc`: the config's word and the tensors must not contradict each other; tensors alone suffice."""
    present, nested = tensor in tensors, values.section("eagle_config")
    said = [(source, key, source.flag(key, None)) for source in (values, nested) for key in keys]
    said = [(source, key, value) for source, key, value in said if value is not None]
    if present and said and not any(value for *_, value in said):
        raise FormatError(f"{checkpoint.name}: holds {tensor}, but {said[0][0].where}: {said[0][1]} is false.")
    if not present and (true := [key for _, key, value in said if value]):
        raise FormatError(f"{checkpoint.name}: {tensor} is missing, but {true[0]} is true in {values.where}.")
    return present


def _special_id(values: Values, key: str) -> Any:
    value = values.values.get(key)
    many = isinstance(value, list) and all(isinstance(i, int) for i in value)
    return value if many or (isinstance(value, int) and not isinstance(value, bool)) else None


# ---------------------------------------------------------------------- the tensors


def _vocabulary_map(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], config: PEagleConfig) -> dict[str, torch.Tensor]:
    """`d2t` (int64 offsets) and `t2d` (bool) where the vocabulary is pruned; an identity map is dropped."""
    tensors = dict(tensors)
    size, vocab = config.draft_vocab_size, config.vocab_size
    if "t2d" in tensors and tensors["t2d"].dtype != torch.bool:
        if tensors["t2d"].is_floating_point() or not bool(((tensors["t2d"] == 0) | (tensors["t2d"] == 1)).all()):
            raise FormatError(f"{checkpoint.name}: t2d has dtype {tensors['t2d'].dtype}, expected bool.")
        tensors["t2d"] = tensors["t2d"].bool()
    if "d2t" in tensors and (tensors["d2t"].is_floating_point() or tensors["d2t"].dtype == torch.bool):
        raise FormatError(f"{checkpoint.name}: d2t has dtype {tensors['d2t'].dtype}, expected int64.")
    if size == vocab:
        if "d2t" in tensors and bool(tensors.pop("d2t").any()):
            raise FormatError(f"{checkpoint.name}: d2t moves ids although the draft vocabulary is the full one; expected zeros.")
        if "t2d" in tensors and not bool(tensors.pop("t2d").all()):
            raise FormatError(f"{checkpoint.name}: t2d leaves out ids although the draft vocabulary is the full one.")
        return tensors
    if "d2t" not in tensors:
        raise FormatError(f"{checkpoint.name}: d2t is missing; {_WHY['d2t']}")
    d2t = tensors["d2t"].long().view(-1)
    ids = torch.arange(size) + d2t
    marked = tensors["t2d"].nonzero().view(-1) if "t2d" in tensors else None
    if marked is not None and not torch.equal(ids.sort().values, marked) and torch.equal(d2t.sort().values, marked):
        logger.warning("%s: d2t holds target ids instead of offsets (t2d proves it); converted.", checkpoint.name)
        ids, d2t = d2t, d2t - torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != size:
        raise FormatError(
            f"{checkpoint.name}: d2t must lead to {size} distinct ids in [0, {vocab}) as offsets (target id = draft id + "
            f"d2t[draft id]); found {ids.unique().numel()} in [{int(ids.min())}, {int(ids.max())}]."
        )
    if marked is not None and not torch.equal(ids.sort().values, marked):
        raise FormatError(f"{checkpoint.name}: t2d marks other target ids than d2t leads to.")
    tensors["d2t"] = d2t
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _check_tensors(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], config: PEagleConfig) -> None:
    """Every tensor there, none unexplained, each in its shape; `mask_hidden` may have any rank."""
    shapes = expected_shapes(config)
    for name in shapes:
        if name not in tensors:
            raise FormatError(f"{checkpoint.name}: {name} is missing; {_WHY.get(name, 'export the checkpoint again.')}")
    stored = {canonical_name(name): name for name in checkpoint.tensors}
    for name, tensor in tensors.items():
        own = stored.get(name, name)
        if name not in shapes:
            raise FormatError(
                f"{checkpoint.name}: {own} (shape {tuple(tensor.shape)}) has no place in a head of this kind "
                f"({config.algorithm}, {config.num_hidden_layers} layers of the {config.layer_family} family, "
                f"attention_bias {config.attention_bias}); the format is another one, or a part of the network is not supported."
            )
        fits = tensor.numel() == shapes[name].numel() if name == "mask_hidden" else tensor.shape == shapes[name]
        if not fits:
            raise FormatError(
                f"{checkpoint.name}: {own} has shape {tuple(tensor.shape)}, expected {tuple(shapes[name])}"
                f"{' (any rank)' if name == 'mask_hidden' else ''}."
            )
        if name not in ("d2t", "t2d") and not (tensor.is_floating_point() and tensor.element_size() >= 2):
            raise FormatError(f"{checkpoint.name}: {own} has dtype {tensor.dtype}; quantised heads are not read.")


def _common_dtype(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The widest floating dtype in the file, so that nothing is rounded."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    widest = next(iter(dtypes))
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    if len(dtypes) > 1:
        logger.warning("%s mixes dtypes %s; the head is held in %s.", checkpoint.name, sorted(map(str, dtypes)), widest)
    return widest
