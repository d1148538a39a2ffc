"""Key/value buffers of the drafter. Storing and rolling back are index arithmetic; nothing is concatenated."""

from __future__ import annotations

import torch

from .configuration_peagle import PEagleConfig

# Buffers grow in steps, so that a long answer re-allocates a handful of times and mask widths repeat.
CAPACITY_STEP = 256


class DrafterCache:
    """
    Keys and values of the drafter's *real* slots, for one generation call.

    Slot `j` of a row (the pair of token `x_{j+1}` and target feature `h_j`) lives at column `j`; rows of a batch have
    their own lengths. A draft pass writes its mask slots just behind the real ones. They are not counted in `lengths`,
    so the next pass overwrites them before anything can read them: KV made from a mask slot never survives a round.

    Attributes:
        keys, values (`list[torch.Tensor]`): one `[batch, kv_heads, capacity, head_dim]` tensor per layer.
        lengths (`torch.Tensor`): `[batch]` int64, real slots stored per row.
        longest (`int`): host-side bound of `lengths.max()`.
        mask_slot (`tuple`, *optional*): embedding and projected feature of a mask slot, computed once per call.
    """

    def __init__(
        self,
        config: PEagleConfig,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        static_capacity: int | None = None,
    ) -> None:
        """
        `static_capacity`: allocate this many columns once and keep every tensor at its address, for passes that are
        captured and replayed; attention then always runs over all columns. Default: grow as needed.
        """
        self.is_static = static_capacity is not None
        self.batch_size = batch_size
        self.device = device
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.longest = 0
        self.capacity = 0
        self.mask_slot: tuple[torch.Tensor, torch.Tensor] | None = None
        shape = (batch_size, config.num_key_value_heads, 0, config.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty_like(key) for key in self.keys]

        if static_capacity is not None:
            self._resize(static_capacity)

    def reset(self) -> None:
        """Forgets all slots, in place."""
        self.lengths.zero_()
        self.longest = 0

    def visible_columns(self, columns: int) -> int:
        """Columns that a pass attends over when it needs the first `columns`; makes room for them."""
        if self.is_static and columns > self.capacity:
            raise ValueError(f"The drafter's static buffers have {self.capacity} columns, {columns} are needed.")
        self.reserve(columns)
        return self.capacity if self.is_static else columns

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` columns, in steps of `CAPACITY_STEP` and at least by half, keeping what is stored."""
        if columns <= self.capacity:
            return
        wanted = max(columns, self.capacity + self.capacity // 2)
        self._resize(-(-wanted // CAPACITY_STEP) * CAPACITY_STEP)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                # Zeros, as columns that no row has written take part in attention with weight 0, and 0 * NaN is NaN.
                buffers[i] = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
                buffers[i][:, :, : old.shape[2]] = old

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Stores `key` and `value` (`[batch, kv_heads, rows, head_dim]`) at columns `positions` (`[batch, rows]`) and
        returns the first `visible` columns of the layer's buffers.
        """
        index = positions[:, None, :, None].expand_as(key)
        self.keys[layer].scatter_(2, index, key)
        self.values[layer].scatter_(2, index, value)
        return self.keys[layer][:, :, :visible], self.values[layer][:, :, :visible]

    def commit(self, counts: torch.Tensor, longest: int) -> None:
        """Counts the first `counts[b]` of the rows just written as real slots; `longest` bounds the new lengths."""
        self.lengths.add_(counts)
        self.longest = longest
