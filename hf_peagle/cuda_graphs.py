"""
Capturing the drafter's pass (and the target's verify pass over a static cache) as a graph, and replaying it.

A small pass on a GPU is bound by launching its kernels one by one; a captured graph launches them at once. Everything a
graph reads or writes keeps its address, its operations are the same for every acceptance count, and nothing in it asks the
host. Whatever prevents a capture leaves the eager path in use, and the reason is recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from .drafter_cache import CAPACITY_STEP, DrafterCache

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 3


class Backend(Protocol):
    """Records what a function does to tensors so that it can be done again; CUDA graphs, or an emulation in tests."""

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Runs `step` while recording and returns a function that does the same operations on the same tensors."""
        ...


class CudaBackend:
    """`torch.cuda.CUDAGraph`s that share one memory pool, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # cuBLAS workspaces and lazily made buffers must exist before the capture, on a side stream as it asks for.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay


class GraphedStep:
    """
    A function of tensors with fixed shapes, captured once.

    Args:
        step (`Callable`): takes the static inputs by name and returns tensors; it may change buffers in place, and must
            be harmless to run several times with the example inputs.
        examples (`dict[str, torch.Tensor]`): shapes, dtypes and devices of the inputs, and values for the warm-up.
    """

    def __init__(self, backend: Backend, step: Callable[..., tuple[torch.Tensor, ...]], examples: dict[str, torch.Tensor]) -> None:
        self.inputs = {name: example.clone() for name, example in examples.items()}
        # Made outside the capture, so that they are not part of the graphs' shared memory pool.
        self.outputs = tuple(torch.empty_like(result) for result in step(**self.inputs))

        def run() -> None:
            for output, result in zip(self.outputs, step(**self.inputs), strict=True):
                output.copy_(result)

        self._replay = backend.capture(run)

    def __call__(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies `inputs` into the static ones, replays, and returns copies of the outputs."""
        for name, value in inputs.items():
            self.inputs[name].copy_(value)
        self._replay()
        return tuple(output.clone() for output in self.outputs)


