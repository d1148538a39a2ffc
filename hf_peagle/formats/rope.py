"""Rotary settings in both notations: `rope_theta` + `rope_scaling` (older) and `rope_parameters` (transformers 5)."""

from __future__ import annotations

import logging
from typing import Any

from ..configuration_peagle import ROPE_TYPES, PEagleConfig
from .common import FormatError, Values

logger = logging.getLogger(__name__)

DEFAULT_THETA = 10000.0
_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def read_rope(config: Values, head_dim: int, theta_only: bool = False) -> dict[str, Any]:
    """
    `rope_parameters` for [`PEagleConfig`] from either notation.

    Args:
        theta_only: the trainer that wrote this config used no scaling even where its config names one; serving the
            head with the scaling would show it other angles than in training.
    """
    # An old reader sees only the old keys and a new one prefers the new: where a file has both, they should agree.
    given = config.section("rope_parameters")
    scaling = given if given.values else config.section("rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise scaling.error("rope_type" if "rope_type" in scaling else "type", f"expected one of {ROPE_TYPES}.")
    for source in (scaling, config):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "a head rotates all of head_dim.")
    if rope_type == "default" or theta_only:
        if rope_type != "default":
            logger.warning(
                "%s names rope type %r, but the trainer of this format rotates by rope_theta alone; the scaling is left out, as in training.",
                scaling.where,
                rope_type,
            )
        return {"rope_type": "default", "rope_theta": theta}
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": theta}
    for key in _NUMBERS:
        if (value := scaling.number(key)) is not None:
            rope[key] = value
    for key in ("short_factor", "long_factor"):
        factors = scaling.values.get(key)
        if factors is None:
            continue
        numbers = isinstance(factors, list) and all(isinstance(f, int | float) and f > 0 for f in factors)
        if not numbers or len(factors) != head_dim // 2:
            raise scaling.error(key, f"expected {head_dim // 2} positive numbers, half of head_dim.")
        rope[key] = factors
    if isinstance(scaling.values.get("truncate"), bool):
        rope["truncate"] = scaling.values["truncate"]
    if "original_max_position_embeddings" not in rope and "original_max_position_embeddings" in config:
        rope["original_max_position_embeddings"] = config.integer("original_max_position_embeddings")
    for key in _NEEDED.get(rope_type, ()):
        if key not in rope:
            raise FormatError(f"{scaling.where}: {key} is missing, which rope type {rope_type!r} needs.")
    return rope


def write_rope(config: PEagleConfig) -> dict[str, Any]:
    """Both notations of a head's rotary settings, which say the same."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_theta": rope.get("rope_theta", DEFAULT_THETA),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }
