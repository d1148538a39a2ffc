"""Tiny random targets of the families users run, and prompts for them."""

from __future__ import annotations

import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 97
EOS, PAD, BOS = 2, 0, 1
WINDOW = 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Large weights make random models say varied things, so that a wrong token is seen.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}


def _config(family: str) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**_COMMON)
    if family == "qwen2":
        return Qwen2Config(**_COMMON)
    if family == "qwen3":
        return Qwen3Config(**_COMMON)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
    if family == "mistral":
        return MistralConfig(**_COMMON, sliding_window=WINDOW)
    if family == "gemma3":
        return Gemma3TextConfig(
            **_COMMON,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            layer_types=[
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
        )
    if family == "gpt_oss":
        return GptOssConfig(
            **_COMMON,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        )
    if family == "phi3":
        return Phi3Config(**_COMMON)
    raise KeyError(family)


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3", "gpt_oss", "phi3")


@functools.cache
def tiny_target(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random fp32 target of `family`; shared between tests, which must leave it as it was."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def ragged_prompts(lengths: list[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of the given lengths with their attention mask."""
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for b, length in enumerate(lengths):
        input_ids[b, width - length :] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[b, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}
