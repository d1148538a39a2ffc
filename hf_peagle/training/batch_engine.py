"""Continuous-batching decoding for decoder-only transformers models: many requests, no step spent on finished rows.

`SlotEngine` keeps a fixed number of slots. Every slot holds one request; all of them share one preallocated key/value
buffer in which the newest token of every slot lies in the same column, so that older requests simply start further to
the left ("left padding by mask"). When a request ends, the next prompt is prefilled alone, without padding, and its
keys and values are copied into the columns left of the write position.

`PlainEngine` is the same interface over `model.generate`, for models whose caches the slot buffer cannot represent
(sliding windows, recurrent states, compressed caches). `make_engine` chooses.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

logger = logging.getLogger(__name__)

GROUPED_ATTENTION = "peagle_grouped_decode"
# Columns of the buffer come in blocks: it is re-packed (copied once) every so many steps.
_BLOCK = 32


@dataclass
class Request:
    """One prompt to continue.

    `prompt_ids` are the token ids the target sees; `temperature` 0 means greedy; `seed` makes the sampled tokens of
    this request independent of the other requests in the batch. The engine fills `output_ids` (the end-of-sequence
    token included when it was produced) and `finish` ("eos", "length" or "repetition").
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    payload: Any = None
    output_ids: list[int] = field(default_factory=list)
    finish: str = ""


Feed = Callable[[], "Request | None"]


