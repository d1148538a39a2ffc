"""Choice of the draft vocabulary: the target tokens a head can draft."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .features import Document


def count_tokens(documents: Iterable[Document], vocab_size: int, prompt_weight: float = 0.1) -> torch.Tensor:
    """`[vocab_size]` float64: how often each token occurs in answers, plus `prompt_weight` times elsewhere."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for document in documents:
        weight = torch.where(document.label, 1.0, prompt_weight).double()
        counts.index_add_(0, document.input_ids, weight)
    return counts


def choose_vocabulary(counts: torch.Tensor, size: int | None = None, coverage: float | None = None, always: Iterable[int] = ()) -> torch.Tensor:
    """
    The `size` most frequent tokens, or as many as cover `coverage` of the counted tokens, ascending (int64).

    Tokens in `always` (end-of-sequence ids) come first. Ties - unseen tokens above all - go to the lowest ids, which
    byte-pair vocabularies give to the most frequent merges.
    """
    if (size is None) == (coverage is None):
        raise ValueError(f"size={size}, coverage={coverage}: give exactly one of them")
    counts = counts.clone()
    for token in always:
        counts[token] = float("inf")
    order = torch.argsort(counts, descending=True, stable=True)
    if size is None:
        finite = torch.where(torch.isinf(counts), 0.0, counts)[order]
        share = torch.cumsum(finite, 0) / finite.sum().clamp(min=1e-9)
        size = int((share < coverage).sum()) + 1
    if not 1 <= size <= counts.numel():
        raise ValueError(f"size={size}: must lie in [1, {counts.numel()}], the target's vocabulary")
    return order[:size].sort().values


def coverage_of(token_ids: torch.Tensor, counts: torch.Tensor) -> float:
    """Share of the counted tokens that lie in `token_ids`."""
    return float(counts[token_ids].sum() / counts.sum().clamp(min=1e-9))
