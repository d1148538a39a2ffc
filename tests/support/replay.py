"""A graph on CPU: records the operations of a step once and executes that very list again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SYNCING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::is_nonzero",
}


class OpRecorder(TorchDispatchMode):
    """Lists every operation with its arguments and results; `syncs` names those that would ask the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def syncs(self) -> list[str]:
        return [name for name in (func.name().split(".")[0] for func, *_ in self.calls) if name in SYNCING]

    @property
    def trace(self) -> list[tuple[str, Any]]:
        """Operation names with result shapes: must be equal for every acceptance count."""

        def shape(out: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda t: tuple(t.shape), out)

        return [(func.name(), shape(out)) for func, _, _, out in self.calls]


class ReplayBackend:
    """
    Stands in for CUDA graphs: `replay` runs the recorded operations in order, each on the recorded argument tensors, and
    copies its results into the recorded result tensors. Python does not run again, so a value that only Python computed
    stays what it was at capture. Between replays every intermediate result is poisoned.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        self.captures += 1
        with OpRecorder() as recorder:
            step()
        assert not recorder.syncs, f"the step asks the host: {recorder.syncs}"
        calls = recorder.calls

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            self._poison(calls)
            for func, args, kwargs, out in calls:
                again = func(*args, **kwargs)
                self._put(out, again)

        return replay

    @staticmethod
    def _put(old: Any, new: Any) -> None:
        if isinstance(old, torch.Tensor):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        elif isinstance(old, (tuple, list)):
            for a, b in zip(old, new, strict=True):
                ReplayBackend._put(a, b)

    @staticmethod
    def _poison(calls: list[tuple[Any, Any, Any, Any]]) -> None:
        """Results that own fresh storage (not views of, nor writes into, an older tensor) become NaN or -1."""
        known: set[int] = set()
        for _, args, kwargs, out in calls:
            for tensor in _tensors((args, kwargs)):
                known.add(tensor.untyped_storage().data_ptr())
            for tensor in _tensors(out):
                if tensor.untyped_storage().data_ptr() not in known:
                    known.add(tensor.untyped_storage().data_ptr())
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype == torch.int64:
                        tensor.fill_(-1)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, tree)
    return found
