"""Which format a checkpoint is in, from its config and tensor names alone."""

from __future__ import annotations

from . import eagle3, nemo, specforge, speculators, vllm
from .common import Checkpoint, FormatError, Values
from .network import canonical_name

OURS = "peagle"
FORMATS = (OURS, vllm.NAME, *speculators.NAMES.values(), specforge.NAME, nemo.NAME, *eagle3.NAMES)


def detect(checkpoint: Checkpoint) -> str:
    """One of `FORMATS`. Raises `FormatError` saying what is missing if it is none of them."""
    values = Values(checkpoint.config, f"{checkpoint.name}/config.json")
    if values.text("model_type") == OURS:
        return OURS
    kind = values.text("speculators_model_type")
    if kind is not None:
        if kind not in speculators.NAMES:
            raise values.error("speculators_model_type", f"this library reads {tuple(speculators.NAMES)}.")
        return speculators.NAMES[kind]
    names = {canonical_name(name) for name in checkpoint.tensors}
    for needed in ("fc.weight", "layers.0.hidden_norm.weight"):
        if needed not in names:
            other = " (or midlayer.hidden_norm.weight)" if needed.startswith("layers") else ""
            raise FormatError(
                f"{checkpoint.name}: {needed}{other} is missing, so this is neither a P-EAGLE nor an EAGLE-3 head. "
                f"Its config has model_type {values.values.get('model_type')!r}, architectures {values.values.get('architectures')!r}."
            )
    architectures = values.texts("architectures")
    if "mask_hidden" in names:
        if any(name.startswith("model.") for name in checkpoint.tensors):
            return nemo.NAME
        return specforge.NAME if "PEagleDraftModel" in architectures else vllm.NAME
    promises = [key for key in ("ptd_token_id", "pard_token", "mask_token_id", "parallel_drafting") if key in values]
    promises += [name for name in architectures if name.lower().startswith("peagle")]
    if promises:
        raise FormatError(
            f"{checkpoint.name}: mask_hidden is missing, though the config ({promises[0]}) promises a P-EAGLE head: the "
            "export dropped it, and without it mask slots have no input. For an EAGLE-3 head, pass checkpoint_format="
            f"{eagle3.SPECFORGE!r}."
        )
    return eagle3.family(values)
