"""Checkpoint folders of other projects, built from the documented names, shapes and keys (not with the writers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_peagle import PEagleConfig, PEagleDrafterModel
from hf_peagle.modeling_peagle import TargetWeights

VOCAB, DRAFT_VOCAB, WIDTH, TARGET_LAYERS, MASK = 64, 40, 32, 12, 61
ENTERING, OUTPUTS = [2, 6, 9], [1, 5, 8]  # the default streams of a target with 12 layers, in both conventions
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def tiny_head(**overrides: Any) -> PEagleDrafterModel:
    """A random bfloat16 head with a pruned vocabulary; norms are not 1, so that a norm left out shows."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": WIDTH,
        "target_layer_ids": ENTERING,
        "target_num_hidden_layers": TARGET_LAYERS,
        "mask_token_id": MASK,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    torch.manual_seed(7)
    head = PEagleDrafterModel(PEagleConfig(**(values | overrides))).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    if head.has_vocab_map:
        size = head.config.draft_vocab_size
        head.set_draft_vocabulary(torch.randperm(head.config.vocab_size)[:size].sort().values)
    for parameter in head.parameters():  # not head.to(), which would round the table of rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16)
    return head


def tiny_eagle3(**overrides: Any) -> PEagleDrafterModel:
    shape = {"algorithm": "eagle3", "num_hidden_layers": 1, "mask_token_id": None, "share_embeddings": True}
    return tiny_head(**(shape | overrides))


def flat_config(head: PEagleDrafterModel) -> dict[str, Any]:
    """The Llama keys that every flat config has."""
    c = head.config
    return {
        "model_type": c.layer_family,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def flat_tensors(head: PEagleDrafterModel) -> dict[str, torch.Tensor]:
    """Names with `layers.0.`; maps always there, as SpecForge and Amazon store them."""
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    if not head.has_vocab_map:
        tensors["d2t"] = torch.zeros(head.config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(head.config.vocab_size, dtype=torch.bool)
    return tensors


def midlayer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {("midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name): tensor for name, tensor in tensors.items()}


def amazon(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return flat_config(head) | {"ptd_token_id": head.config.mask_token_id}, midlayer(flat_tensors(head))


def specforge(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = flat_config(head) | {"architectures": ["PEagleDraftModel"], "norm_before_residual": False}
    return config, flat_tensors(head)


def nemo(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = flat_config(head) | {
        "architectures": ["LlamaEagle3DraftModel"],
        "parallel_drafting": True,
        "mask_token_id": head.config.mask_token_id,
        "num_depths": 6,
        "down_sample_ratio": 0.7,
        "down_sample_ratio_min": 0.2,
        "target_hidden_size": head.config.target_hidden_size,
        "num_aux_hidden_states": len(head.config.target_layer_ids),
    }
    own = ("lm_head", "mask_hidden", "d2t", "t2d")
    tensors = {(name if name.startswith(own) else f"model.{name}"): tensor for name, tensor in flat_tensors(head).items()}
    return config, tensors


def speculators(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    c = head.config
    decoder = flat_config(head)
    for key in ("rope_scaling", "rope_theta", "draft_vocab_size", "architectures"):
        decoder.pop(key)
    config = {
        "architectures": ["PEagleSpeculator" if c.algorithm == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": c.algorithm,
        "transformer_layer_config": decoder | {"rope_parameters": dict(c.rope_parameters)},
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": c.target_layer_ids,
        "embed_requires_grad": True,
        "speculators_config": {
            "algorithm": c.algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    if c.algorithm == "peagle":
        config["mask_token_id"] = c.mask_token_id
    return config, {name: tensor.clone() for name, tensor in head.state_dict().items()}


def safeailab(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return flat_config(head), midlayer(flat_tensors(head))


def specforge_eagle3(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = flat_config(head) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in head.config.target_layer_ids],
            "use_aux_hidden_state": True,
        },
        "fc_norm": head.config.fc_norm,
        "norm_output": head.config.norm_output,
    }
    return config, midlayer(flat_tensors(head))


def angelslim(head: PEagleDrafterModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = flat_config(head) | {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3"}
    return config, midlayer(flat_tensors(head))


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def target_tables(head: PEagleDrafterModel) -> TargetWeights:
    """Random tables of a target, for heads that borrow theirs."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(head.config.vocab_size, head.config.hidden_size, generator=generator).to(head.dtype)
    output = torch.randn(head.config.draft_vocab_size, head.config.hidden_size, generator=generator).to(head.dtype)
    return TargetWeights(lambda ids: table[ids], output)


@torch.no_grad()
def drafts(head: PEagleDrafterModel, num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of two consecutive draft calls on random committed rows of unequal length."""
    generator = torch.Generator().manual_seed(11)
    cache, borrowed = head.new_cache(2), target_tables(head)
    tokens, logits = [], []
    for n in (9, 4):
        ids = torch.randint(0, head.config.vocab_size, (2, n), generator=generator)
        features = torch.randn(2, n, head.config.feature_size, generator=generator).to(head.dtype)
        out = head.draft(ids, features, torch.tensor([n, n - 2]), num_tokens, cache, borrowed=borrowed)
        tokens.append(out.tokens)
        logits.append(out.logits)
    return torch.cat(tokens, 1), torch.cat(logits, 1)
