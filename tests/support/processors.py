"""Logits processors and stopping criteria of a user: unknown to the package and with a memory of their calls."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria


class RecordingProcessor(LogitsProcessor):
    """Keeps every prefix it is called with, and lets the number of calls so far change the scores."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(input_ids.tolist())
        vocab = scores.shape[-1]
        shift = torch.arange(vocab, device=scores.device).add(7 * len(self.prefixes)).remainder(11).float()
        return scores + shift


class RecordingCriterion(StoppingCriteria):
    """Keeps every prefix it is called with and never stops."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []
        self.scores: list[int | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.prefixes.append(input_ids.tolist())
        self.scores.append(None if scores is None else len(scores))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class StopAfterCalls(StoppingCriteria):
    """Stops every row at the n-th call: a criterion that lives on being called once per token."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


class LastTokenIs(StoppingCriteria):
    """Stops a row when its last token is `token`."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


class Contains(StoppingCriteria):
    """Stops a row that has `token` anywhere behind column `start`."""

    def __init__(self, token: int, start: int) -> None:
        self.token, self.start = token, start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, self.start :] == self.token).any(dim=1)