class DraftGraphs:
    """
    The drafter's step in static buffers for one (head, target, batch size, capacity): one graph per number of drafts K.

    A step takes a fixed `K + 1` rows, as many as a round can commit; `counts` tells which are real, and the others are
    mask rows behind the ones that matter.
    """

    def __init__(self, head: Any, target: Any, batch_size: int, capacity: int, backend: Backend) -> None:
        self.head = head
        self.batch_size = batch_size
        self.borrowed = head.borrow(target)
        self.backend = backend
        self.cache: DrafterCache = head.new_cache(batch_size, static_capacity=capacity)
        self.fingerprint = weights_fingerprint(head, target)
        self.failed: dict[int, str] = {}
        self._steps: dict[int, GraphedStep] = {}

    def draft(self, token_ids: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, k: int) -> torch.Tensor | None:
        """
        Drafts `[batch, k]` target ids by replay, or `None` if this pass does not fit a graph (the first one, over the
        prompt) or could not be captured. Shapes as for `PEagleDrafterModel.draft`.
        """
        n = token_ids.shape[1]
        # The last rounds of a call need fewer drafts than there are: a graph for more serves them as well.
        size = min((ready for ready in self._steps if ready >= k), default=k)
        if n > size + 1 or size in self.failed:
            return None
        if size not in self._steps:
            try:
                self._steps[size] = self._capture(size, features)
            except Exception as error:  # whatever the runtime refuses: the eager path gives the same tokens
                self.failed[size] = f"capture failed: {type(error).__name__}: {error}"
                logger.warning("Drafting K=%d without a graph: %s", size, self.failed[size])
                return None
        pad = size + 1 - n
        (tokens,) = self._steps[size](
            token_ids=torch.nn.functional.pad(token_ids, (0, pad)),
            features=torch.nn.functional.pad(features, (0, 0, 0, pad)),
            counts=counts,
        )
        return tokens[:, :k]

    def _capture(self, k: int, features: torch.Tensor) -> GraphedStep:
        device = self.head.device
        examples = {
            "token_ids": torch.zeros(self.batch_size, k + 1, dtype=torch.long, device=device),
            "features": torch.zeros(self.batch_size, k + 1, features.shape[2], dtype=features.dtype, device=device),
            # No real rows: a warm-up run only writes behind the committed slots.
            "counts": torch.zeros(self.batch_size, dtype=torch.long, device=device),
        }

        def step(token_ids: torch.Tensor, features: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            longest = self.cache.longest
            out = self.head.draft(token_ids, features, counts, k, self.cache, self.borrowed, longest=longest)
            return (out.tokens,)

        return GraphedStep(self.backend, step, examples)


def weights_fingerprint(head: Any, target: Any) -> tuple[Any, ...]:
    """Changes when weights are replaced, moved or written to, or another attention is chosen: graphs are then stale."""
    borrowed = []
    if head.config.share_embeddings:
        borrowed += target.get_input_embeddings().parameters()
    if head.config.share_lm_head:
        borrowed += target.get_output_embeddings().parameters()
    return (*module_fingerprint(head), *_versions(borrowed))


def module_fingerprint(module: Any) -> tuple[Any, ...]:
    """As [`weights_fingerprint`], of one model."""
    return (module.config._attn_implementation, *_versions([*module.parameters(), *module.buffers()]))


def _versions(tensors: list[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    return ((t.data_ptr(), t._version, t.dtype) for t in tensors)


class _Runners:
    """Draft graphs that outlive a call, by head and target; each is used by one call at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_head: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[int, DraftGraphs]]] = WeakKeyDictionary()
        self.in_use: set[int] = set()
        self.by_target: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        self.backend: Backend = CudaBackend()


_runners = _Runners()
_mode = threading.local()


@contextlib.contextmanager
def use_cuda_graphs(enabled: bool = True) -> Iterator[None]:
    """
    Turns graph capture of the draft step on or off for `generate()` calls in this block and thread.

    Off by default, or by the environment variable `HF_PEAGLE_CUDA_GRAPHS` (0 or 1).
    """
    before = getattr(_mode, "enabled", None)
    _mode.enabled = enabled
    try:
        yield
    finally:
        _mode.enabled = before


def wants_graphs() -> bool:
    """Whether capture is asked for in this thread."""
    enabled = getattr(_mode, "enabled", None)
    return os.environ.get("HF_PEAGLE_CUDA_GRAPHS", "0") == "1" if enabled is None else bool(enabled)


def reset_graphs() -> None:
    """Drops all captured graphs and their buffers."""
    with _runners.lock:
        _runners.by_head.clear()
        _runners.by_target.clear()
        _runners.in_use.clear()


def refusal(head: Any, samples_drafts: bool) -> str | None:
    """Why the draft step of this head cannot be captured, or `None`."""
    if not wants_graphs():
        return "not asked for"
    if isinstance(_runners.backend, CudaBackend) and head.device.type != "cuda":
        return f"the head is on {head.device.type}, not on a CUDA device"
    if samples_drafts:
        return "drafts are sampled, and a graph would repeat its random numbers"
    if head.training:
        return "the head is in training mode"
    if hasattr(head, "_hf_hook"):
        return "the head has accelerate hooks, which move tensors between devices"
    return None


@contextlib.contextmanager
def draft_graphs(head: Any, target: Any, batch_size: int, columns: int) -> Iterator[DraftGraphs | None]:
    """
    Graphs for a call that needs `columns` columns, exclusively for the block; `None` while another thread has them.

    They are kept for the next call and made anew when the buffers are too short or the weights have changed.
    """
    capacity = -(-columns // CAPACITY_STEP) * CAPACITY_STEP
    with _runners.lock:
        of_target = _runners.by_head.setdefault(head, WeakKeyDictionary()).setdefault(target, {})
        graphs = of_target.get(batch_size)
        if graphs is not None and id(graphs) in _runners.in_use:
            graphs = None
            mine = False
        else:
            stale = graphs is None or graphs.cache.capacity < columns
            stale = stale or graphs.fingerprint != weights_fingerprint(head, target)
            if stale:
                graphs = of_target[batch_size] = DraftGraphs(head, target, batch_size, capacity, _runners.backend)
            assert graphs is not None
            _runners.in_use.add(id(graphs))
            mine = True
    try:
        if graphs is not None:
            graphs.cache.reset()
        yield graphs
    finally:
        if mine:
            with _runners.lock:
                _runners.in_use.discard(id(graphs))
