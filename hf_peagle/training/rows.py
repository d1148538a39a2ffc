"""Rows of a training example: conditional drop-down sampling, labels, the attention rule, and sequence partition.

A row is a pair (anchor `a`, depth `d`). It stands at rotary position `a + d` and predicts token `x_{a+d+2}`. At depth 0 it
reads token `x_{a+1}` and feature `h_a`; at depth `d >= 1` it is a mask slot. It may attend to a row `(a', d')` of its own
document iff `d' = 0 and a' <= a`, or `a' = a and d' <= d` (P-EAGLE, arXiv 2602.01469).

Rows are kept in the order (anchor, depth). So a rollout - an anchor and its mask slots - is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Rows:
    """
    Rows of one packed example of `T` tokens, as `[R]` tensors in the order (anchor, depth).

    Attributes:
        anchor (`torch.Tensor`): int64, index of the anchor slot in the pack.
        depth (`torch.Tensor`): int64.
        document (`torch.Tensor`): int64, number of the document in the pack.
        position (`torch.Tensor`): int64, rotary position, counted from the start of the document.
        weight (`torch.Tensor`): float32, weight in the loss; 0 for rows that are only context.
    """

    anchor: torch.Tensor
    depth: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    weight: torch.Tensor

    def __len__(self) -> int:
        return self.anchor.numel()

    @property
    def row_index(self) -> torch.Tensor:
        """`[R]` int64 for `PEagleDrafterModel.forward`: the slot of a row, or -1 for a mask slot."""
        return torch.where(self.depth == 0, self.anchor, -1)

    @property
    def label(self) -> torch.Tensor:
        """`[R]` int64: index in the pack of the target output that predicts the row's token, `a + d + 1`."""
        return self.anchor + self.depth + 1

    def select(self, index: torch.Tensor) -> Rows:
        """The rows of `index` (bool or ascending int64)."""
        return Rows(self.anchor[index], self.depth[index], self.document[index], self.position[index], self.weight[index])

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on `device`."""
        parts = (self.anchor, self.depth, self.document, self.position, self.weight)
        return Rows(*(part.to(device) for part in parts))

    def attention_mask(self) -> torch.Tensor:
        """`[1, 1, R, R]` bool, the attention rule written out. For small examples and tests."""
        return may_attend(self, self)[None, None]


def may_attend(queries: Rows, keys: Rows) -> torch.Tensor:
    """`[queries, keys]` bool: the attention rule of the module docstring."""
    anchor_q, anchor_k = queries.anchor[:, None], keys.anchor[None]
    context = (keys.depth == 0)[None] & (anchor_k <= anchor_q)
    rollout = (anchor_k == anchor_q) & (keys.depth[None] <= queries.depth[:, None])
    return (queries.document[:, None] == keys.document[None]) & (context | rollout)


def sample_rows(
    lengths: Sequence[int],
    label_weight: torch.Tensor,
    num_depths: int,
    retention: float = 0.8,
    generator: torch.Generator | None = None,
    depth_weights: Sequence[float] | None = None,
) -> Rows:
    """
    Conditional drop-down (COD) sampling over a pack of documents.

    Every slot whose next token but one exists is a depth-0 row. The `n` of them whose label counts start a rollout;
    a random `n * retention**d` rollouts reach depth `d`, chosen among those that reached `d - 1` and whose label at
    depth `d` counts too. So a rollout never crosses the end of its document or a token nobody should learn.

    Args:
        lengths (`Sequence[int]`): tokens per document; `T` is their sum.
        label_weight (`torch.Tensor`): `[T]` float, weight of token `t` as a label; 0: not a label.
        num_depths (`int`): depths, counting depth 0.
        retention (`float`): share of rollouts that survive each further depth, in (0, 1].
        generator (`torch.Generator`, *optional*): source of the randomness.
        depth_weights (`Sequence[float]`, *optional*): factor on the weight of each depth's rows.
    """
    if num_depths < 1:
        raise ValueError(f"num_depths={num_depths}: at least 1 is needed (depth 0 is the ordinary next-token row)")
    if not 0.0 < retention <= 1.0:
        raise ValueError(f"retention={retention}: the share of rollouts kept per depth must lie in (0, 1]")
    if depth_weights is not None and len(depth_weights) != num_depths:
        raise ValueError(f"depth_weights has {len(depth_weights)} entries, expected one per depth ({num_depths})")
    total = sum(lengths)
    if label_weight.shape != (total,):
        raise ValueError(f"label_weight has shape {tuple(label_weight.shape)}, expected ({total},), one per token")
    sizes = torch.tensor(list(lengths), dtype=torch.long)
    document = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    ends = torch.cumsum(sizes, 0)
    index = torch.arange(total)
    end, start = ends[document], (ends - sizes)[document]

    def label_of(anchors: torch.Tensor, depth: int) -> torch.Tensor:
        """Label weight of the anchors' rows at `depth`, 0 beyond the document."""
        token = anchors + depth + 2
        inside = token < end[anchors]
        return torch.where(inside, label_weight[token.clamp(max=total - 1)], 0.0)

    anchors = index[index + 2 < end]
    weight = label_of(anchors, 0).float()
    anchor_parts, depth_parts, weight_parts = [anchors], [torch.zeros_like(anchors)], [weight]
    alive = anchors[weight > 0]
    rollouts = alive.numel()
    for depth in range(1, num_depths):
        alive = alive[label_of(alive, depth) > 0]
        keep = min(alive.numel(), int(rollouts * retention**depth + 0.5))
        if keep < alive.numel():
            alive = alive[torch.randperm(alive.numel(), generator=generator)[:keep].sort().values]
        anchor_parts.append(alive)
        depth_parts.append(torch.full_like(alive, depth))
        weight_parts.append(label_of(alive, depth).float())
    anchor, depths, weight = torch.cat(anchor_parts), torch.cat(depth_parts), torch.cat(weight_parts)
    order = torch.argsort(anchor * num_depths + depths)
    anchor, depths, weight = anchor[order], depths[order], weight[order]
    if depth_weights is not None:
        weight = weight * torch.tensor(list(depth_weights), dtype=torch.float32)[depths]
    return Rows(anchor, depths, document[anchor], anchor - start[anchor] + depths, weight)


def partition(rows: Rows, segments: int) -> list[Rows]:
    """
    Splits an example for gradient accumulation within the sequence, in the manner of P-EAGLE's Algorithm 1.

    Each rollout is owned by one segment, with all its depths; segments own about equally many rows. A segment further
    carries, at weight 0, the depth-0 rows before its own that they attend to. The gradients of the segments' losses,
    divided by one common constant, sum to the gradient of the whole example's loss.
    """
    if segments < 1:
        raise ValueError(f"segments={segments}: at least 1 is needed")
    starts = torch.nonzero(rows.depth == 0).view(-1)
    wanted = [len(rows) * s // segments for s in range(1, segments)]
    cuts = torch.searchsorted(starts, torch.tensor(wanted, dtype=torch.long)).tolist()
    bounds = [0, *[int(starts[c]) if c < starts.numel() else len(rows) for c in cuts], len(rows)]
    parts = []
    index = torch.arange(len(rows))
    for begin, stop in zip(bounds[:-1], bounds[1:], strict=True):
        if begin == stop:
            continue
        first_document = rows.document[begin]
        context = (rows.depth == 0) & (rows.document == first_document) & (index < begin)
        part = rows.select(context | ((index >= begin) & (index < stop)))
        part.weight[: int(context.sum())] = 0.0
        parts.append(part)
    return parts
