"""Acceptance length of a head on held-out greedy answers, without running the target again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .batches import DocumentSource, Example, draft_ids
from .features import Document, TargetOutputs
from .objective import DraftObjective
from .rows import sample_rows


@dataclass
class Counts:
    """Tally over documents. Lists are per depth."""

    rounds: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    leading: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """
        `acceptance_length`: tokens per target forward of greedy decoding. `accepted_share[i]`: share of its rounds that
        accept draft `i`. `accuracy[d]`: share of all anchors whose row at depth `d` is right; `conditional[d]`: among
        those whose shallower rows are all right.
        """
        prior = [self.anchors[0], *self.leading[:-1]] if self.anchors else []
        return {
            "acceptance_length": self.tokens / max(1, self.rounds),
            "accepted_share": [a / max(1, self.rounds) for a in self.accepted],
            "accuracy": [c / max(1, n) for c, n in zip(self.correct, self.anchors, strict=True)],
            "conditional": [c / max(1, n) for c, n in zip(self.leading, prior, strict=True)],
            "rounds": self.rounds,
            "tokens": self.tokens,
        }


def spans(label: torch.Tensor) -> list[tuple[int, int]]:
    """Half-open runs of True in a `[N]` bool tensor."""
    padded = torch.cat([torch.zeros(1, dtype=torch.bool), label, torch.zeros(1, dtype=torch.bool)]).int()
    change = padded.diff()
    starts, stops = (change == 1).nonzero().view(-1).tolist(), (change == -1).nonzero().view(-1).tolist()
    return list(zip(starts, stops, strict=True))


@torch.no_grad()
def drafts_of(objective: DraftObjective, document: Document, outputs: TargetOutputs, token_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """
    `[N, num_drafts]` int64: entry `(a, d)` is the target id drafted for token `a + d + 2` from anchor `a`; -1 where the
    answer ends before it.
    """
    head = objective.head
    rows = sample_rows([len(document)], document.label.float(), num_drafts)
    shifted = torch.roll(document.input_ids, -1)
    example = Example(shifted, outputs, draft_ids(shifted, token_ids), rows)
    device = next(head.parameters()).device
    example = Example(
        shifted.to(device),
        TargetOutputs(outputs.streams.to(device), outputs.last_hidden, outputs.log_normaliser, outputs.top1),
        example.next_tokens,
        rows.to(device),
    )
    states = objective.states(example, example.rows)
    counted = (rows.weight > 0).nonzero().view(-1)
    weight = objective.output_weight().to(states.dtype)
    drafts = torch.full((len(document), num_drafts), -1, dtype=torch.long)
    for piece in counted.split(1024):
        best = (states[piece.to(device)] @ weight.t()).argmax(dim=-1).cpu()
        drafts[rows.anchor[piece], rows.depth[piece]] = token_ids[best]
    return drafts


def tally(document: Document, drafts: torch.Tensor, num_drafts: int, counts: Counts) -> None:
    """
    Walks greedy decoding over the known answer: each round starts at the last committed token and accepts the longest
    run of drafts equal to what follows. Exact for greedy answers, as the target's continuation is the answer itself.
    """
    for name in ("accepted", "anchors", "correct", "leading"):
        if not getattr(counts, name):
            setattr(counts, name, [0] * num_drafts)
    ids = document.input_ids
    for start, stop in spans(document.label):
        anchor = max(0, start - 1)
        runs: dict[int, int] = {}
        for a in range(anchor, stop - 2):
            last = min(num_drafts, stop - a - 2)
            hits = (drafts[a, :last] == ids[a + 2 : a + 2 + last]).tolist()
            run = 0
            while run < last and hits[run]:
                run += 1
            runs[a] = run
            for d in range(last):
                counts.anchors[d] += 1
                counts.correct[d] += hits[d]
                counts.leading[d] += d < run
        while anchor < stop - 2:
            counts.rounds += 1
            counts.tokens += min(runs[anchor] + 1, stop - anchor - 2)
            for d in range(runs[anchor]):
                counts.accepted[d] += 1
            anchor += runs[anchor] + 1


@torch.no_grad()
def evaluate(
    objective: DraftObjective,
    source: DocumentSource,
    indices: Iterable[int],
    token_ids: torch.Tensor,
    num_drafts: int = 4,
    max_length: int | None = None,
    bf16: bool = False,
) -> dict[str, Any]:
    """
    Acceptance of the head on documents of `source`: `Counts.summary()` over all rounds, and `by_source` with each prompt
    set's acceptance length. The answers must be greedy ones for the acceptance length to be that of greedy decoding.
    """
    was_training = objective.training
    objective.eval()
    total = Counts()
    by_source: dict[str, Counts] = defaultdict(Counts)
    device = next(objective.head.parameters()).device.type
    for index in indices:
        document, outputs = source.load(index, max_length)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            drafts = drafts_of(objective, document, outputs, token_ids, num_drafts)
        tally(document, drafts, num_drafts, total)
        tally(document, drafts, num_drafts, by_source[document.source])
    objective.train(was_training)
    summary = total.summary()
    summary["by_source"] = {name: counts.summary()["acceptance_length"] for name, counts in sorted(by_source.items())}
    return summary
