"""Where a row ends: plain decoding's stopping criteria applied to runs of several committed tokens."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

# Criteria whose verdict on a row depends on that row alone and that keep no state between calls.
ROW_WISE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


class Stopping:
    """
    The call's criteria, sorted by what they need.

    Attributes:
        max_length (`int`): total length at which generation ends.
        has_eos (`bool`): finished rows are filled with padding only if there is an end-of-sequence criterion.
        row_wise (`bool`): every row can be judged on its own. Otherwise rows must advance together.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int) -> None:
        self.criteria = criteria
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.max_length = min([max_length, *lengths])
        self.has_eos = any(hasattr(c, "eos_token_id") for c in criteria)
        self.row_wise = all(type(c) in ROW_WISE for c in criteria)
        self.eos_ids: set[int] = set()
        for c in criteria:
            if type(c) is EosTokenCriteria:
                self.eos_ids.update(torch.as_tensor(c.eos_token_id).view(-1).tolist())
        # What must be asked at every prefix, since only a call tells.
        self.asked = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]

    def cut(self, row: torch.Tensor, length: int, run: list[int]) -> tuple[int, bool]:
        """
        How much of a run of new tokens of one row plain decoding would have produced.

        Args:
            row (`torch.Tensor`): `[columns]` int64, the row's tokens with `run` written behind its `length` first ones.

        Returns:
            number of tokens kept and whether the row is finished by the last of them.
        """
        for i, token in enumerate(run):
            end = length + i + 1
            if token in self.eos_ids or end >= self.max_length:
                return i + 1, True
            if any(bool(c(row[None, :end], None).any()) for c in self.asked):
                return i + 1, True
        return len(run), False
