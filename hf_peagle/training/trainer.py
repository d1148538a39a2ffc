"""The training loop: packed examples, exact resume, evaluation and checkpoints by the clock."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_peagle.modeling_peagle import PEagleDrafterModel

from .batches import DocumentSource, Example, make_example, pack_order, seeded
from .checkpoint import Progress, load_state, replace_folder, save_state
from .config import TrainingConfig
from .evaluate import evaluate
from .features import TargetOutputs
from .objective import DraftObjective, use_row_attention
from .optimisers import build_optimisers, rate_factor, set_rates
from .rows import partition

logger = logging.getLogger(__name__)

OpenSource = Callable[[list[str] | None], tuple[DocumentSource, list[str]]]


def save_head(head: PEagleDrafterModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the head in `dtype` as a folder that `from_pretrained` reads, replacing an earlier one as a whole."""
    implementation = head.config._attn_implementation
    copied = copy.deepcopy(head).to(dtype)
    copied.config._attn_implementation = "sdpa"
    replace_folder(folder, lambda path: copied.save_pretrained(path))
    head.config._attn_implementation = implementation


class Trainer:
    """
    Trains `head` on the documents of `open_source`.

    Args:
        config (`TrainingConfig`): the run.
        head (`PEagleDrafterModel`): fp32; trained in place.
        target (`PreTrainedModel`): lends its tables and output rows.
        open_source (`Callable`): `None` or a list of file names to (documents, file names). Called with `None` at each
            epoch's start, so that new answers join then, and with the epoch's names on resume.
        held_out (`DocumentSource`): documents for the evaluation.
        accelerator (`Accelerator`, *optional*): processes, precision, trackers.
    """

    def __init__(
        self,
        config: TrainingConfig,
        head: PEagleDrafterModel,
        target: PreTrainedModel,
        open_source: OpenSource,
        held_out: DocumentSource,
        accelerator: Accelerator | None = None,
    ) -> None:
        if not config.max_steps and not config.max_minutes:
            raise ValueError("max_steps=0 and max_minutes=0: give the run an end")
        self.config = config
        self.accelerator = accelerator or Accelerator(cpu=not torch.cuda.is_available())
        self.device = self.accelerator.device
        self.head = head.to(self.device)
        use_row_attention(self.head, self.device)
        self.open_source, self.held_out = open_source, held_out
        self.output = Path(config.output)
        self.token_ids = self.head.draft_token_ids.cpu()
        output = target.get_output_embeddings()
        rows = self.token_ids.to(output.weight.device)
        bias = getattr(output, "bias", None)
        wide = torch.bfloat16 if config.bf16 else torch.float32
        self.objective = DraftObjective(
            self.head,
            self.head.borrow(target),
            output.weight.detach()[rows].to(self.device, wide),
            config,
            None if bias is None else bias.detach()[rows].to(self.device, wide),
        )
        named = list(self.objective.named_parameters())
        self.wrapped = self.accelerator.prepare(self.objective)
        self.optimisers = build_optimisers(named, config)
        self.progress = Progress()
        self.average: list[torch.Tensor] | None = None
        if config.ema:
            self.average = [p.detach().clone() for p in self.head.parameters()]

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> dict[str, Any]:
        """Trains to the end of the budget, from the last state if there is one; returns the last evaluation."""
        self._resume()
        config, progress = self.config, self.progress
        begin = time.monotonic() - progress.seconds
        next_eval = progress.seconds + min(60.0 * config.eval_minutes, 120.0 if progress.step == 0 else 1e9)
        next_save = progress.seconds + 60.0 * config.save_minutes
        self.objective.train()
        for examples in self._steps():
            spent = self._spent()
            if spent >= 1.0:
                break
            loss = self._step(examples, rate_factor(progress.step, spent, config))
            progress.seconds = time.monotonic() - begin
            self._log({"loss": loss, "rate": rate_factor(progress.step, spent, config)})
            if progress.seconds >= next_eval:
                self.evaluate()
                progress.seconds = time.monotonic() - begin
                next_eval = progress.seconds + 60.0 * config.eval_minutes
            if progress.seconds >= next_save:
                self.save()
                next_save = progress.seconds + 60.0 * config.save_minutes
        self.save()
        result = self.evaluate()
        if self.accelerator.is_main_process:
            with self._averaged():
                save_head(self.head, self.output / "head")
        return result

    def _spent(self) -> float:
        """Share of the budget used, in [0, 1]."""
        config, progress = self.config, self.progress
        shares = [0.0]
        if config.max_steps:
            shares.append(progress.step / config.max_steps)
        if config.max_minutes:
            seconds = torch.tensor(progress.seconds, device=self.device)
            if self.accelerator.num_processes > 1:  # all processes must end at the same step
                seconds = self.accelerator.reduce(seconds, "mean")
            shares.append(float(seconds) / (60.0 * config.max_minutes))
        return min(1.0, max(shares))

    def _steps(self) -> Iterator[list[Example]]:
        """The examples of each optimiser step of this process, endlessly; keeps `progress` at the next pack."""
        config, progress = self.config, self.progress
        per_step = config.accumulate * self.accelerator.num_processes
        while True:
            source, progress.files = self.open_source(progress.files or None)
            lengths = [min(n, config.max_length) for n in source.lengths()]
            packs = pack_order(lengths, config.pack_tokens, seeded(config.seed, progress.epoch))
            if len(packs) < per_step:
                packs = (packs * per_step)[:per_step]
            while progress.pack + per_step <= len(packs):
                first = progress.pack + self.accelerator.process_index * config.accumulate
                examples = [self._example(source, packs[first + i], first + i) for i in range(config.accumulate)]
                progress.pack += per_step
                yield examples
            progress.epoch, progress.pack, progress.files = progress.epoch + 1, 0, []
            logger.info("epoch %d starts at step %d", progress.epoch, progress.step)

    def _example(self, source: DocumentSource, pack: list[int], number: int) -> Example:
        config, progress = self.config, self.progress
        depths = 1 if progress.step < config.warm_depth0_steps else config.num_depths
        generator = seeded(config.seed, progress.epoch, number, 1)
        parts = [source.load(index, config.max_length) for index in pack]
        return make_example(parts, self.token_ids, config, depths, generator)

    def _step(self, examples: list[Example], factor: float) -> float:
        config, progress = self.config, self.progress
        counts = torch.stack([e.rows.weight.sum() for e in examples]).sum()
        counts = torch.stack([counts, torch.tensor(float(sum(len(e.rows) for e in examples)))]).to(self.device)
        counts = self.accelerator.reduce(counts, "sum")
        segments = [(self._to_device(e), rows) for e in examples for rows in partition(e.rows, config.partitions)]
        total = torch.zeros((), device=self.device)
        # DDP averages the processes' gradients; the loss is a sum over all of them.
        scale = self.accelerator.num_processes / counts[0].clamp(min=1e-9)
        for number, (example, rows) in enumerate(segments):
            last = number == len(segments) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                with self.accelerator.autocast() if config.bf16 else contextlib.nullcontext():
                    loss, _ = self.wrapped(example, rows.to(self.device))
                self.accelerator.backward(loss * scale)
            total += loss.detach().float()
        if config.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), config.max_grad_norm)
        set_rates(self.optimisers, factor)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if self.average is not None:
            # Early on the average follows closely: a long memory of random weights would only hold it back.
            decay = min(config.ema, (1 + progress.step) / (10 + progress.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.head.parameters()], 1.0 - decay)
        progress.step += 1
        progress.tokens += sum(e.input_ids.numel() for e in examples) * self.accelerator.num_processes
        progress.rows += int(counts[1])
        return float(self.accelerator.reduce(total, "sum") / counts[0].clamp(min=1e-9))

    def _to_device(self, example: Example) -> Example:
        if self.device.type == "cpu":
            return example
        out = example.outputs
        moved = (out.streams, out.last_hidden, out.log_normaliser, out.top1)
        outputs = TargetOutputs(*(part.to(self.device, non_blocking=True) for part in moved))
        return Example(example.input_ids.to(self.device), outputs, example.next_tokens.to(self.device), example.rows)

    # -------------------------------------------------------------------------------------------- evaluation and state

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in the head's place, for an evaluation or a saved head."""
        if self.average is None:
            yield
            return
        own = [p.detach().clone() for p in self.head.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(self.head.parameters()), self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self.head.parameters()), own)

    def evaluate(self) -> dict[str, Any]:
        """Evaluates on the held-out documents, logs, and keeps the best head."""
        config = self.config
        result: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            indices = range(min(config.eval_documents, len(self.held_out.lengths())))
            with self._averaged():
                result = evaluate(
                    self.objective,
                    self.held_out,
                    indices,
                    self.token_ids,
                    min(config.draft_length, config.num_depths),
                    config.max_length,
                    config.bf16,
                )
                if result["acceptance_length"] > self.progress.best:
                    self.progress.best = result["acceptance_length"]
                    self._keep_best()
            self._log({"evaluation": result})
            logger.info(
                "step %d, %.1f min, %d tokens: acceptance length %.3f, accuracy %s",
                self.progress.step,
                self.progress.seconds / 60,
                self.progress.tokens,
                result["acceptance_length"],
                " ".join(f"{a:.3f}" for a in result["accuracy"]),
            )
        self.accelerator.wait_for_everyone()
        return result

    def _keep_best(self) -> None:
        """Copies the head to OUTPUT/best, and to the folder `best` of the configuration unless a better one is there."""
        folder = self.output / "best"
        save_head(self.head, folder)
        record = {"acceptance_length": self.progress.best, "step": self.progress.step, "run": self.output.name}
        (folder / "evaluation.json").write_text(json.dumps(record), encoding="utf-8")
        if not self.config.best:
            return
        shared = Path(self.config.best)
        known = shared / "evaluation.json"
        if known.exists() and json.loads(known.read_text())["acceptance_length"] >= self.progress.best:
            return
        replace_folder(shared, lambda path: shutil.copytree(folder, path, dirs_exist_ok=True))

    def _log(self, values: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        progress = self.progress
        record = {
            "step": progress.step,
            "epoch": progress.epoch,
            "minutes": round(progress.seconds / 60, 3),
            "tokens": progress.tokens,
            "rows": progress.rows,
            **values,
        }
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.config.tracker:
            flat = {k: v for k, v in record.items() if isinstance(v, int | float)}
            evaluation = values.get("evaluation", {})
            flat.update({k: v for k, v in evaluation.items() if isinstance(v, int | float)})
            self.accelerator.log(flat, step=progress.step)

    def save(self) -> None:
        """Writes the state that `run` goes on from."""
        if self.accelerator.is_main_process:
            tensors = {
                "head": {n: p.detach().clone() for n, p in self.head.named_parameters()},
                "token_ids": self.token_ids,
                "average": self.average,
                "optimisers": [o.state_dict() for o in self.optimisers],
            }
            save_state(self.output / "state", Progress(**asdict(self.progress)), tensors)
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def _resume(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        found = load_state(self.output / "state")
        if found is None:
            return
        self.progress, tensors = found
        if not torch.equal(tensors["token_ids"], self.token_ids):
            raise ValueError(f"output={self.config.output}: the run there has another draft vocabulary than this head")
        for name, parameter in self.head.named_parameters():
            parameter.copy_(tensors["head"][name])
        for optimiser, state in zip(self.optimisers, tensors["optimisers"], strict=True):
            peaks = [group["peak_lr"] for group in optimiser.param_groups]
            optimiser.load_state_dict(state)
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["peak_lr"] = peak
        if tensors["average"] is not None and self.average is not None:
            torch._foreach_copy_(self.average, [t.to(self.device) for t in tensors["average"]])
        logger.info("resumed at step %d, %.1f min", self.progress.step, self.progress.seconds / 60)
