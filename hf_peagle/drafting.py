"""The drafter's side of one call: what it has read, and asking it for the next drafts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from .cuda_graphs import DraftGraphs, draft_graphs, refusal
from .verification import Drafts

LONGEST_STATIC_BUFFERS = 1 << 18  # columns


class DraftState:
    """
    Feeds a head with committed (token, feature) rows and asks it for drafts.

    Rows that are committed while nothing is drafted wait here and go into the next pass, so a round costs at most one
    drafter pass and a round without drafts costs none.
    """

    def __init__(
        self,
        head: Any,
        target: PreTrainedModel,
        batch_size: int,
        columns: int,
        stack: contextlib.ExitStack,
        warpers: LogitsProcessorList | None = None,
    ) -> None:
        """
        Args:
            columns: drafter slots the call can need, for buffers that must not grow.
            stack: closed when the call ends; gives captured graphs back.
            warpers: given when drafts are to be sampled; they shape the drafter's distribution as the target's.
        """
        self.head = head
        self.device: torch.device = head.device
        self.warpers = warpers
        self.graphs: DraftGraphs | None = None
        self.graph_note = refusal(head, warpers is not None) or "captured"
        if self.graph_note == "captured" and columns > LONGEST_STATIC_BUFFERS:
            self.graph_note = f"the call allows {columns} tokens, too many to reserve in advance"
        if self.graph_note == "captured":
            self.graphs = stack.enter_context(draft_graphs(head, target, batch_size, columns))
            if self.graphs is None:
                self.graph_note = "another thread is using the graphs"
        self.borrowed = self.graphs.borrowed if self.graphs else head.borrow(target)
        self.cache = self.graphs.cache if self.graphs else head.new_cache(batch_size)
        self.token_ids = head.draft_token_ids if warpers is not None else None
        self.lengths = [0] * batch_size
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []

    def feed(self, tokens: torch.Tensor, features: torch.Tensor, counts: list[int]) -> None:
        """
        Args:
            tokens (`torch.Tensor`): `[batch, n]` int64 committed tokens, left-aligned.
            features (`torch.Tensor`): `[batch, n, feature_size]`, the feature one position before each token.
            counts (`list[int]`): valid entries per row; what follows them is ignored.
        """
        longest = max(counts)
        if longest:
            self._waiting.append((tokens[:, :longest], features[:, :longest], counts))

    def propose(self, num_tokens: int) -> Drafts:
        """Drafts `num_tokens` tokens for every row in one pass."""
        tokens, features, counts = self._merge()
        self._waiting.clear()
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        tokens, features = tokens.to(self.device), features.to(self.device)
        row_counts = torch.tensor(counts, device=self.device)
        if self.graphs is not None:
            drafted = self.graphs.draft(tokens, features, row_counts, num_tokens)
            if drafted is not None:
                self.cache.longest = max(self.lengths)
                return Drafts(drafted)
            self.graph_note = next(iter(self.graphs.failed.values()), self.graph_note)
        out = self.head.draft(
            tokens,
            features,
            row_counts,
            num_tokens,
            self.cache,
            borrowed=self.borrowed,
            sample=None if self.warpers is None else self._sample,
            longest=max(self.lengths),
        )
        if out.probabilities is None:
            return Drafts(out.tokens)
        return Drafts(out.tokens, out.probabilities, out.draft_ids, self.token_ids)

    def _merge(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        if len(self._waiting) == 1:
            return self._waiting[0]
        tokens = torch.cat([block[0] for block in self._waiting], dim=1)
        features = torch.cat([block[1] for block in self._waiting], dim=1)
        counts = [sum(per_row) for per_row in zip(*(block[2] for block in self._waiting), strict=True)]
        valid = torch.cat([_valid(block[2], block[0]) for block in self._waiting], dim=1)
        tokens, features = align_left(valid, tokens, features)
        return tokens[:, : max(counts)], features[:, : max(counts)], counts

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, k, vocab = logits.shape
        assert self.warpers is not None
        flat = logits.float().view(batch * k, vocab)
        dummy = torch.zeros(batch * k, 1, dtype=torch.long, device=logits.device)
        probabilities = self.warpers(dummy, flat).softmax(dim=-1)
        drafted = torch.multinomial(probabilities, num_samples=1)
        return drafted.view(batch, k), probabilities.view(batch, k, vocab)


def align_left(valid: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Moves the entries of `[batch, n, ...]` tensors where `valid` (`[batch, n]` bool) to the front of their rows."""
    order = torch.argsort(~valid, dim=1, stable=True)
    moved = []
    for tensor in tensors:
        index = order.to(tensor.device)
        while index.dim() < tensor.dim():
            index = index[..., None]
        moved.append(torch.take_along_dim(tensor, index, dim=1))
    return moved


def _valid(counts: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[1], device=like.device) < torch.tensor(counts, device=like.device)[:, None]
