"""What a generation call did: drafted and accepted tokens, target passes, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers import GenerationMixin

# One for all copies of this code in the process (package, remote code), so that a block sees the calls of every head.
_collector: ContextVar[list[SpeculationStats] | None] = getattr(GenerationMixin, "_peagle_statistics", None) or ContextVar(
    "peagle_statistics", default=None
)
GenerationMixin._peagle_statistics = _collector  # type: ignore[attr-defined]


@dataclass
class SpeculationStats:
    """
    Statistics of one `generate()` call. All counts are per row summed over the batch unless said otherwise.

    Args:
        rounds (`list[tuple[int, int]]`): (drafted, accepted) of every verified row and round, in order. Tokens cut
            off by a stop or a length limit do not count as accepted.
        generated_tokens (`int`): Committed tokens.
        target_forwards (`int`): Forward passes of the target, prefill included.
        draft_forwards (`int`): Forward passes of the drafter.
        host_reads (`int`): Device-to-host reads the loop made to learn what was accepted.
        seconds (`dict[str, float]`): Wall time in "prefill", "draft", "verify" and "other".
        draft_graph, verify_graph (`str`): "captured" if these passes were replayed from a graph, else why not.
    """

    rounds: list[tuple[int, int]] = field(default_factory=list)
    generated_tokens: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    host_reads: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    draft_graph: str = "not asked for"
    verify_graph: str = "not asked for"

    @property
    def drafted(self) -> int:
        """Drafted tokens that the target checked."""
        return sum(drafted for drafted, _ in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return sum(accepted for _, accepted in self.rounds)

    @property
    def acceptance_length(self) -> float:
        """Mean committed tokens of a row per verifying target forward: accepted drafts plus the target's own token."""
        return 1.0 + self.accepted / len(self.rounds) if self.rounds else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the drafts at depth 1, 2, ... that were committed (a draft behind a rejected one is not)."""
        deepest = max((drafted for drafted, _ in self.rounds), default=0)
        shares = []
        for depth in range(1, deepest + 1):
            reached = [accepted >= depth for drafted, accepted in self.rounds if drafted >= depth]
            shares.append(sum(reached) / len(reached))
        return shares


@contextmanager
def collect_statistics() -> Iterator[list[SpeculationStats]]:
    """
    Collects the statistics of the P-EAGLE calls made inside the block, in this thread and context only.

    ```python
    with collect_statistics() as calls:
        target.generate(**inputs, assistant_model=head)
    print(calls[0].acceptance_length)
    ```
    """
    calls: list[SpeculationStats] = []
    token = _collector.set(calls)
    try:
        yield calls
    finally:
        _collector.reset(token)


def publish(stats: SpeculationStats) -> None:
    """Hands `stats` to the surrounding `collect_statistics` block, if there is one."""
    if (calls := _collector.get()) is not None:
        calls.append(stats)


class Stopwatch:
    """Adds up wall time by section. On an accelerator it records events and asks for their times only at the end."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._uses_events = device.type == "cuda"
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times the block under `name`."""
        if self._uses_events:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_time = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin_time

    def totals(self) -> dict[str, float]:
        """Seconds by section, with "other" for the rest since this object was made."""
        if self._events:
            self._events[-1][2].synchronize()
            for name, begin, end in self._events:
                self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
            self._events.clear()
        total = time.perf_counter() - self._start
        return {**self._seconds, "other": max(0.0, total - sum(self._seconds.values()))}
