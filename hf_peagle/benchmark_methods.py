"""The ways of decoding that a benchmark compares, and one timed call of each."""

from __future__ import annotations

import copy
import logging
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .benchmark_prompts import EncodedPrompt
from .configuration_peagle import PEagleConfig
from .modeling_peagle import DraftOutput, PEagleDrafterModel
from .stats import collect_statistics

logger = logging.getLogger(__name__)

LOOKUP_TOKENS = 10
UNTRAINED_DRAFT_VOCABULARY = 8192
# transformers' own assisted loop takes one prompt at a time.
BATCH_1_ONLY = ("lookup", "assistant")
WITH_HEAD = ("peagle", "eagle3", "random", "oracle")


@dataclass
class Variant:
    """
    The models in one state: as they are ("eager"), or prepared for speed ("optimised").

    Args:
        heads (`dict[str, Any]`): by kind of method: "peagle", "eagle3", "random".
        generate_kwargs (`dict[str, Any]`): for plain decoding and heads, what makes this variant fast.
    """

    label: str
    target: PreTrainedModel
    heads: dict[str, Any] = field(default_factory=dict)
    assistant: Any = None
    generate_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Method:
    """One way of decoding: a kind, the models it uses, and for heads the number of drafts or "adaptive"."""

    kind: str
    variant: Variant
    length: int | str | None = None
    head: Any = None

    @property
    def name(self) -> str:
        """Unique in a benchmark, e.g. "peagle-k4@optimised"."""
        length = "" if self.length is None else f"-k{self.length}" if isinstance(self.length, int) else f"-{self.length}"
        return f"{self.kind}{length}@{self.variant.label}"

    def generate_kwargs(self) -> dict[str, Any]:
        """What this method adds to a greedy `generate()` call."""
        if self.kind == "lookup":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if self.kind == "assistant":
            return {"assistant_model": self.variant.assistant}
        kwargs = dict(self.variant.generate_kwargs)
        if self.kind in WITH_HEAD:
            kwargs["assistant_model"] = self.head
            if self.length == "adaptive":
                kwargs["num_assistant_tokens_schedule"] = "adaptive"
            else:
                kwargs.update(num_assistant_tokens=self.length, num_assistant_tokens_schedule="constant")
        return kwargs


class OracleHead:
    """
    A head that is always right: the network of `head` runs, at its cost, and what it drafted is replaced by the known
    continuation. It shows the ceiling of a target, a machine and a drafter's cost, whatever the drafter has learned.
    """

    is_peagle_drafter = True

    def __init__(self, head: PEagleDrafterModel) -> None:
        self._head = head
        self._truth = torch.zeros(0, 0, dtype=torch.long)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def know(self, sequences: Sequence[Sequence[int]], room: int = 0) -> None:
        """
        Args:
            sequences: prompt and continuation of every row, without padding.
            room: columns beyond the longest sequence, at least as many as are drafted at once.
        """
        width = max(len(row) for row in sequences) + room + 1
        if self._truth.shape[0] != len(sequences) or self._truth.shape[1] < width:
            self._truth = torch.zeros(len(sequences), width, dtype=torch.long, device=self._head.device)
        # In place, since a captured draft step reads from this address.
        self._truth.zero_()
        for b, row in enumerate(sequences):
            self._truth[b, : len(row)] = torch.tensor(row, device=self._truth.device)

    def draft(self, token_ids: Any, features: Any, counts: torch.Tensor, num_tokens: int, cache: Any, **kwargs: Any) -> DraftOutput:
        """As [`PEagleDrafterModel.draft`]."""
        out = self._head.draft(token_ids, features, counts, num_tokens, cache, **kwargs)
        # The cache counts the slots read; slot j holds token j + 1.
        columns = cache.lengths[:, None] + 1 + torch.arange(num_tokens, device=cache.lengths.device)
        known = self._truth.gather(1, columns.clamp(max=self._truth.shape[1] - 1))
        return DraftOutput(known, out.draft_ids, out.logits, out.probabilities)


def untrained_head(target: PreTrainedModel, like: PEagleDrafterModel | None = None, seed: int = 0) -> PEagleDrafterModel:
    """A random head: with the shape and draft vocabulary of `like`, or else a one-layer one that fits `target`."""
    if like is not None:
        config = copy.deepcopy(like.config)
    else:
        size = min(UNTRAINED_DRAFT_VOCABULARY, target.config.get_text_config().vocab_size)
        config = PEagleConfig.from_target(target.config, num_hidden_layers=1, draft_vocab_size=size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = PEagleDrafterModel(config)
    if like is not None and like.has_vocab_map:
        head.set_draft_vocabulary(like.draft_token_ids.cpu())
    return head.to(device=target.device, dtype=target.dtype).eval()  # type: ignore


def optimise(model: Any) -> str | None:
    """Prepares `model` for speed in place; returns why not where that is impossible."""
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}, not on the CPU"
    try:
        from .cpu import optimize_for_cpu
    except ImportError:
        return "this build of hf_peagle has no optimize_for_cpu"
    try:
        optimize_for_cpu(model)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def optimised_variant(eager: Variant) -> tuple[Variant | None, str | None]:
    """
    A second, faster copy of the models, or `None` and the reason. On a CUDA device nothing is copied: there the faster
    way is a static cache, with which transformers compiles plain decoding.
    """
    if eager.target.device.type == "cuda":
        static = Variant("optimised", eager.target, eager.heads, eager.assistant, {"cache_implementation": "static"})
        return static, None
    target = copy.deepcopy(eager.target)
    if reason := optimise(target):
        return None, reason
    heads = {kind: copy.deepcopy(head) for kind, head in eager.heads.items()}
    for kind, head in heads.items():
        if reason := optimise(head):
            logger.warning("the %s head stays as it is: %s", kind, reason)
    assistant = copy.deepcopy(eager.assistant)
    if assistant is not None and (reason := optimise(assistant)):
        logger.warning("the assistant stays as it is: %s", reason)
    return Variant("optimised", target, heads, assistant), None


