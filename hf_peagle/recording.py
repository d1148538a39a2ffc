"""Collects what `return_dict_in_generate` asks for: one entry per generated token, shaped as plain decoding's."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from .target_state import TargetState

Layers = tuple[torch.Tensor, ...]


class Recorder:
    """
    Rows advance at their own pace, so entries are kept per row and stacked at the end. Steps that a finished row did
    not take part in are zeros (plain decoding has there what the target says about padding).
    """

    def __init__(self, generation_config: GenerationConfig, batch_size: int) -> None:
        wanted = generation_config.return_dict_in_generate
        self.batch_size = batch_size
        self.wants_scores = bool(wanted and generation_config.output_scores)
        self.wants_logits = bool(wanted and generation_config.output_logits)
        self.wants_states = bool(wanted and generation_config.output_hidden_states)
        self.wants_attentions = bool(wanted and generation_config.output_attentions)
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._states: list[list[Layers]] = [[] for _ in range(batch_size)]
        self._attentions: list[list[Layers]] = [[] for _ in range(batch_size)]
        self._prefill_states: Layers | None = None
        self._prefill_attentions: Layers | None = None

    def prefill(self, outputs: Any) -> None:
        """Keeps the whole-prompt entries that plain decoding returns as the first step's."""
        self.wants_states = self.wants_states and outputs.hidden_states is not None
        if self.wants_states:
            self._prefill_states = outputs.hidden_states
        if self.wants_attentions and outputs.attentions is not None and outputs.attentions[0] is not None:
            self._prefill_attentions = outputs.attentions

    def tokens(self, row: int, count: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """The first `count` of a row's `[q, vocab]` scores and logits produced committed tokens."""
        if self.wants_scores:
            self._scores[row] += [scores[i].clone() for i in range(count)]
        if self.wants_logits:
            self._logits[row] += [logits[i].clone() for i in range(count)]

    def scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        """What plain decoding hands to stopping criteria; only asked while rows advance together."""
        return self._stack(self._scores) if self.wants_scores else None

    def forward(self, row: int, count: int, outputs: Any, target: TargetState, q: int) -> None:
        """The first `count` of a row's `q` verified positions, before `target` keeps them."""
        if self.wants_states:
            self._states[row] += [tuple(state[row, i : i + 1].clone() for state in outputs.hidden_states) for i in range(count)]
        if self._prefill_attentions is not None:
            shift = target.starts[row] - target.first_starts[row]
            for i in range(count):
                keys = target.width + i + 1 - shift
                self._attentions[row].append(
                    tuple(
                        _plain_columns(attention[row, :, i : i + 1], layer, keys, q - i - 1)
                        for attention, layer in zip(outputs.attentions, target.cache.layers, strict=False)
                    )
                )

    def result(self) -> dict[str, Any]:
        """Fields of the generate output; `None` for what was not asked for."""
        return {
            "scores": self._stack(self._scores) if self.wants_scores else None,
            "logits": self._stack(self._logits) if self.wants_logits else None,
            "hidden_states": self._layers(self._prefill_states, self._states) if self.wants_states else None,
            "attentions": self._layers(self._prefill_attentions, self._attentions) if self.wants_attentions else None,
        }

    def _stack(self, rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        steps = max(len(row) for row in rows)
        longest = max(rows, key=len)
        return tuple(torch.stack([row[s] if s < len(row) else torch.zeros_like(longest[s]) for row in rows]) for s in range(steps))

    def _layers(self, first: Layers | None, rows: list[list[Layers]]) -> tuple[Layers, ...]:
        steps = max(len(row) for row in rows)
        longest = max(rows, key=len)
        later = tuple(
            tuple(
                torch.stack([row[s][layer] if s < len(row) else torch.zeros_like(longest[s][layer]) for row in rows])
                for layer in range(len(longest[s]))
            )
            for s in range(steps)
        )
        return later if first is None else (first, *later)


def _plain_columns(attention: torch.Tensor, layer: Any, keys: int, behind: int) -> torch.Tensor:
    """
    Attention `[heads, 1, columns]` of one position, cut to the columns that plain decoding has at that step.

    `keys` columns are in the row's plain layout; the last `behind` columns here belong to later positions.
    """
    if getattr(layer, "is_compileable", False):  # a static cache always shows all its columns
        return attention.clone()
    if isinstance(layer, DynamicSlidingWindowLayer):
        keys = min(keys, layer.sliding_window)
    end = attention.shape[-1] - behind
    cut = attention[..., max(0, end - keys) : end]
    return torch.nn.functional.pad(cut, (keys - cut.shape[-1], 0))