@dataclass(frozen=True)
class RepetitionGuard:
    """Ends an answer whose last `window` tokens repeat with a period of at most `max_period` tokens."""

    window: int = 64
    max_period: int = 16

    def triggered(self, tokens: list[int]) -> bool:
        if len(tokens) < self.window:
            return False
        tail = tokens[-self.window :]
        return any(tail[period:] == tail[:-period] for period in range(1, self.max_period + 1))


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
    """Attention of one query row per sequence as two batched products over the key/value heads, without repeating them.

    query [batch, heads, 1, d], key/value [batch, kv_heads, length, d], mask bool or additive [batch, 1, 1, length].
    Anything else (several query rows, sinks, soft caps, position biases, dropout, autograd) goes to transformers'
    sdpa function with the arguments unchanged, so that this function is a drop-in for "sdpa".
    """
    special = any(kwargs.get(name) is not None for name in ("s_aux", "softcap", "position_bias", "sliding_window"))
    needs_grad = torch.is_grad_enabled() and query.requires_grad
    if query.shape[2] != 1 or dropout or special or needs_grad or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
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
    """Keys and values [slots, kv_heads, capacity, d] of one layer. Every pass gets the whole buffer, columns not in use
    masked: a batched product copies its operands unless they are contiguous, at a cost above that of the product."""

    def __init__(self, columns: _Columns, keys: torch.Tensor, values: torch.Tensor, slots: int) -> None:
        super().__init__()
        self.columns = columns
        self.device = keys.device
        self.key_buffer = keys.new_zeros(slots, keys.shape[1], columns.capacity, keys.shape[3])
        self.value_buffer = values.new_zeros(slots, values.shape[1], columns.capacity, values.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


class _SlotCache:
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


# ---------------------------------------------------------------------------------------------------------- engines


def choose_token(logits: torch.Tensor, request: Request, generator: torch.Generator | None) -> int:
    """The next token of a sampled request from its fp32 logits [vocab]."""
    probabilities = torch.softmax(logits / request.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class SlotEngine:
    """Continuous batching with `slots` requests in flight; see the module's docstring. Greedy requests give the tokens
    of `model.generate(do_sample=False)` on each prompt alone (up to the rounding of the batched products)."""

    def __init__(self, model: Any, eos_ids: set[int], slots: int = 64, guard: RepetitionGuard | None = None) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: needs at least one slot")
        self.model, self.eos_ids, self.slots, self.guard = model, eos_ids, slots, guard
        self._cache_name = cache_argument(model)
        self._generators: list[torch.Generator | None] = []
        self.produced = 0

    def generate(self, feed: Feed) -> Iterator[Request]:
        """Takes requests from `feed()` whenever a slot is free and yields them finished, in order of completion.

        `feed` may return None for "nothing now"; it is asked again after every finished request, so that a caller can
        queue a follow-up turn for the request it has just received.
        """
        with grouped_attention(self.model):
            slots: list[Request | None] = []
            cache: _SlotCache | None = None
            while True:
                free = [i for i, r in enumerate(slots) if r is None] + list(range(len(slots), self.slots))
                exhausted = False
                for slot in free:
                    request = None
                    while request is None:
                        request = feed()
                        if request is None:
                            exhausted = True
                            break
                        filled, generator = self._prefill(request)
                        if request.finish:
                            yield request
                            request = None
                    if request is None:
                        break
                    if cache is None:
                        cache = _SlotCache(filled, self.slots)
                        slots = [None] * self.slots
                        self._generators = [None] * self.slots
                    elif slot >= len(slots):
                        # The batch was compacted when requests ran short; it only grows again with a new buffer.
                        cache, slots = self._widen(cache, slots)
                    cache.place(slot, filled)
                    slots[slot], self._generators[slot] = request, generator
                active = [i for i, r in enumerate(slots) if r is not None]
                if not active or cache is None:
                    return
                if exhausted and len(active) <= 0.75 * len(slots):
                    cache.select(active)
                    slots = [slots[i] for i in active]
                    self._generators = [self._generators[i] for i in active]
                    active = list(range(len(slots)))
                self._step(cache, slots, active)
                for i in active:
                    done = slots[i]
                    if done is not None and done.finish:
                        slots[i] = None
                        yield done

    def _widen(self, cache: _SlotCache, slots: list[Request | None]) -> tuple[_SlotCache, list[Request | None]]:
        missing = self.slots - len(slots)
        cache.select([*range(len(slots)), *([0] * missing)])
        cache.start[len(slots) :] = cache.columns.high
        self._generators += [None] * missing
        return cache, slots + [None] * missing

    def _prefill(self, request: Request) -> tuple[Cache, torch.Generator | None]:
        device = self.model.device
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([request.prompt_ids], device=device)
        with torch.no_grad():
            output = self.model(ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        generator = None
        if request.temperature > 0:
            generator = torch.Generator(device=device).manual_seed(request.seed)
        logits = output.logits[0, -1].float()
        token = choose_token(logits, request, generator) if generator else int(logits.argmax())
        self._append(request, token)
        return cache, generator

    def _step(self, cache: _SlotCache, slots: list[Request | None], active: list[int]) -> None:
        device = self.model.device
        mask = cache.before_step()
        ids = torch.tensor([[r.output_ids[-1] if r else 0] for r in slots], device=device)
        positions = torch.tensor(
            [[len(r.prompt_ids) + len(r.output_ids) - 1 if r else 0] for r in slots], device=device
        )
        with torch.no_grad():
            output = self.model(
                ids,
                attention_mask=mask.to(device=device, dtype=torch.long),
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: cache.cache},
            )
        logits = output.logits[:, -1].float()
        greedy = logits.argmax(dim=-1).tolist()
        for i in active:
            request, generator = slots[i], self._generators[i]
            assert request is not None
            self._append(request, choose_token(logits[i], request, generator) if generator else greedy[i])
        cache.after_step([i for i, r in enumerate(slots) if r is None or r.finish])

    def _append(self, request: Request, token: int) -> None:
        self.produced += 1
        request.output_ids.append(token)
        if token in self.eos_ids:
            request.finish = "eos"
        elif len(request.output_ids) >= request.max_new_tokens:
            request.finish = "length"
        elif self.guard is not None and self.guard.triggered(request.output_ids):
            request.finish = "repetition"


def cache_argument(model: Any) -> str:
    """The forward argument that takes the cache: renamed from `past_key_values` to `cache` in newer transformers."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def make_engine(model: Any, eos_ids: set[int], slots: int, guard: RepetitionGuard | None) -> SlotEngine:
    return SlotEngine(model, eos_ids, slots, guard)
