"""What passes cost by their width, measured directly, and the speed-up that follows from it for every draft length."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .benchmark_methods import Variant
from .buffered_cache import use_buffers
from .features import FeatureCapture
from .target_state import CACHE_NAMES

VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
# Committed tokens that a draft pass reads: what a round at an acceptance length of about two leaves.
NEW_ROWS = 2


@dataclass(frozen=True)
class Prediction:
    """
    What drafting `k` tokens is worth.

    Args:
        acceptance_length (`float`): expected tokens per round at the measured acceptance by depth.
        round_ms (`float`): draft pass, verify pass and the rest.
        break_even (`float`): acceptance length at which the speed is that of plain decoding.
        speedup (`float`): over plain decoding of the same target, the prompt's pass aside.
        ceiling (`float`): the same if every draft were accepted and the rest cost nothing.
    """

    k: int
    acceptance_length: float
    round_ms: float
    break_even: float
    speedup: float
    ceiling: float


def predict(
    survival: Sequence[float],
    verify: Mapping[int, float],
    draft: Mapping[int, float],
    plain: float,
    rest: float = 0.0,
    plain_rest: float = 0.0,
) -> list[Prediction]:
    """
    Speed-up for every `k` in `draft` for which the acceptance is known. All costs in milliseconds.

    Args:
        survival: share of rounds that accept the draft at depth 1, 2, ...
        verify: cost of a target pass by its rows; widths between measured ones are interpolated.
        draft: cost of drafting by the number of drafts.
        plain: cost of a pass of plain decoding.
        rest, plain_rest: what a round, and a step of plain decoding, cost besides.
    """
    predictions = []
    step = plain + plain_rest
    for k in sorted(draft):
        if k > len(survival):
            break
        length = 1.0 + sum(survival[:k])
        passes = draft[k] + interpolate(verify, k + 1)
        break_even = (passes + rest) / step
        predictions.append(Prediction(k, length, passes + rest, break_even, length / break_even, (k + 1) * step / passes))
    return predictions


def best_length(speedups: Mapping[int, float]) -> int:
    """The number of drafts with the highest speed-up; 0 if plain decoding (1.0) is as fast as any."""
    best = max(speedups, key=lambda k: speedups[k], default=0)
    return best if best and speedups[best] > 1.0 else 0


def interpolate(curve: Mapping[int, float], at: int) -> float:
    """Value of a measured curve, linear between its points and beyond its ends along the last two."""
    if at in curve:
        return curve[at]
    points = sorted(curve)
    if len(points) < 2:
        raise ValueError(f"curve has the points {points} only; {at} cannot be derived from them.")
    below = [p for p in points if p < at]
    low, high = (points[0], points[1]) if not below else (below[-1], min((p for p in points if p > at), default=0))
    if not high:
        low, high = points[-2], points[-1]
    return curve[low] + (curve[high] - curve[low]) * (at - low) / (high - low)


# ---------------------------------------------------------------------- measuring


@dataclass
class _Task:
    """Something to time, and how to undo it."""

    variant: str
    curve: str
    width: int
    run: Callable[[], Any]
    undo: Callable[[], Any]


@torch.no_grad()
def measure_costs(
    variants: Sequence[Variant],
    context_ids: torch.Tensor,
    verify_rows: Sequence[int] = VERIFY_ROWS,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    sweeps: int = 9,
) -> dict[str, Any]:
    """
    Times every pass `sweeps` times, all of them in turn in each sweep and in an order that rotates, after one sweep that
    is not counted.

    Args:
        context_ids (`torch.Tensor`): `[batch, context]` int64, what the target and the drafter have already read.

    Returns:
        By variant: `plain` (a one-token pass as plain decoding makes it), `verify` by rows (the states that the drafter
        reads included), `draft` and `draft_sequential` by number of drafts (one pass, and the same head drafting token
        by token as EAGLE-3 does). Each entry has `ms`, `ms_min`, `ms_max` and `ratio`, `ratio_min`, `ratio_max` over the
        plain pass of the same sweep.
    """
    tasks: list[_Task] = []
    for variant in variants:
        tasks += _tasks_of(variant, context_ids, verify_rows, draft_lengths)
    samples: list[list[float]] = [[] for _ in tasks]
    on_cuda = context_ids.device.type == "cuda"
    for sweep in range(sweeps + 1):
        for i in (*range(sweep * 7 % len(tasks), len(tasks)), *range(sweep * 7 % len(tasks))):
            began = time.perf_counter()
            tasks[i].run()
            if on_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            tasks[i].undo()
            if sweep:
                samples[i].append(1000 * seconds)
    plain = {task.variant: times for task, times in zip(tasks, samples, strict=True) if task.curve == "plain"}
    result: dict[str, Any] = {v.label: {"context": context_ids.shape[1], "sweeps": sweeps} for v in variants}
    for task, times in zip(tasks, samples, strict=True):
        ratios = [t / base for t, base in zip(times, plain[task.variant], strict=True)]
        entry = {**_spread("ms", times), **_spread("ratio", ratios)}
        if task.curve == "plain":
            result[task.variant]["plain"] = entry
        else:
            result[task.variant].setdefault(task.curve, {})[str(task.width)] = entry
    return result


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _tasks_of(variant: Variant, context_ids: torch.Tensor, verify_rows: Sequence[int], draft_lengths: Sequence[int]) -> list[_Task]:
    target, head = variant.target, variant.heads["peagle"]
    batch, context = context_ids.shape
    capture = FeatureCapture(target, head.config.target_layer_ids)
    cache_name = _cache_argument(target)
    cache, plain_cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    use_buffers(cache)  # as the drafting loop does; plain decoding has its cache as transformers makes it
    with capture.active():
        outputs = target(input_ids=context_ids, use_cache=True, **{cache_name: cache}, **capture.forward_kwargs)
        features = capture.take(outputs, head.device)
    target(input_ids=context_ids, use_cache=True, **{cache_name: plain_cache})
    del outputs
    cache.activate_past_recording()
    plain_cache.activate_past_recording()
    tokens = context_ids[:, :1].expand(batch, max(verify_rows)).contiguous()

    def plain() -> None:
        target(input_ids=tokens[:, :1], use_cache=True, **{cache_name: plain_cache})

    def verify(q: int) -> None:
        with capture.active():
            outputs = target(input_ids=tokens[:, :q], use_cache=True, **{cache_name: cache}, **capture.forward_kwargs)
            capture.take(outputs, head.device)

    def undo(q: int) -> Callable[[], None]:
        return lambda: cache.crop(-q)

    def verifying(q: int) -> Callable[[], None]:
        return lambda: verify(q)

    tasks = [_Task(variant.label, "plain", 1, plain, lambda: plain_cache.crop(-1))]
    tasks += [_Task(variant.label, "verify", q, verifying(q), undo(q)) for q in verify_rows]

    own_cache, borrowed = head.new_cache(batch), head.borrow(target)
    ids = context_ids.to(head.device)
    head.draft(ids, features, torch.full((batch,), context, device=head.device), 1, own_cache, borrowed=borrowed)
    counts = torch.full((batch,), NEW_ROWS, device=head.device)
    new_ids, new_features = ids[:, :NEW_ROWS], features[:, :NEW_ROWS]
    longest = context + NEW_ROWS

    def draft(k: int) -> None:
        head.draft(new_ids, new_features, counts, k, own_cache, borrowed=borrowed, longest=longest)

    def draft_sequentially(k: int) -> None:
        head._draft_sequentially(new_ids, new_features, counts, k, own_cache, borrowed, None, longest)

    def forget() -> None:
        own_cache.lengths.sub_(counts)
        own_cache.longest = context

    def drafting(how: Callable[[int], None], k: int) -> Callable[[], None]:
        return lambda: how(k)

    for k in draft_lengths:
        if head.config.algorithm == "peagle":
            tasks.append(_Task(variant.label, "draft", k, drafting(draft, k), forget))
        tasks.append(_Task(variant.label, "draft_sequential", k, drafting(draft_sequentially, k), forget))
    return tasks


def _cache_argument(target: PreTrainedModel) -> str:
    parameters = inspect.signature(type(target).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def milliseconds(curve: Mapping[str, Mapping[str, float]]) -> dict[int, float]:
    """A measured curve as plain numbers: median milliseconds by width."""
    return {int(width): entry["ms"] for width, entry in curve.items()}


def as_rows(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """JSON-able."""
    return [asdict(prediction) for prediction in predictions]
