"""Random heads, and oracle heads whose drafts follow a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_peagle import PEagleConfig, PEagleDrafterModel
from hf_peagle.modeling_peagle import DraftOutput


def random_head(target: PreTrainedModel, seed: int = 0, **overrides: Any) -> PEagleDrafterModel:
    """A small random head that fits `target`."""
    values: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 40, "num_depths": 16, "draft_length": 4}
    torch.manual_seed(seed)
    config = PEagleConfig.from_target(target.config, **{**values, **overrides})
    head = PEagleDrafterModel(config).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return head


class OracleHead(PEagleDrafterModel):
    """
    Drafts the true continuation of every row, wrong from a scripted place on.

    `truth[b]` are the tokens that row `b` generates without an assistant, `prompt_tokens[b]` the number of its prompt
    tokens, and `script(round, row)` how many leading drafts are right. The network runs as well, so that caches and
    shapes are the real ones; only the tokens are replaced.
    """

    def script_with(self, truth: Sequence[Sequence[int]], prompt_tokens: Sequence[int], script: Callable[[int, int], int]) -> OracleHead:
        self._truth, self._prompt_tokens, self._script, self._round = truth, prompt_tokens, script, 0
        self.seen_lengths: list[list[int]] = []
        return self

    def draft(self, token_ids: Any, features: Any, counts: Any, num_tokens: int, cache: Any, **kwargs: Any) -> Any:
        out = super().draft(token_ids, features, counts, num_tokens, cache, **kwargs)
        rows = []
        for b, slots in enumerate(cache.lengths.tolist()):
            generated = slots - self._prompt_tokens[b] + 1
            future = list(self._truth[b][generated : generated + num_tokens])
            future += [5] * (num_tokens - len(future))
            right = self._script(self._round, b)
            rows.append([t if i < right else (t + 1) % self.config.vocab_size for i, t in enumerate(future)])
        self.seen_lengths.append(cache.lengths.tolist())
        self._round += 1
        return DraftOutput(torch.tensor(rows), out.draft_ids, out.logits, None)


def oracle_head(target: PreTrainedModel, **overrides: Any) -> OracleHead:
    """An `OracleHead` for `target`; call `script_with` before use."""
    config = random_head(target, **overrides).config
    torch.manual_seed(1)
    return OracleHead(config).eval()
