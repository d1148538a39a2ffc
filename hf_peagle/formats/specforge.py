"""SpecForge P-EAGLE heads (`PEagleDraftModel`): read only."""

from __future__ import annotations

from .common import Checkpoint, ReadOptions, Values
from .network import Described, ForeignHead, build_head

NAME = "specforge"


def read(checkpoint: Checkpoint, options: ReadOptions) -> ForeignHead:
    """
    The file lacks the mask token's id, so `mask_token_id` must be given unless someone added it. SpecForge rotates by
    `rope_theta` alone, even where the config (copied from the target) names a scaling.
    """
    values = Values(checkpoint.config, f"{checkpoint.name}/config.json")
    return build_head(checkpoint, Described(NAME, "peagle", values, rope_by_theta_only=True), options)
