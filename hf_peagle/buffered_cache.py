"""A growing cache without growing concatenations: keys and values are written into buffers with room to spare."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64  # columns; a buffer grows by half, and by this much at least


class BufferedLayer(DynamicLayer):
    """
    A `DynamicLayer` whose `keys` and `values` are views of the first columns of larger buffers, so an update copies the
    new columns only. Everything else (crop, reorder, select) may replace the views; the next update then starts new buffers.
    """

    _key_buffer: torch.Tensor | None = None
    _value_buffer: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        self._key_buffer = _with_room(self._key_buffer, self.keys, key_states, old, new)
        self._value_buffer = _with_room(self._value_buffer, self.values, value_states, old, new)
        self._key_buffer[:, :, old:new] = key_states
        self._value_buffer[:, :, old:new] = value_states
        self.keys, self.values = self._key_buffer[:, :, :new], self._value_buffer[:, :, :new]
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self._key_buffer = self._value_buffer = None


def _with_room(buffer: torch.Tensor | None, view: torch.Tensor, like: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """`buffer` if `view` is its beginning and `new` columns fit, else a larger one that starts with `view`."""
    fits = buffer is not None and new <= buffer.shape[2] and like.shape[0] == buffer.shape[0]
    if buffer is not None and fits and (old == 0 or view.data_ptr() == buffer.data_ptr()):
        return buffer
    batch, heads, _, width = like.shape
    larger = like.new_empty(batch, heads, new + max(ROOM, old // 2), width)
    if old:
        larger[:, :, :old] = view
    return larger


def use_buffers(cache: Any) -> None:
    """Lets an empty `DynamicCache` made for this call keep its full-attention layers in buffers."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = BufferedLayer
    cache.layers = [BufferedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
