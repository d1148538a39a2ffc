"""
Compares logits with the other P-EAGLE implementations, loaded from files this library wrote (or the other way round).

- speculators: a random head is exported with `formats.speculators.write`; their `PEagleDraftModel.from_pretrained` loads
  the folder, and both compute the K logits rows of one draft call.
- SpecForge: their `PEagleDraftModel` with random weights saves a folder; this library reads it.

Runs in an environment of its own, since speculators pins an older transformers: torch 2.13, transformers 5.19,
speculators 0.9.0, hs-connectors 0.9.0 and specforge 0.2.0 installed without dependencies, pydantic, loguru, datasets.

    PYTHONPATH=. python scripts/compare_with_speculators.py --output results/compare_with_speculators.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from hf_peagle import PEagleConfig, PEagleDrafterModel
from hf_peagle.formats import speculators as speculators_format

VOCAB, WIDTH, MASK = 101, 32, 100
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "llama, 1 layer": {"num_hidden_layers": 1},
    "llama, 4 layers, norm_before_residual": {"num_hidden_layers": 4, "norm_before_residual": True},
    "llama, fc_norm": {"fc_norm": True},
    "llama, norm_before_fc": {"norm_before_fc": True},
    "llama, pruned vocabulary": {"draft_vocab_size": 60},
    "llama, 5 streams": {"target_layer_ids": [1, 2, 4, 5, 6]},
    "llama, llama3 rope": {"rope_parameters": LLAMA3},
    "llama, attention_bias": {"attention_bias": True},
    "qwen3, 2 layers": {"layer_family": "qwen3"},
    "qwen3, fc_norm, pruned vocabulary": {"layer_family": "qwen3", "fc_norm": True, "draft_vocab_size": 60},
    "llama, bfloat16": {"dtype": torch.bfloat16},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--slots", type=int, default=23, help="committed slots before the mask slots")
    parser.add_argument("--drafts", type=int, default=6, help="K, drafted tokens")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest allowed difference in float32")
    args = parser.parse_args()
    args.target = save_target()
    names = ("torch", "transformers", "speculators", "specforge")
    result: dict[str, Any] = {"environment": {name: _version(name) for name in names}}
    result["settings"] = {"slots": args.slots, "drafts": args.drafts, "vocab_size": VOCAB, "hidden_size": WIDTH}
    result["speculators"] = {name: compare_with_speculators(overrides, args, seed) for seed, (name, overrides) in enumerate(CASES.items())}
    try:
        result["specforge"] = {f"{n} layers": compare_with_specforge(n, args) for n in (1, 4)}
    except ImportError as error:
        result["specforge"] = f"not importable: {error}"
    rows = [row for part in ("speculators", "specforge") if isinstance(result[part], dict) for row in result[part].values()]
    float32 = [row["largest_difference"] for row in rows if row["dtype"] == "float32"]
    result["largest_difference_float32"] = max(float32)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if max(float32) <= args.tolerance and all(row["same_drafts"] for row in rows) else 1


def compare_with_speculators(overrides: dict[str, Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Ours -> speculators folder -> their model; the K rows of one draft call by both."""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    torch.manual_seed(seed)
    overrides = dict(overrides)
    dtype = overrides.pop("dtype", torch.float32)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    shape |= {"intermediate_size": 48, "target_layer_ids": [2, 4, 5], "target_num_hidden_layers": 8}
    config = PEagleConfig(vocab_size=VOCAB, hidden_size=WIDTH, mask_token_id=MASK, draft_length=args.drafts, **(shape | overrides))
    config.target_name_or_path = args.target  # their loader reads the target's tables, and keeps the file's
    head = randomise(PEagleDrafterModel(config)).to(dtype).eval()
    if head.has_vocab_map:
        head.set_draft_vocabulary(torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values)
    with tempfile.TemporaryDirectory() as folder:
        speculators_format.write(head, Path(folder) / "head")
        config_there = PEagleSpeculatorConfig.from_pretrained(Path(folder) / "head")
        config_there.transformer_layer_config._attn_implementation = "eager"  # the default needs a compiler
        theirs = PEagleDraftModel.from_pretrained(Path(folder) / "head", config=config_there, dtype=dtype).eval()
    tokens, features = inputs(head, args.slots, dtype)
    return difference(head, tokens, features, speculators_logits(theirs, tokens, features, args.drafts), args.drafts)


