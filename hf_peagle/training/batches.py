"""From documents to packed training examples, in an order that only depends on the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import TrainingConfig
from .features import Document, TargetOutputs
from .rows import Rows, sample_rows


class DocumentSource(Protocol):
    """Documents with the target's outputs: a `FeatureCache`, or the target itself."""

    def lengths(self) -> list[int]:
        """Tokens per document."""
        ...

    def load(self, index: int, max_length: int | None = None) -> tuple[Document, TargetOutputs]:
        """One document and what the target says about it."""
        ...


@dataclass
class Example:
    """
    A pack of documents, `T` tokens in all.

    Attributes:
        input_ids (`torch.Tensor`): `[T]` int64, the token of each *slot*: slot `j` holds token `x_{j+1}`.
        outputs (`TargetOutputs`): the target's side.
        next_tokens (`torch.Tensor`): `[T]` int64, draft id of the token after each position, -1 outside the vocabulary.
        rows (`Rows`): what is trained.
    """

    input_ids: torch.Tensor
    outputs: TargetOutputs
    next_tokens: torch.Tensor
    rows: Rows


def seeded(*numbers: int) -> torch.Generator:
    """A CPU generator that depends on all the numbers."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 0x9E3779B97F4A7C15) % 2**63
    return torch.Generator().manual_seed(state)


def pack_order(lengths: Sequence[int], pack_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """A shuffled order of all documents, cut into packs of at most `pack_tokens` tokens."""
    packs: list[list[int]] = []
    used = pack_tokens
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if used + lengths[index] > pack_tokens:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += lengths[index]
    return packs


def label_weights(document: Document, prompt_weight: float) -> torch.Tensor:
    """`[N]` fp32: 1 for tokens of the answers, `prompt_weight` for the others."""
    return torch.where(document.label, 1.0, prompt_weight)


def draft_ids(tokens: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Target ids to draft ids by the ascending draft vocabulary `token_ids`; -1 outside it."""
    place = torch.searchsorted(token_ids, tokens).clamp(max=token_ids.numel() - 1)
    return torch.where(token_ids[place] == tokens, place, -1)


def make_example(
    parts: Sequence[tuple[Document, TargetOutputs]],
    token_ids: torch.Tensor,
    config: TrainingConfig,
    num_depths: int,
    generator: torch.Generator,
) -> Example:
    """Packs documents and samples their rows. `token_ids` is the draft vocabulary, ascending."""
    documents = [document for document, _ in parts]
    tokens = torch.cat([d.input_ids for d in documents])
    weights = torch.cat([label_weights(d, config.prompt_weight) for d in documents])
    depth_weights = config.depth_weights[:num_depths] or None
    rows = sample_rows([len(d) for d in documents], weights, num_depths, config.retention, generator, depth_weights)
    shifted = torch.roll(tokens, -1)
    # The slot behind a document's last token has no next token of its own; no row reads it.
    outputs = TargetOutputs.cat([out for _, out in parts])
    return Example(shifted, outputs, draft_ids(shifted, token_ids), rows)
