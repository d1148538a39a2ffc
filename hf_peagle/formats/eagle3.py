"""EAGLE-3 heads with a flat config (SafeAILab, SpecForge/SGLang, AngelSlim): read as autoregressive drafters."""

from __future__ import annotations

from .common import Checkpoint, ReadOptions, Values
from .network import Described, ForeignHead, build_head

SAFEAILAB, SPECFORGE, ANGELSLIM = "eagle3-safeailab", "eagle3-specforge", "eagle3-angelslim"
NAMES = (SAFEAILAB, SPECFORGE, ANGELSLIM)


def family(values: Values) -> str:
    """Which trainer wrote an EAGLE-3 config; the tensors are the same, so this only names the format."""
    architectures = values.texts("architectures")
    if "target_model_type" in values or "Eagle3LlamaForCausalLM" in architectures:
        return ANGELSLIM
    if "eagle_config" in values or "LlamaForCausalLMEagle3" in architectures:
        return SPECFORGE
    return SAFEAILAB


def read(checkpoint: Checkpoint, options: ReadOptions) -> ForeignHead:
    """
    A missing `embed_tokens` or `lm_head` is taken from the target at generation. SafeAILab's own loader ignores
    `d2t` and `t2d` where draft and target vocabulary have one size, and so does this one.
    """
    values = Values(checkpoint.config, f"{checkpoint.name}/config.json")
    vocab, draft_vocab = values.integer("vocab_size"), values.integer("draft_vocab_size")
    name = family(values)
    if name == SAFEAILAB and vocab is not None and vocab == draft_vocab:
        kept = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in ("d2t", "t2d")}
        checkpoint = Checkpoint(checkpoint.name, checkpoint.config, kept, checkpoint.base_model)
    return build_head(checkpoint, Described(name, "eagle3", values), options)
