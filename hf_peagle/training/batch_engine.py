"""Continuous-batching decoding for decoder-only transformers models: many requests, no step spent on finished rows.

`SlotEngine` keeps a fixed number of slots, each with one request, in one key/value buffer (see `slot_cache`). When a
request ends, the next prompt is prefilled alone, without padding, and its keys and values are copied into the slot.

`PlainEngine` is the same interface over `model.generate`, for models whose caches the slot buffer cannot represent
(sliding windows, recurrent states, compressed caches). `make_engine` chooses.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer

from hf_peagle.training.slot_cache import SlotCache, grouped_attention

logger = logging.getLogger(__name__)


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


# ---------------------------------------------------------------------------------------------------------- engines


def choose_token(logits: torch.Tensor, request: Request, generator: torch.Generator | None) -> int:
    """The next token of a sampled request from its fp32 logits [vocab]."""
    probabilities = torch.softmax(logits / request.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


class Engine:
    """What the engines share: when an answer ends, and the number of tokens produced so far (`produced`)."""

    def __init__(self, model: Any, eos_ids: set[int], slots: int = 64, guard: RepetitionGuard | None = None) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: needs at least one slot")
        self.model, self.eos_ids, self.slots, self.guard = model, eos_ids, slots, guard
        self.produced = 0

    def generate(self, feed: Feed) -> Iterator[Request]:
        """Takes requests from `feed()` whenever there is room and yields them finished, in order of completion.

        `feed` returns None for "nothing now"; it is asked again after every finished request, so that a caller can
        queue a follow-up turn of the request it has just received.
        """
        raise NotImplementedError

    def _append(self, request: Request, token: int) -> None:
        self.produced += 1
        request.output_ids.append(token)
        if token in self.eos_ids:
            request.finish = "eos"
        elif len(request.output_ids) >= request.max_new_tokens:
            request.finish = "length"
        elif self.guard is not None and self.guard.triggered(request.output_ids):
            request.finish = "repetition"


class SlotEngine(Engine):
    """Continuous batching with `slots` requests in flight; see the module's docstring. Greedy requests give the tokens
    of `model.generate(do_sample=False)` on each prompt alone, up to the rounding of the batched products."""

    def __init__(self, model: Any, eos_ids: set[int], slots: int = 64, guard: RepetitionGuard | None = None) -> None:
        super().__init__(model, eos_ids, slots, guard)
        self._requests: list[Request | None] = []
        self._generators: list[torch.Generator | None] = []
        self._cache: SlotCache | None = None

    def generate(self, feed: Feed) -> Iterator[Request]:
        self._requests, self._generators, self._cache = [], [], None
        with grouped_attention(self.model):
            while True:
                starved = yield from self._fill(feed)
                if self._cache is None or not any(self._requests):
                    return
                if starved:
                    self._compact()
                yield from self._step(self._cache)

    def _fill(self, feed: Feed) -> Generator[Request, None, bool]:
        """Prefills requests into all free slots; yields those that end with their first token. Returns whether `feed`
        ran out before the slots were full."""
        for slot in range(self.slots):
            if slot < len(self._requests) and self._requests[slot] is not None:
                continue
            while True:
                request = feed()
                if request is None:
                    return True
                prefill, generator = self._prefill(request)
                if not request.finish:
                    break
                yield request
            if self._cache is None:
                self._cache = SlotCache(prefill, self.slots)
                self._requests, self._generators = [None] * self.slots, [None] * self.slots
            elif slot >= len(self._requests):
                self._widen(self._cache)
            self._cache.place(slot, prefill)
            self._requests[slot], self._generators[slot] = request, generator
        return False

    def _compact(self) -> None:
        """Drops idle slots once they are a quarter of the batch: a copy of the buffer against cheaper steps."""
        active = [i for i, request in enumerate(self._requests) if request is not None]
        if self._cache is not None and len(active) <= 0.75 * len(self._requests):
            self._cache.select(active)
            self._requests = [self._requests[i] for i in active]
            self._generators = [self._generators[i] for i in active]

    def _widen(self, cache: SlotCache) -> None:
        """Undoes `_compact` when requests arrive again."""
        present, missing = len(self._requests), self.slots - len(self._requests)
        cache.select([*range(present), *([0] * missing)])
        cache.start[present:] = cache.columns.high
        self._requests += [None] * missing
        self._generators += [None] * missing

    def _prefill(self, request: Request) -> tuple[Cache, torch.Generator | None]:
        """Runs the prompt alone and appends the first token."""
        logits, cache = prefill_prompt(self.model, request.prompt_ids)
        generator = None
        if request.temperature > 0:
            generator = torch.Generator(device=logits.device).manual_seed(request.seed)
        self._append(request, choose_token(logits, request, generator) if generator else int(logits.argmax()))
        return cache, generator

    def _step(self, cache: SlotCache) -> Iterator[Request]:
        """One token for every slot; yields the requests it finished."""
        tokens = [r.output_ids[-1] if r else 0 for r in self._requests]
        positions = [len(r.prompt_ids) + len(r.output_ids) - 1 if r else 0 for r in self._requests]
        logits = decode_step(self.model, cache, tokens, positions)
        greedy = logits.argmax(dim=-1).tolist()
        finished = []
        for slot, request in enumerate(self._requests):
            if request is None:
                continue
            generator = self._generators[slot]
            self._append(request, choose_token(logits[slot], request, generator) if generator else greedy[slot])
            if request.finish:
                finished.append(request)
                self._requests[slot] = None
        cache.after_step([slot for slot, request in enumerate(self._requests) if request is None])
        yield from finished


@torch.no_grad()
def prefill_prompt(model: Any, prompt_ids: list[int]) -> tuple[torch.Tensor, Cache]:
    """Runs one prompt; returns the fp32 logits [vocab] after its last token and the filled cache."""
    cache = DynamicCache(config=model.config)
    arguments = {cache_argument(model): cache}
    if "logits_to_keep" in _forward_parameters(model):
        arguments["logits_to_keep"] = 1
    output = model(torch.tensor([prompt_ids], device=model.device), use_cache=True, **arguments)
    return output.logits[0, -1].float(), cache


@torch.no_grad()
def decode_step(model: Any, cache: SlotCache, tokens: list[int], positions: list[int]) -> torch.Tensor:
    """Runs one token for every slot; returns fp32 logits [slots, vocab]. The caller then calls `cache.after_step`."""
    output = model(
        torch.tensor(tokens, device=model.device)[:, None],
        attention_mask=cache.before_step().to(device=model.device, dtype=torch.long),
        position_ids=torch.tensor(positions, device=model.device)[:, None],
        use_cache=True,
        **{cache_argument(model): cache.cache},
    )
    return output.logits[:, -1].float()


class _GuardCriteria(StoppingCriteria):
    """Ends the rows of a `model.generate` batch that the repetition guard would end."""

    def __init__(self, guard: RepetitionGuard, prompt_length: int) -> None:
        self.guard, self.prompt_length = guard, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stop = [self.guard.triggered(row) for row in input_ids[:, self.prompt_length :].tolist()]
        return torch.tensor(stop, device=input_ids.device)


class PlainEngine(Engine):
    """`model.generate` on left-padded batches of `slots` requests; a batch lasts as long as its longest answer.

    Requests of different temperatures go into different batches. Sampled tokens depend on the batch they are in.
    """

    def generate(self, feed: Feed) -> Iterator[Request]:
        waiting: dict[float, list[Request]] = {}
        while True:
            while not any(len(batch) >= self.slots for batch in waiting.values()):
                request = feed()
                if request is None:
                    break
                waiting.setdefault(request.temperature, []).append(request)
            if not waiting:
                return
            temperature = max(waiting, key=lambda key: len(waiting[key]))
            yield from self._run(waiting.pop(temperature))

    def _run(self, batch: list[Request]) -> list[Request]:
        width = max(len(r.prompt_ids) for r in batch)
        pad = min(self.eos_ids, default=0)
        ids = [[pad] * (width - len(r.prompt_ids)) + r.prompt_ids for r in batch]
        mask = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch]
        temperature, device = batch[0].temperature, self.model.device
        # Everything a target's own generation config may set that changes probabilities is set back here.
        config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            top_p=1.0,
            min_p=None,
            repetition_penalty=1.0,
            max_new_tokens=max(r.max_new_tokens for r in batch),
            eos_token_id=sorted(self.eos_ids) or None,
            pad_token_id=pad,
        )
        criteria = StoppingCriteriaList([_GuardCriteria(self.guard, width)] if self.guard else [])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(batch[0].seed)
            output = self.model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                stopping_criteria=criteria,
            )
        for request, row in zip(batch, output[:, width:].tolist(), strict=True):
            for token in row:
                self._append(request, token)
                if request.finish:
                    break
        return batch


# ----------------------------------------------------------------------------------------------------------- choosing


def _forward_parameters(model: Any) -> Any:
    return inspect.signature(type(model).forward).parameters


def cache_argument(model: Any) -> str:
    """The forward argument that takes the cache: renamed from `past_key_values` to `cache` in newer transformers."""
    return "cache" if "cache" in _forward_parameters(model) else "past_key_values"


def unsupported_reason(model: Any) -> str | None:
    """Why the slot engine cannot run `model`, or None when it can.

    Reads the shape of the model's cache, then tries: two prompts of different length are decoded three steps in slots
    and compared with plain forward passes without a cache, so that a family with its own idea of masks, positions or
    caches is noticed instead of answered wrongly.
    """
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        return f"its attention implementation is {implementation!r}, not 'sdpa' or 'eager'"
    if getattr(model, "_is_stateful", False):
        return "it keeps recurrent states"
    if not {"position_ids", "attention_mask"} <= set(_forward_parameters(model)):
        return "its forward takes no attention_mask and position_ids"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if kinds != {"DynamicLayer"}:
        return f"its cache layers are {sorted(kinds)}, not all full attention"
    try:
        error = _slot_error(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as problem:
        return f"a trial of the slot buffer failed ({type(problem).__name__}: {problem})"
    limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    return None if error <= limit else f"slots give other logits than plain passes (relative error {error:.2g})"


@torch.no_grad()
def _slot_error(model: Any, steps: int = 3) -> float:
    """Relative error (2-norm, worst step and row) of logits decoded in slots against passes without a cache."""
    vocab = model.config.get_text_config().vocab_size
    lengths = (11, 3)
    rows = [[(7 * (i + row) * (i + 3) + 5) % vocab for i in range(length + steps)] for row, length in enumerate(lengths)]
    worst = 0.0
    with grouped_attention(model):
        prefills = [prefill_prompt(model, row[:length])[1] for row, length in zip(rows, lengths, strict=True)]
        if not all(type(layer) is DynamicLayer and layer.is_initialized for p in prefills for layer in p.layers):
            raise ValueError("some cache layers hold no keys and values of their own")
        # The shorter prompt makes the buffer, the longer one forces a re-pack; one slot stays idle.
        cache = SlotCache(prefills[1], 3)
        for slot, prefill in enumerate(prefills):
            cache.place(slot, prefill)
        for step in range(steps):
            tokens = [row[length + step] for row, length in zip(rows, lengths, strict=True)]
            logits = decode_step(model, cache, [*tokens, 0], [*(length + step for length in lengths), 0])
            cache.after_step([2])
            for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                ids = torch.tensor([row[: length + step + 1]], device=model.device)
                plain = model(ids, use_cache=False).logits[0, -1].float()
                error = (logits[slot] - plain).norm() / plain.norm().clamp(min=1e-12)
                worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
    return worst


def make_engine(model: Any, eos_ids: set[int], slots: int = 64, guard: RepetitionGuard | None = None) -> Engine:
    """The fastest engine that gives `model`'s own tokens; says in the log why when that is not the slot engine."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"model={type(model).__name__}: an encoder-decoder; answers need a decoder-only model")
    reason = unsupported_reason(model)
    if reason is None:
        return SlotEngine(model, eos_ids, slots, guard)
    logger.warning("%s is answered by model.generate in plain batches, which is slower: %s", type(model).__name__, reason)
    return PlainEngine(model, eos_ids, slots, guard)
