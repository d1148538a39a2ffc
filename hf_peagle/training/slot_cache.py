"""A preallocated key/value buffer for many sequences in slots, and an attention for decoding on it.

The newest token of every slot lies in the same column, so that older sequences simply begin further to the left and
one mask row per slot ("left padding") tells where.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

logger = logging.getLogger(__name__)

GROUPED_ATTENTION = "peagle_grouped_decode"
# Columns of the buffer come in blocks: it is re-packed (copied once) every so many steps.
_BLOCK = 32


# ------------------------------------------------------------------------------------------------------- attention


def grouped_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query row per sequence as two batched products over the key/value heads, none repeated.

    query [batch, heads, 1, d], key/value [batch, kv_heads, length, d], mask bool or additive [batch, 1, 1, length].
    Anything else (several query rows, sinks, soft caps, position biases, dropout, autograd) goes to transformers'
    sdpa function with the arguments unchanged, so that this function is a drop-in for "sdpa".
    """
    special = any(kwargs.get(name) is not None for name in ("s_aux", "softcap", "position_bias", "sliding_window"))
    needs_grad = torch.is_grad_enabled() and query.requires_grad
    mask_per_head = attention_mask is not None and attention_mask.shape[1] != 1
    if query.shape[2] != 1 or dropout or special or needs_grad or mask_per_head:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    batch, heads, _, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    scaling = dim**-0.5 if scaling is None else scaling
    rows = batch * kv_heads
    grouped = query.reshape(rows, heads // kv_heads, dim)
    # Keys on the left: on CPUs the bf16 product with a long first operand is about three times as fast.
    scores = torch.bmm(key.reshape(rows, length, dim), grouped.transpose(1, 2)).transpose(1, 2)
    scores = scores.reshape(batch, heads, length).float() * scaling
    if attention_mask is not None:
        mask = attention_mask[:, 0]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            scores += mask
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    output = torch.bmm(weights.view(rows, heads // kv_heads, length), value.reshape(rows, length, value.shape[-1]))
    return output.view(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Switches `model` from "sdpa" to the grouped decode attention and back; other implementations are left alone."""
    original = model.config._attn_implementation
    if original != "sdpa":
        logger.info("attention implementation %r kept (the grouped decode attention replaces only 'sdpa')", original)
        yield
        return
    model.set_attn_implementation(GROUPED_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(original)


# ------------------------------------------------------------------------------------------------------------ cache


class _SlotLayer(DynamicLayer):
    """Keys and values [slots, kv_heads, capacity, d] of one layer. Every pass gets the whole buffer, unused columns
    masked: a batched product copies its operands unless they are contiguous, which costs more than the product."""

    def __init__(self, columns: _Columns, keys: torch.Tensor, values: torch.Tensor, slots: int) -> None:
        super().__init__()
        self.columns = columns
        self.device = keys.device
        self.key_buffer = keys.new_zeros(slots, keys.shape[1], columns.capacity, keys.shape[3])
        self.value_buffer = values.new_zeros(slots, values.shape[1], columns.capacity, values.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.key_buffer[:, :, self.columns.high] = key_states[:, :, 0]
        self.value_buffer[:, :, self.columns.high] = value_states[:, :, 0]
        return self.key_buffer, self.value_buffer

    def get_seq_length(self) -> int:
        return self.columns.high

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns.capacity, 0

    def place(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        high, length = self.columns.high, keys.shape[2]
        self.key_buffer[slot, :, high - length : high] = keys[0]
        self.value_buffer[slot, :, high - length : high] = values[0]

    def repack(self, rows: torch.Tensor | None, low: int, high: int, new_high: int, capacity: int) -> None:
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            kept = old[:, :, low:high] if rows is None else old[rows, :, low:high]
            new = old.new_zeros(kept.shape[0], old.shape[1], capacity, old.shape[3])
            new[:, :, new_high - (high - low) : new_high] = kept
            setattr(self, name, new)


@dataclass
class _Columns:
    """The next column to write and the number of columns; they change for all layers at once, between two passes."""

    high: int
    capacity: int


class SlotCache:
    """The buffers of all layers and where each slot's tokens begin (`start` [slots], a column number).

    Idle slots have `start` = `high`: they see only the column being written.
    """

    def __init__(self, prefill: Cache, slots: int) -> None:
        high = _round_up(prefill.layers[0].keys.shape[2])
        self.columns = _Columns(high, high + _BLOCK)
        self.layers = [_SlotLayer(self.columns, layer.keys, layer.values, slots) for layer in prefill.layers]
        self.cache = Cache(layers=self.layers)
        self.start = torch.full((slots,), high, dtype=torch.long, device=self.layers[0].device)

    def _repack(self, rows: torch.Tensor | None, room: int) -> None:
        """Keeps `rows` (all if None), drops the padding they share, leaves at least `room` columns below `high` and
        one block above it. Capacity and `high` stay multiples of the block: matrix kernels are slow on odd lengths."""
        start = self.start if rows is None else self.start[rows]
        low, high = int(start.min()), self.columns.high
        new_high = _round_up(max(room, high - low, 1))
        for layer in self.layers:
            layer.repack(rows, low, high, new_high, new_high + _BLOCK)
        self.start = start + (new_high - high)
        self.columns.high, self.columns.capacity = new_high, new_high + _BLOCK

    def place(self, slot: int, prefill: Cache) -> None:
        """Copies a prompt's keys and values [1, kv_heads, length, d] into a slot, ending at the write position."""
        length = prefill.layers[0].keys.shape[2]
        if length > self.columns.high:
            self._repack(None, length)
        for layer, filled in zip(self.layers, prefill.layers, strict=True):
            layer.place(slot, filled.keys, filled.values)
        self.start[slot] = self.columns.high - length

    def select(self, rows: list[int]) -> None:
        """Makes the slots `rows` (repetitions allowed) the whole batch."""
        self._repack(torch.tensor(rows, device=self.start.device), 0)

    def before_step(self) -> torch.Tensor:
        """Makes room for one column and returns the visible ones, bool [slots, capacity]."""
        if self.columns.high == self.columns.capacity:
            self._repack(None, 0)
        columns = torch.arange(self.columns.capacity, device=self.start.device)
        return (columns >= self.start[:, None]) & (columns <= self.columns.high)

    def after_step(self, idle: list[int]) -> None:
        self.columns.high += 1
        if idle:
            self.start[idle] = self.columns.high


def _round_up(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
