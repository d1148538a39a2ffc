"""NeMo Automodel P-EAGLE heads (names begin with `model.`): read only."""

from __future__ import annotations

from .common import Checkpoint, ReadOptions, Values
from .network import Described, ForeignHead, build_head

NAME = "nemo"


def read(checkpoint: Checkpoint, options: ReadOptions) -> ForeignHead:
    """`num_depths` of the config is the number of depths the head was trained for, and a usable drafting length."""
    values = Values(checkpoint.config, f"{checkpoint.name}/config.json")
    return build_head(checkpoint, Described(NAME, "peagle", values), options)