# ---------------------------------------------------------------------- one call


@dataclass
class Batch:
    """Prompts that are answered in one call."""

    prompts: list[EncodedPrompt]

    def inputs(self, pad_id: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Left-padded `input_ids` and `attention_mask`, `[batch, width]` int64."""
        width = max(len(prompt.ids) for prompt in self.prompts)
        rows = [[pad_id] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in self.prompts]
        mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in self.prompts]
        return {"input_ids": torch.tensor(rows, device=device), "attention_mask": torch.tensor(mask, device=device)}


class PassCounter:
    """Counts a model's forward passes, and times them where the host waits for each (on the CPU)."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.seconds: list[float] = []

    @contextmanager
    def active(self) -> Iterator[PassCounter]:
        """Counts inside the block."""
        began = [0.0]

        def before(*_: Any) -> None:
            began[0] = time.perf_counter()

        def after(*_: Any) -> None:
            self.seconds.append(time.perf_counter() - began[0])

        handles = [self.model.register_forward_pre_hook(before), self.model.register_forward_hook(after)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


def eos_ids(target: PreTrainedModel) -> list[int]:
    """The ids that end an answer of `target`."""
    eos = target.generation_config.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]


def pad_id(target: PreTrainedModel) -> int:
    """The id that fills up short rows."""
    pad = target.generation_config.pad_token_id
    return int(pad) if pad is not None else (eos_ids(target) or [0])[0]


def run_method(method: Method, batch: Batch, max_new_tokens: int) -> dict[str, Any]:
    """
    One timed greedy call. Returns a JSON-able record: `tokens` (per row, up to and with the end token), `seconds`,
    `rounds` ((drafted, accepted) pairs; `None` where a method does not tell), `target_forwards`, `draft_forwards`,
    `split` (seconds in prefill, draft, verify, other, and `setup` before the loop; `None` where unknown),
    `memory_mb` (peak above what was in use before the call).
    """
    target = method.variant.target
    device = target.device
    inputs = batch.inputs(pad_id(target), device)
    own_loop = method.kind in WITH_HEAD
    counter = PassCounter(target)
    with MemoryPeak(device) as memory, collect_statistics() as calls:
        began = time.perf_counter()
        kwargs = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": pad_id(target)}
        if own_loop or device.type == "cuda":
            output = target.generate(**inputs, **kwargs, **method.generate_kwargs())
        else:
            with counter.active():
                output = target.generate(**inputs, **kwargs, **method.generate_kwargs())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    rows = answers(output, inputs["input_ids"].shape[1], eos_ids(target))
    record: dict[str, Any] = {
        "tokens": rows,
        "prompt_tokens": [len(prompt.ids) for prompt in batch.prompts],
        "seconds": seconds,
        "rounds": None,
        "target_forwards": None,
        "draft_forwards": None,
        "split": None,
        "memory_mb": memory.peak_mb,
    }
    if own_loop:
        stats = calls[0]
        split = {name: stats.seconds.get(name, 0.0) for name in ("prefill", "draft", "verify", "other")}
        split["setup"] = max(0.0, seconds - sum(split.values()))
        record.update(
            rounds=[list(pair) for pair in stats.rounds],
            target_forwards=stats.target_forwards,
            draft_forwards=stats.draft_forwards,
            split=split,
        )
    elif counter.seconds:
        prefill, rest = counter.seconds[0], sum(counter.seconds[1:])
        other = max(0.0, seconds - prefill - rest)
        record.update(
            target_forwards=len(counter.seconds),
            split={"prefill": prefill, "draft": 0.0, "verify": rest, "other": other, "setup": 0.0},
        )
    return record


def answers(output: torch.Tensor, prompt_width: int, eos: list[int]) -> list[list[int]]:
    """Generated tokens of every row, without what stands behind its end token."""
    rows = []
    for row in output[:, prompt_width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:end])
    return rows


@torch.no_grad()
def first_divergence(target: PreTrainedModel, prompt: EncodedPrompt, expected: list[int], found: list[int]) -> dict[str, Any] | None:
    """
    Where `found` leaves `expected`, with the margin between the target's two best logits there: the target reads the
    prompt and the common tokens in one pass. `None` if they are equal. A margin near rounding error means that two
    tokens were equally good; a larger one that a method is wrong.
    """
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    ids = torch.tensor([list(prompt.ids) + expected[:place]], device=target.device)
    logits = target(input_ids=ids, use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values.tolist()
    return {
        "prompt": prompt.id,
        "position": place,
        "expected": expected[place] if place < len(expected) else None,
        "found": found[place] if place < len(found) else None,
        "margin": best[0] - best[1],
    }


class MemoryPeak:
    """Peak memory of a block above what was in use at its start, in MiB: `peak_mb`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_mb = 0.0

    def __enter__(self) -> MemoryPeak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device) / 2**20
            return self
        self._resets = _reset_peak_rss()
        self._before = _rss_mb("VmRSS") if self._resets else _max_rss_mb()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = _rss_mb("VmHWM") if self._resets else _max_rss_mb()
        self.peak_mb = max(0.0, peak - self._before)


def _reset_peak_rss() -> bool:
    # Linux forgets its high-water mark when told so; elsewhere only growth beyond all earlier calls is seen.
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _rss_mb(field_name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def _max_rss_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
