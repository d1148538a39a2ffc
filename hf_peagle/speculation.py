"""How many tokens to draft in a round: a constant, or what measured costs and acceptance make fastest."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from .configuration_peagle import PEagleConfig

logger = logging.getLogger(__name__)

# generate() fills these in when nobody asked, so they cannot be told from explicit ones.
TRANSFORMERS_DEFAULT_LENGTH = 20
SCHEDULES = ("constant", "adaptive", "heuristic", "heuristic_transient")
_warned: set[tuple[int, int]] = set()


class DraftLength(Protocol):
    """Decides the number of drafts of the next round and learns from the last one."""

    longest: int

    def choose(self) -> int:
        """Drafts for the next round, `0 .. longest`; 0 is a step of plain decoding."""
        ...

    def observe(self, drafted: int, accepted: list[int], seconds: float) -> None:
        """What a round did: drafts per row, accepted drafts of every active row, wall time of the round."""
        ...


class ConstantDraftLength:
    """Always the same number of drafts."""

    def __init__(self, length: int) -> None:
        self.longest = length

    def choose(self) -> int:
        return self.longest

    def observe(self, drafted: int, accepted: list[int], seconds: float) -> None:
        pass


class Experience:
    """
    What is known of a (target, head, batch size) on this machine: seconds per round by number of drafts, and how often
    the draft at a depth is accepted once the one before it was. It only steers speed; tokens never depend on it.
    """

    SAMPLES = 9
    FORGET = 0.98
    PRIOR_WEIGHT = 2.0

    def __init__(self, longest: int, prior_acceptance: float = 0.6) -> None:
        self.seconds: dict[int, deque[float]] = {}
        self.reached = [self.PRIOR_WEIGHT] * longest
        self.accepted = [self.PRIOR_WEIGHT * prior_acceptance] * longest

    def add(self, drafted: int, accepted: list[int], seconds: float) -> None:
        """Adds one round."""
        self.seconds.setdefault(drafted, deque(maxlen=self.SAMPLES)).append(seconds)
        for depth in range(drafted):
            reached = sum(count >= depth for count in accepted)
            self.reached[depth] = self.FORGET * self.reached[depth] + reached
            self.accepted[depth] = self.FORGET * self.accepted[depth] + sum(count > depth for count in accepted)

    def rate(self, depth: int) -> float:
        """Probability that the draft at `depth` (0-based) is accepted, given that those before it were."""
        return self.accepted[depth] / self.reached[depth]

    def cost(self, drafted: int) -> float:
        """Median seconds of a round with `drafted` drafts, interpolated between the lengths that were tried."""
        known = sorted(self.seconds)
        if drafted in self.seconds:
            return statistics.median(self.seconds[drafted])
        below = max((k for k in known if k < drafted), default=None)
        above = min((k for k in known if k > drafted), default=None)
        if below is None or above is None:
            return statistics.median(self.seconds[known[-1] if above is None else known[0]])
        low, high = self.cost(below), self.cost(above)
        return low + (high - low) * (drafted - below) / (above - below)


class AdaptiveDraftLength:
    """
    Chooses the length that maximises expected tokens per second, `(1 + sum of P(depth accepted)) / cost(length)`.

    The first rounds try the recommended length, none and the longest, once each, since a cost curve is a property of
    the machine and the data type and cannot be guessed. When plain decoding wins, a short probe is made after 16 plain
    rounds, then 32, and so on: the text may have become easier.
    """

    FIRST_PROBE = 16
    LAST_PROBE = 256

    def __init__(self, longest: int, recommended: int, experience: Experience, lockstep_rows: int = 1) -> None:
        """`lockstep_rows`: rows that advance by the least accepted number among them."""
        self.longest = longest
        self.recommended = min(recommended, longest)
        self.experience = experience
        self.lockstep_rows = lockstep_rows
        self._to_try = [k for k in dict.fromkeys((self.recommended, 0, longest)) if k not in experience.seconds]
        self._plain_rounds = 0
        self._probe_after = self.FIRST_PROBE

    def choose(self) -> int:
        if self._to_try:
            return self._to_try[0]
        best = max(range(self.longest + 1), key=self.tokens_per_second)
        if best > 0:
            self._plain_rounds, self._probe_after = 0, self.FIRST_PROBE
            return best
        if self._plain_rounds >= self._probe_after:
            self._plain_rounds, self._probe_after = 0, min(2 * self._probe_after, self.LAST_PROBE)
            return max(range(1, self.longest + 1), key=self.tokens_per_second)
        return 0

    def observe(self, drafted: int, accepted: list[int], seconds: float) -> None:
        self.experience.add(drafted, accepted, seconds)
        if drafted in self._to_try:
            self._to_try.remove(drafted)
        if drafted == 0:
            self._plain_rounds += 1

    def tokens_per_second(self, length: int) -> float:
        """Expected committed tokens of a row per second with `length` drafts."""
        expected, reach = 1.0, 1.0
        for depth in range(length):
            reach *= self.experience.rate(depth)
            expected += reach**self.lockstep_rows
        return expected / max(self.experience.cost(length), 1e-9)


_experiences: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[int, int], Experience]]] = WeakKeyDictionary()


def experience_of(target: Any, head: Any, batch_size: int, longest: int) -> Experience:
    """The experience of this pair in this process; it goes away with the target or the head."""
    of_target = _experiences.setdefault(target, WeakKeyDictionary())
    return of_target.setdefault(head, {}).setdefault((batch_size, longest), Experience(longest))


def draft_length_policy(
    target: Any, head: Any, generation_config: GenerationConfig, batch_size: int, lockstep: bool, fixed: bool = False
) -> DraftLength:
    """
    The policy of a call.

    `num_assistant_tokens=K` of the call or a generation config drafts K tokens every round, or at most K with
    `num_assistant_tokens_schedule="adaptive"`. Without it the length is adaptive up to the head's trained depth, or
    constant at `PEagleConfig.draft_length` if `PEagleConfig.draft_schedule` is "constant".

    Args:
        lockstep: rows advance by the least accepted number among them.
        fixed: never adapt. Where drafts are sampled, their number decides what a seed generates, and measured times
            must not.
    """
    config: PEagleConfig = head.config
    schedule = generation_config.num_assistant_tokens_schedule
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"num_assistant_tokens_schedule={schedule!r}: expected one of {SCHEDULES}.")
    asked = _requested_length(generation_config, config)
    if asked is None:
        adaptive = not fixed and "adaptive" in (schedule, config.draft_schedule)
        longest = config.num_depths if adaptive else config.draft_length
    else:
        adaptive, longest = not fixed and schedule == "adaptive", asked
    if not adaptive or longest == 0:
        return ConstantDraftLength(longest)
    experience = experience_of(target, head, batch_size, longest)
    return AdaptiveDraftLength(longest, config.draft_length, experience, batch_size if lockstep else 1)


def _requested_length(generation_config: GenerationConfig, config: PEagleConfig) -> int | None:
    asked: Any = generation_config.num_assistant_tokens
    if asked is None or asked == TRANSFORMERS_DEFAULT_LENGTH:
        return None
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        raise ValueError(f"num_assistant_tokens={asked!r}: give the number of tokens to draft per round, or 0 for plain decoding.")
    if asked > config.max_position_embeddings:
        raise ValueError(
            f"num_assistant_tokens={asked}: more than the head has positions (max_position_embeddings={config.max_position_embeddings}). "
            f"Give a number up to its {config.num_depths} trained depths."
        )
    if asked > config.num_depths and (asked, config.num_depths) not in _warned:
        _warned.add((asked, config.num_depths))
        logger.warning(
            "num_assistant_tokens=%d is more than the %d depths this head was trained for; drafts beyond them are rarely accepted.",
            asked,
            config.num_depths,
        )
    return asked


def affordable_draft_length(wanted: int, remaining: int) -> int:
    """Drafts that can still be committed when `remaining` tokens fit: the target adds one of its own to any draft."""
    return max(0, min(wanted, remaining - 1))