@torch.no_grad()
def speculators_logits(model: Any, tokens: torch.Tensor, features: torch.Tensor, drafts: int) -> torch.Tensor:
    """
    Their training forward with a sampling that yields one rollout: all slots at depth 0, and the last slot's chain of
    depths 1 to K-1. Its rows for the last slot and the chain are what one draft call computes.
    """
    import speculators.models.peagle.core as core

    slots = tokens.shape[1]
    anchors = torch.cat([torch.arange(slots), torch.full((drafts - 1,), slots - 1)])
    depths = torch.cat([torch.zeros(slots, dtype=torch.long), torch.arange(1, drafts)])
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    original, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: (anchors, depths)
    pad = drafts - 1
    try:
        model(
            hidden_states=torch.nn.functional.pad(features, (0, 0, 0, pad)),
            input_ids=torch.nn.functional.pad(tokens, (0, pad)),
            document_ids=torch.zeros(1, slots + pad, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, slots + pad, WIDTH, dtype=features.dtype),
            num_depths=drafts,
        )
    except Exception as error:  # the loss, which is not of interest, may not run on such a sample
        if not seen:
            raise
        print(f"(after the logits: {type(error).__name__})", file=sys.stderr)
    finally:
        core.generate_cod_sample_indices = original
        hook.remove()
    return seen[0][0, -drafts:]


@torch.no_grad()
def compare_with_specforge(layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """
    SpecForge's model -> its folder -> ours; the K rows of one draft call by both. Its flex-attention call is given over
    to plain attention with the same mask: the kernel options it fixes are a GPU's.
    """
    from specforge.modeling.draft import peagle as specforge

    def attend(query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool, **_: Any) -> Any:
        return scaled_dot_product_attention(query, key, value, attn_mask=block_mask, enable_gqa=enable_gqa)

    specforge.compile_friendly_flex_attention = attend
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=VOCAB,
        draft_vocab_size=60,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=None,
    )
    theirs = randomise(specforge.PEagleDraftModel(config)).eval()
    ids = torch.randperm(VOCAB)[:60].sort().values
    theirs.d2t.copy_(ids - torch.arange(60))
    theirs.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        head = PEagleDrafterModel.from_pretrained(folder, mask_token_id=MASK, target_config=target_config()).eval()
    tokens, features = inputs(head, args.slots, torch.float32)
    masks = args.drafts - 1
    rows = args.slots + masks
    all_tokens = torch.cat([tokens, torch.full((1, masks), MASK)], dim=1)
    all_features = torch.cat([features, theirs.mask_hidden.expand(1, masks, -1)], dim=1)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden = theirs.backbone(
        theirs.embed_input_ids(all_tokens),
        theirs.project_hidden_states(all_features),
        attention_mask=causal,
        position_ids=torch.arange(rows)[None],
    )
    return difference(head, tokens, features, theirs.compute_logits(hidden)[0, -args.drafts :], args.drafts)


def save_target() -> str:
    """Folder of a random target of the heads' width."""
    folder = tempfile.mkdtemp()
    torch.manual_seed(99)
    LlamaForCausalLM(target_config()).save_pretrained(folder)
    return folder


def target_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=8, num_attention_heads=2)


def randomise(model: Any) -> Any:
    """Weights large enough that the rows differ clearly; norms near 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else (0.5 if "mask_hidden" in name else 0.2) * noise)
    return model


def inputs(head: PEagleDrafterModel, slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(3, MASK, (1, slots)), (2 * torch.randn(1, slots, head.config.feature_size)).to(dtype)


@torch.no_grad()
def difference(head: PEagleDrafterModel, tokens: torch.Tensor, features: torch.Tensor, theirs: torch.Tensor, drafts: int) -> dict[str, Any]:
    out = head.draft(tokens, features, torch.tensor([tokens.shape[1]]), drafts, head.new_cache(1))
    ours = out.logits[0]
    if ours.shape != theirs.shape:
        raise ValueError(f"logits have shapes {tuple(ours.shape)} and {tuple(theirs.shape)}")
    return {
        "dtype": str(head.dtype).removeprefix("torch."),
        "largest_difference": (ours.float() - theirs.float()).abs().max().item(),
        "mean_size_of_logits": theirs.float().abs().mean().item(),
        "same_drafts": bool(torch.equal(ours.argmax(-1), theirs.argmax(-1))),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    sys.exit(main())
