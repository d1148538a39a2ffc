"""The tokens of a call: committed ones of every row, and room behind them for drafts."""

from __future__ import annotations

import torch


class TokenBuffer:
    """
    One `[batch, capacity]` int64 tensor. Rows have their own lengths; while those are equal (always at batch 1) reading
    and writing are slices, otherwise gathers and scatters. It is allocated once up to `FIRST_CAPACITY` columns and doubled
    beyond, since a call that ends by a criterion may allow any number of tokens.

    Attributes:
        data (`torch.Tensor`): `[batch, capacity]`; what lies behind a row's length is not committed.
        lengths (`list[int]`): committed tokens per row, left padding included.
    """

    FIRST_CAPACITY = 8192

    def __init__(self, prompt: torch.Tensor, capacity: int) -> None:
        """`capacity`: the most columns the call can need."""
        self.device = prompt.device
        self.data = prompt.new_zeros(prompt.shape[0], min(capacity, prompt.shape[1] + self.FIRST_CAPACITY))
        self.data[:, : prompt.shape[1]] = prompt
        self.lengths = [prompt.shape[1]] * prompt.shape[0]

    def write(self, block: torch.Tensor) -> None:
        """Puts `block` (`[batch, n]`) behind every row's committed tokens, without committing it."""
        n = block.shape[1]
        start = self.lengths[0]
        self.reserve(max(self.lengths) + n)
        if self._aligned(self.lengths):
            self.data[:, start : start + n] = block
        else:
            self.data.scatter_(1, self._columns(self.lengths, n), block)

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` columns."""
        missing = columns - self.data.shape[1]
        if missing > 0:
            room = self.data.new_zeros(self.data.shape[0], max(missing, self.data.shape[1]))
            self.data = torch.cat([self.data, room], dim=1)

    def read(self, starts: list[int], n: int) -> torch.Tensor:
        """`[batch, n]` tokens of row `b` from column `starts[b]` on."""
        if self._aligned(starts):
            return self.data[:, starts[0] : starts[0] + n]
        return self.data.gather(1, self._columns(starts, n))

    def _aligned(self, starts: list[int]) -> bool:
        return len(starts) == 1 or starts.count(starts[0]) == len(starts)

    def _columns(self, starts: list[int], n: int) -> torch.Tensor:
        return torch.tensor(starts, device=self.device)[:, None] + torch.arange(n, device=self.device)
