"""The `speculators` library's format: nested decoder config; P-EAGLE and EAGLE-3 heads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration_peagle import PEagleConfig
from ..modeling_peagle import PEagleDrafterModel
from .common import Checkpoint, FormatError, ReadOptions, Values
from .network import Described, ForeignHead, build_head
from .vllm import decoder_config, own_facts
from .writing import check_layer_ids, export_tensors, write_folder

logger = logging.getLogger(__name__)

NAMES = {"peagle": "speculators", "eagle3": "eagle3-speculators"}
ARCHITECTURES = {"peagle": "PEagleSpeculator", "eagle3": "Eagle3Speculator"}
VERSION = "0.9.0"  # of the format written


def read(checkpoint: Checkpoint, options: ReadOptions) -> ForeignHead:
    """The top-level facts and the nested decoder config make one flat config, as vLLM merges them."""
    where = f"{checkpoint.name}/config.json"
    top = Values(checkpoint.config, where)
    kind = top.text("speculators_model_type")
    if kind not in NAMES:
        raise top.error("speculators_model_type", f"expected one of {tuple(NAMES)}.")
    decoder = top.section("transformer_layer_config")
    if not decoder.values:
        raise FormatError(f"{where}: transformer_layer_config is missing; it holds the shape of the layers.")
    spec = top.section("speculators_config")
    own = {key: value for key, value in top.values.items() if key not in ("transformer_layer_config", "model_type")}
    merged = Values({**decoder.values, **{key: value for key, value in own.items() if value is not None}}, where)
    described = Described(
        NAMES[kind],
        kind,
        merged,
        target_name=spec.section("verifier").text("name_or_path"),
        missing_flags=("norm_before_residual",) if kind == "eagle3" else (),
        draft_length=_speculative_tokens(spec),
    )
    return build_head(checkpoint, described, options)


def write(
    head: PEagleDrafterModel,
    folder: str | Path,
    target: PreTrainedModel | None = None,
    tokenizer: Any = None,
    mask_token_id: int | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes `head` as a `speculators` checkpoint; arguments and errors as in [`vllm.write`]."""
    config = head.config
    check_layer_ids(config)
    if config.hidden_size != config.target_hidden_size:
        raise FormatError(
            f"hidden_size {config.hidden_size} differs from target_hidden_size {config.target_hidden_size}: the "
            "speculators library builds heads as wide as their target only. Use --to vllm."
        )
    if config.mlp_bias:
        raise FormatError("mlp_bias is true, which vLLM and speculators do not build for every family; not written.")
    if config.fc_norm:
        logger.warning(
            "fc_norm is true: the speculators library reads this head, but vLLM does not pass the flag on from this "
            "format and would not serve it right. Use --to vllm for serving."
        )
    exported = export_tensors(head, target, tokenizer, mask_token_id)
    return write_folder(folder, nested_config(config, head.dtype, exported.mask_token_id), exported.tensors, max_shard_size)


def nested_config(config: PEagleConfig, dtype: torch.dtype, mask_token_id: int | None) -> dict[str, Any]:
    """The config.json of this format."""
    name = config.target_name_or_path
    decoder = decoder_config(config, dtype)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.algorithm]],
        "speculators_model_type": config.algorithm,
        "speculators_version": VERSION,
        "dtype": decoder["dtype"],
        "transformer_layer_config": decoder,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": config.target_layer_ids,
        "embed_requires_grad": config.algorithm == "peagle",
        "speculators_config": {
            "algorithm": config.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.draft_length,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": []},
        },
        **own_facts(config),
    }
    if config.algorithm == "peagle":
        values["mask_token_id"] = mask_token_id
    return values


def _speculative_tokens(spec: Values) -> int | None:
    methods = spec.values.get("proposal_methods")
    if not methods:
        return None
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise spec.error("proposal_methods", "expected a list of dictionaries.")
    return Values(methods[0], f"{spec.where}: proposal_methods[0]").integer("speculative_tokens")
