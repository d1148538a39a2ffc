"""The layout of Amazon's P-EAGLE heads, which is what vLLM's EAGLE-3 loader reads: a flat Llama-like config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration_peagle import PEagleConfig
from ..modeling_peagle import PEagleDrafterModel
from .common import Checkpoint, ReadOptions, Values
from .network import Described, ForeignHead, build_head
from .rope import write_rope
from .writing import check_layer_ids, export_tensors, identity_map, write_folder

logger = logging.getLogger(__name__)

NAME = "vllm"
ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


def read(checkpoint: Checkpoint, options: ReadOptions) -> ForeignHead:
    """An Amazon head, or any other that vLLM would serve from a flat config."""
    values = Values(checkpoint.config, f"{checkpoint.name}/config.json")
    length = values.integer("num_lookahead_tokens")
    return build_head(checkpoint, Described(NAME, "peagle", values, draft_length=length), options)


def write(
    head: PEagleDrafterModel,
    folder: str | Path,
    target: PreTrainedModel | None = None,
    tokenizer: Any = None,
    mask_token_id: int | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """
    Writes `head` so that vLLM (0.16 or newer) serves it with `method: eagle3` and `parallel_drafting: true`.

    Args:
        folder: must not exist yet, or be empty; it appears complete or not at all.
        target: the target model; needed if the head borrows its embedding or lm_head.
        tokenizer: the target's; a mask token id that no text uses is chosen with it where none is known.
        mask_token_id: row of the written embedding that holds the mask slot's vector.

    Returns the folder. Raises `FormatError` for what the format cannot express.
    """
    check_layer_ids(head.config)
    if head.config.fc_norm:
        logger.warning(
            "fc_norm is true: only vLLM releases whose EAGLE-3 model has per-stream norms serve this head; older ones stop "
            "while loading with a KeyError for model.fc_norm.0.weight."
        )
    exported = export_tensors(head, target, tokenizer, mask_token_id)
    tensors = {_amazon_name(name): tensor for name, tensor in (exported.tensors | identity_map(head)).items()}
    return write_folder(folder, flat_config(head.config, head.dtype, exported.mask_token_id), tensors, max_shard_size)


def flat_config(config: PEagleConfig, dtype: torch.dtype, mask_token_id: int | None) -> dict[str, Any]:
    """The config.json of this layout. The mask id stands under all three names that vLLM releases have looked for."""
    values = decoder_config(config, dtype) | {
        "architectures": [ARCHITECTURES[config.layer_family]],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        # vLLM takes a top-level list as "entering" and unchanged; the count is read under either name.
        "eagle_aux_hidden_state_layer_ids": config.target_layer_ids,
        "num_aux_hidden_states": config.num_aux_hidden_states,
        "num_aux_layers": config.num_aux_hidden_states,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_lookahead_tokens": config.draft_length,
        **own_facts(config),
    }
    if config.norm_before_fc:
        values["eagle_config"] = {"use_aux_hidden_state": True, "norm_before_fc": True}
    if config.algorithm == "peagle":
        values |= {"mask_token_id": mask_token_id, "pard_token": mask_token_id, "ptd_token_id": mask_token_id}
    return values


def decoder_config(config: PEagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The Llama or Qwen3 part: nothing left to a default of the reader."""
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "model_type": config.layer_family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
        **write_rope(config),
    }


def own_facts(config: PEagleConfig) -> dict[str, Any]:
    """Keys that other readers ignore and this library reads back."""
    return {
        "num_depths": config.num_depths,
        "target_num_hidden_layers": config.target_num_hidden_layers,
        "target_name_or_path": config.target_name_or_path,
    }


def serve_command(folder: str | Path, target: str, num_tokens: int, parallel: bool = True) -> str:
    """The `vllm serve` line for a head in `folder` (this layout or speculators') and its target."""
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_tokens}
    if parallel:
        speculative["parallel_drafting"] = True
    return f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"


def _amazon_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
