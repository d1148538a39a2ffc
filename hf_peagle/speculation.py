"""How many tokens to draft in a round."""

from __future__ import annotations

import logging
from typing import Any

from transformers import GenerationConfig

from .configuration_peagle import PEagleConfig

logger = logging.getLogger(__name__)

# generate() fills this in when nobody asked for a number, so it cannot be told from an explicit 20.
TRANSFORMERS_DEFAULT = 20
_warned: set[tuple[int, int]] = set()


def requested_draft_length(generation_config: GenerationConfig, head_config: PEagleConfig) -> int:
    """
    The number of tokens to draft: `num_assistant_tokens` of the call or of a generation config, else the head's own
    recommendation (`PEagleConfig.draft_length`). 0 means plain decoding.
    """
    asked: Any = generation_config.num_assistant_tokens
    if asked is None or asked == TRANSFORMERS_DEFAULT:
        return head_config.draft_length
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        raise ValueError(
            f"num_assistant_tokens={asked!r}: give the number of tokens to draft per round, or 0 for plain decoding."
        )
    if asked > head_config.num_depths and (asked, head_config.num_depths) not in _warned:
        _warned.add((asked, head_config.num_depths))
        logger.warning(
            "num_assistant_tokens=%d is more than the %d depths this head was trained for; drafts beyond them are rarely "
            "accepted.",
            asked,
            head_config.num_depths,
        )
    return asked


def affordable_draft_length(wanted: int, remaining: int) -> int:
    """Drafts that can still be committed when `remaining` tokens fit: the target adds one of its own to any draft."""
    return max(0, min(wanted, remaining - 1))
