"""What the target says about training documents: its hidden states at the captured layers and its output distribution.

`extract` runs the target, online or to fill the cache. A cache is one safetensors file per answer shard:

    input_ids      [T] int32     tokens of all documents of the shard, one after another
    label          [T] uint8     1 where the token was produced by the target, 0 in prompts
    lengths        [documents] int32
    streams        [T, captured streams x target width]   residual streams that enter the captured layers
    last_hidden    [T, target width]                      after the target's final norm
    log_normaliser [T] float32   log-sum-exp of the target's logits over its full vocabulary
    top1           [T] int32     the target's most likely next token

The metadata names the target, the layer ids, the dtype and the documents' sources. Files are memory-mapped and read document by document.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_peagle.files import replace_file

logger = logging.getLogger(__name__)

# Logits of this many positions are made at once: [positions, full vocabulary] is the largest tensor here.
_LOGIT_ROWS = 512


@dataclass
class Document:
    """
    One training document.

    Attributes:
        input_ids (`torch.Tensor`): `[N]` int64.
        label (`torch.Tensor`): `[N]` bool, True where the target produced the token.
        source (`str`): name of the prompt set, for reports.
    """

    input_ids: torch.Tensor
    label: torch.Tensor
    source: str = ""

    def __len__(self) -> int:
        return self.input_ids.numel()


@dataclass
class TargetOutputs:
    """
    The target's side of `T` tokens: see the module docstring. `streams` `[T, streams * width]`, `last_hidden`
    `[T, width]`, `log_normaliser` `[T]` float32, `top1` `[T]` int64.
    """

    streams: torch.Tensor
    last_hidden: torch.Tensor
    log_normaliser: torch.Tensor
    top1: torch.Tensor

    @staticmethod
    def cat(parts: Sequence[TargetOutputs]) -> TargetOutputs:
        """The parts' tokens one after another."""
        return TargetOutputs(
            torch.cat([p.streams for p in parts]),
            torch.cat([p.last_hidden for p in parts]),
            torch.cat([p.log_normaliser for p in parts]),
            torch.cat([p.top1 for p in parts]),
        )


# ----------------------------------------------------------------------------------------------------------- documents


def read_documents(path: str | Path, max_length: int) -> list[Document]:
    """Documents of one answer shard (JSONL with `input_ids` and `response_mask` spans), cut at `max_length` tokens."""
    documents = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                ids = torch.tensor(row["input_ids"], dtype=torch.long)
                label = torch.zeros(ids.numel(), dtype=torch.bool)
                for start, stop in row["response_mask"]:
                    label[start:stop] = True
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: not an answer row ({type(error).__name__}: {error}); expected JSON with "
                    "input_ids and response_mask. Delete the file to have its answers made again."
                ) from error
            ids, label = ids[:max_length], label[:max_length]
            if ids.numel() >= 3 and bool(label.any()):
                documents.append(Document(ids, label, str(row.get("source", ""))))
    return documents


# ---------------------------------------------------------------------------------------------------------- extraction


class StreamRecorder:
    """Keeps the residual streams that enter the given layers of a target, and its last hidden state, for one forward."""

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.base_model
        self.num_layers = target.config.get_text_config().num_hidden_layers

    def __call__(self, **inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Runs the decoder; returns the captured streams `[batch, n, width]` and the last hidden state."""
        layers = getattr(self.decoder, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == self.num_layers:
            return self._hooked(layers, inputs)
        states = self.decoder(**inputs, output_hidden_states=True, use_cache=False)
        return [states.hidden_states[i] for i in self.layer_ids], states.last_hidden_state

    def _hooked(self, layers: nn.ModuleList, inputs: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        # output_hidden_states=True would keep every layer's states: 10x the memory on deep targets.
        caught: dict[int, torch.Tensor] = {}

        def catch(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                caught[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [layers[i].register_forward_pre_hook(catch(i), with_kwargs=True) for i in self.layer_ids if i < self.num_layers]
        try:
            last = self.decoder(**inputs, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        caught[self.num_layers] = last
        return [caught[i] for i in self.layer_ids], last


def _groups(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length whose padded size stays within `batch_tokens` (one document at least)."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    group: list[int] = []
    for i in order:
        if group and lengths[i] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@torch.no_grad()
def extract(target: PreTrainedModel, documents: Sequence[Document], layer_ids: Sequence[int], batch_tokens: int = 1) -> list[TargetOutputs]:
    """
    The target's outputs for each document, in its dtype, on its device.

    Documents of similar length run together, padded on the right to at most `batch_tokens` tokens; with the default
    each runs alone, which is best on CPU.
    """
    recorder = StreamRecorder(target, layer_ids)
    device = target.get_input_embeddings().weight.device
    head = target.get_output_embeddings()
    results: dict[int, TargetOutputs] = {}
    for group in _groups([len(d) for d in documents], batch_tokens):
        longest = max(len(documents[i]) for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):
            ids[row, : len(documents[i])] = documents[i].input_ids
            mask[row, : len(documents[i])] = 1
        inputs = {"input_ids": ids.to(device)}
        if len(group) > 1:
            inputs["attention_mask"] = mask.to(device)
        streams, last = recorder(**inputs)
        for row, i in enumerate(group):
            n = len(documents[i])
            own = last[row, :n]
            normaliser, top1 = [], []
            for piece in own.split(_LOGIT_ROWS):
                logits = head(piece).float()
                normaliser.append(torch.logsumexp(logits, dim=-1))
                top1.append(logits.argmax(dim=-1))
            captured = torch.cat([s[row, :n].to(device) for s in streams], dim=-1)
            results[i] = TargetOutputs(captured, own, torch.cat(normaliser), torch.cat(top1))
    return [results[i] for i in range(len(documents))]


# --------------------------------------------------------------------------------------------------------------- cache


def cache_dtype(target: PreTrainedModel) -> torch.dtype:
    """Half of fp32's size without loss where the target itself runs in half precision; else fp16."""
    dtype = target.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float16


def _to_storage(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    if float(x.abs().max()) > limit:
        raise ValueError(f"hidden states reach {float(x.abs().max()):.3g}, beyond {dtype}: store the cache in bfloat16")
    return x.to(dtype).cpu().contiguous()


def write_shard(
    target: PreTrainedModel,
    documents: Sequence[Document],
    path: str | Path,
    layer_ids: Sequence[int],
    dtype: torch.dtype | None = None,
    batch_tokens: int = 1,
    progress: tqdm | None = None,
) -> None:
    """Extracts `documents` into one cache file, whole or not at all."""
    path = Path(path)
    dtype = cache_dtype(target) if dtype is None else dtype
    parts: list[TargetOutputs] = []
    for begin in range(0, len(documents), 16):
        some = documents[begin : begin + 16]
        for out in extract(target, some, layer_ids, batch_tokens):
            parts.append(
                TargetOutputs(
                    _to_storage(out.streams, dtype),
                    _to_storage(out.last_hidden, dtype),
                    out.log_normaliser.cpu(),
                    out.top1.cpu(),
                )
            )
        if progress is not None:
            progress.update(sum(len(d) for d in some))
    merged = TargetOutputs.cat(parts)
    tensors = {
        "input_ids": torch.cat([d.input_ids for d in documents]).int(),
        "label": torch.cat([d.label for d in documents]).to(torch.uint8),
        "lengths": torch.tensor([len(d) for d in documents], dtype=torch.int32),
        "streams": merged.streams,
        "last_hidden": merged.last_hidden,
        "log_normaliser": merged.log_normaliser,
        "top1": merged.top1.int(),
    }
    metadata = {
        "format": "peagle-features-1",
        "target": str(target.config._name_or_path),
        "layer_ids": json.dumps(list(layer_ids)),
        "dtype": str(dtype),
        "sources": json.dumps([d.source for d in documents]),
    }
    replace_file(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def pending_shards(answers: str | Path, cache: str | Path) -> list[tuple[Path, Path]]:
    """(answer file, cache file) of the answer shards whose features are not cached yet."""
    pairs = [(p, Path(cache) / f"{p.stem}.safetensors") for p in sorted(Path(answers).glob("answers-*.jsonl"))]
    return [(source, goal) for source, goal in pairs if not goal.exists()]


def build_cache(
    load_target: Callable[[], PreTrainedModel],
    answers: str | Path,
    cache: str | Path,
    layer_ids: Sequence[int],
    max_length: int,
    dtype: torch.dtype | None = None,
    batch_tokens: int = 1,
) -> int:
    """
    Extracts the features of every new answer shard; returns how many files were written.

    Interrupted, it goes on at the shard where it stopped. `load_target` is only called if there is something to do.
    """
    todo = pending_shards(answers, cache)
    if not todo:
        return 0
    target = load_target()
    read = [(read_documents(source, max_length), goal) for source, goal in todo]
    total = sum(len(d) for documents, _ in read for d in documents)
    written = 0
    with tqdm(total=total, unit="tok", desc="features", mininterval=5.0) as progress:
        for documents, goal in read:
            if not documents:
                logger.warning("%s holds no usable answer", goal.stem)
                continue
            write_shard(target, documents, goal, layer_ids, dtype, batch_tokens, progress)
            written += 1
    return written


class FeatureCache:
    """
    Documents of a cache folder, memory-mapped. `documents` lists (file, first token, length) in file order.

    Args:
        folder (`str`): what `build_cache` wrote.
        layer_ids (`Sequence[int]`): streams wanted; a subset of the cached ones and the target's layer count (the last
            hidden state) in any order.
        num_target_layers (`int`): layer count of the target.
        files (`Iterable[str]`, *optional*): names of the files to use. Default: all.
    """

    def __init__(self, folder: str | Path, layer_ids: Sequence[int], num_target_layers: int, files: Iterable[str] | None = None) -> None:
        self.folder = Path(folder)
        names = sorted(p.name for p in self.folder.glob("*.safetensors")) if files is None else list(files)
        if not names:
            raise ValueError(f"features {folder!s}: the folder holds no cached features (*.safetensors)")
        self.files = names
        self.documents: list[tuple[str, int, int]] = []
        self.layer_ids, self.num_target_layers = list(layer_ids), num_target_layers
        self._open: dict[str, Any] = {}
        self._columns: dict[str, list[int]] = {}
        self._sources: dict[str, list[str]] = {}
        self._first: dict[str, int] = {}
        for name in names:
            handle = self._handle(name)
            begin = 0
            self._sources[name] = json.loads(handle.metadata()["sources"])
            self._first[name] = len(self.documents)
            for length in handle.get_tensor("lengths").tolist():
                self.documents.append((name, begin, length))
                begin += length

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            handle = safe_open(self.folder / name, framework="pt")
            stored = json.loads(handle.metadata()["layer_ids"])
            missing = [i for i in self.layer_ids if i not in stored and i != self.num_target_layers]
            if missing:
                raise ValueError(f"features {self.folder / name}: hold streams {stored}, without {missing}")
            self._columns[name] = [stored.index(i) if i in stored else -1 for i in self.layer_ids]
            self._open[name] = handle
        return self._open[name]

    def lengths(self) -> list[int]:
        """Tokens per document."""
        return [length for _, _, length in self.documents]

    def load(self, index: int, max_length: int | None = None) -> tuple[Document, TargetOutputs]:
        """Document `index`, cut at `max_length` tokens, and the target's outputs for it."""
        name, begin, length = self.documents[index]
        stop = begin + (length if max_length is None else min(length, max_length))
        handle = self._handle(name)
        part = {key: handle.get_slice(key)[begin:stop] for key in ("input_ids", "label", "streams", "last_hidden", "log_normaliser", "top1")}
        last = part["last_hidden"]
        streams = part["streams"].view(last.shape[0], -1, last.shape[1])
        picked = [last if column < 0 else streams[:, column] for column in self._columns[name]]
        return (
            Document(part["input_ids"].long(), part["label"].bool(), self._sources[name][index - self._first[name]]),
            TargetOutputs(torch.cat(picked, dim=-1), last, part["log_normaliser"], part["top1"].long()),
        )
