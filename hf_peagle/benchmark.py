"""
The benchmark: every way of decoding in one process, prompt by prompt in turn, so that a machine that slows down or speeds
up does so for all of them; and the cost curves from which the best draft length of this machine follows.

`main` is the command line (scripts/benchmark.py); `run_benchmark` does the same from Python.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .benchmark_costs import measure_costs
from .benchmark_methods import (
    BATCH_1_ONLY,
    Batch,
    Method,
    OracleHead,
    Variant,
    first_divergence,
    optimised_variant,
    run_method,
    untrained_head,
)
from .benchmark_options import DTYPES, BenchmarkOptions, parse_arguments
from .benchmark_plots import plot
from .benchmark_prompts import EncodedPrompt, encode_with, select_prompts
from .benchmark_records import Records, command_line, git_commit, machine, now
from .benchmark_report import readme_rows, summarise, to_markdown
from .example_target import example_target, target_origin
from .files import write_text
from .modeling_peagle import PEagleDrafterModel
from .training.prompts import Prompt

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 12


@dataclass
class Loaded:
    """The models of one data type as loaded, in eval mode, and how prompts become ids."""

    target: PreTrainedModel
    encode: Callable[[Prompt], list[int]]
    drafter: PEagleDrafterModel | None = None
    eagle3: PEagleDrafterModel | None = None
    assistant: Any = None


def load_models(options: BenchmarkOptions, dtype: str) -> Loaded:
    """Loads what `options` names; without a target the example target, without a drafter an untrained one."""
    folder = options.target or example_target()
    kind = DTYPES[dtype]
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(options.device).eval()
    drafter = eagle3 = assistant = None
    if options.drafter:
        drafter = PEagleDrafterModel.from_pretrained(options.drafter, dtype=kind).to(options.device).eval()
    if options.eagle3:
        eagle3 = PEagleDrafterModel.from_pretrained(options.eagle3, dtype=kind).to(options.device).eval()
        if eagle3.config.algorithm != "eagle3":
            raise ValueError(f"eagle3={options.eagle3!r}: its config.json says algorithm={eagle3.config.algorithm!r}.")
    if options.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=kind).to(options.device).eval()
    return Loaded(target, encode_with(AutoTokenizer.from_pretrained(folder)), drafter, eagle3, assistant)


def build_methods(options: BenchmarkOptions, variants: Sequence[Variant]) -> list[Method]:
    """
    All methods: plain decoding in every variant, and the others on the fastest one, where a user would run them; of
    P-EAGLE also `eager_tokens` on the untouched target.
    """
    methods = [Method("plain", variant) for variant in variants]
    fastest = variants[-1]
    if options.prompt_lookup:
        methods.append(Method("lookup", fastest))
    if fastest.assistant is not None:
        methods.append(Method("assistant", fastest))
    if "eagle3" in fastest.heads:
        methods += [Method("eagle3", fastest, length, fastest.heads["eagle3"]) for length in options.eagle3_tokens]
    methods += [Method("peagle", fastest, length, fastest.heads["peagle"]) for length in options.num_assistant_tokens]
    if fastest is not variants[0]:
        methods += [Method("peagle", variants[0], length, variants[0].heads["peagle"]) for length in options.eager_tokens]
    if "random" in fastest.heads:
        methods.append(Method("random", fastest, "adaptive", fastest.heads["random"]))
    methods += [Method("oracle", fastest, n, OracleHead(fastest.heads["peagle"])) for n in options.oracle_lengths]
    return methods


def run_benchmark(
    options: BenchmarkOptions,
    load: Callable[[BenchmarkOptions, str], Loaded] = load_models,
    partial: Path | None = None,
    resume: bool = False,
    command: str = "",
) -> dict[str, Any]:
    """
    Measures and returns the result (JSON-able; see results/README.md for its fields).

    Args:
        load: gives the models for a data type.
        partial: records are appended to this file as they are made.
        resume: go on from `partial`; it must come from the same settings and prompts.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    records: Records | None = None
    sections, prompts = [], []
    for dtype in options.dtype:
        loaded = load(options, dtype)
        prompts = select_prompts(options.prompts, loaded.encode, options.limit, options.max_prompt_tokens)
        if records is None:
            records = Records(partial, {"settings": asdict(options), "prompts": _fingerprint(prompts)}, resume)
        variants, notes = make_variants(options, loaded)
        del loaded
        for batch_size in options.batch_size:
            section = _Section(options, dtype, batch_size, variants, prompts, records)
            section.measure()
            summary = summarise(records.of(section.name), section.runs)
            named = {"dtype": dtype, "batch_size": batch_size, **summary, "notes": notes + section.notes}
            sections.append(named)
    folder = options.target or str(example_target() if load is load_models else "given")
    return {
        "schema": 1,
        "command": command,
        "date": now(),
        "git_commit": git_commit(),
        "machine": machine(torch.device(options.device)),
        "target": f"{Path(folder).name} ({target_origin(folder)})",
        "drafter": Path(options.drafter).name if options.drafter else "untrained",
        "settings": _without_folders(options),
        "prompts": {"count": len(prompts), "ids": [prompt.id for prompt in prompts], "sha256": _fingerprint(prompts)},
        "rows": readme_rows(sections[0]),
        "sections": sections,
    }


def make_variants(options: BenchmarkOptions, loaded: Loaded) -> tuple[list[Variant], list[str]]:
    """The models as loaded, and a copy made fast where that works; and what a reader should know about them."""
    notes = []
    if loaded.drafter is None:
        notes.append("The drafter is untrained: its costs are real, its acceptance is not.")
    heads = {"peagle": loaded.drafter or untrained_head(loaded.target)}
    if loaded.eagle3 is not None:
        heads["eagle3"] = loaded.eagle3
    if options.random_head:
        heads["random"] = untrained_head(loaded.target, like=heads["peagle"], seed=1)
    for model in (loaded.target, loaded.assistant):
        if model is not None:  # everything here is greedy; a sampling default would only warn at every call
            model.generation_config = copy.deepcopy(model.generation_config)
            model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    eager = Variant("eager", loaded.target, heads, loaded.assistant)
    if not options.optimise:
        return [eager], notes
    fast, reason = optimised_variant(eager)
    if fast is None:
        notes.append(f"No optimised variant: {reason}.")
        logger.warning("Measuring the eager target only: %s", reason)
        return [eager], notes
    return [eager, fast], notes


class _Section:
    """One data type and batch size."""

    def __init__(
        self,
        options: BenchmarkOptions,
        dtype: str,
        batch_size: int,
        variants: list[Variant],
        prompts: list[EncodedPrompt],
        records: Records,
    ) -> None:
        self.options = options
        self.name = f"{dtype}/b{batch_size}"
        self.variants = variants
        self.records = records
        self.notes: list[str] = []
        size = min(batch_size, len(prompts))
        usable = len(prompts) // size * size
        self.batches = [Batch(prompts[i : i + size]) for i in range(0, usable, size)]
        if usable < len(prompts):
            self.notes.append(f"The last {len(prompts) - usable} prompts do not fill a batch and were left out.")
        self.runs = min(options.runs, len(self.batches))
        if self.runs < options.runs:
            self.notes.append(f"{len(self.batches)} groups of prompts make {self.runs} runs only.")
        self.methods = build_methods(options, variants)
        if size > 1:
            dropped = [m.name for m in self.methods if m.kind in BATCH_1_ONLY]
            self.methods = [m for m in self.methods if m.kind not in BATCH_1_ONLY]
            if dropped:
                self.notes.append(f"transformers runs {', '.join(dropped)} at batch 1 only.")

    def measure(self) -> None:
        """Everything of this section that is not on record yet."""
        pending = [g for g in range(len(self.batches)) if any(not self._has(m, g) for m in self.methods)]
        if pending:
            self._warm_up()
        for group in tqdm(pending, desc=self.name, unit="prompt", disable=None):
            for method in self._order(group):
                if not self._has(method, group):
                    self._run(method, group)
        for group in range(len(self.batches)):
            self._compare(group)
        if self.options.cost_sweeps and not self.records.find(self.name, "costs"):
            self._measure_costs()

    def _order(self, group: int) -> list[Method]:
        """Rotated by one from prompt to prompt; oracles last, since they replay what plain decoding found."""
        start = group % len(self.methods)
        turned = self.methods[start:] + self.methods[:start]
        return [m for m in turned if m.kind != "oracle"] + [m for m in turned if m.kind == "oracle"]

    def _has(self, method: Method, group: int) -> bool:
        return self.records.find(self.name, "generation", group, method.name) is not None

    def _warm_up(self) -> None:
        batch = self.batches[0]
        plain: dict[str, list[list[int]]] = {}
        for method in self.methods:
            if method.kind == "oracle":
                self._prepare_oracle(method, batch, plain[method.variant.label])
            tokens = run_method(method, batch, min(WARM_UP_TOKENS, self.options.max_new_tokens))["tokens"]
            if method.kind == "plain":
                plain[method.variant.label] = tokens

    def _prepare_oracle(self, method: Method, batch: Batch, plain: list[list[int]]) -> None:
        room = method.length if isinstance(method.length, int) else method.head.config.num_depths
        method.head.know([[*p.ids, *row] for p, row in zip(batch.prompts, plain, strict=True)], room)

    def _run(self, method: Method, group: int) -> None:
        batch = self.batches[group]
        if method.kind == "oracle":
            plain = self.records.find(self.name, "generation", group, f"plain@{method.variant.label}")
            assert plain is not None
            self._prepare_oracle(method, batch, plain["tokens"])
        record = run_method(method, batch, self.options.max_new_tokens)
        block = group * self.runs // len(self.batches)
        key = {"kind": "generation", "section": self.name, "group": group, "block": block, "method": method.name}
        self.records.add({**key, **record})

    def _compare(self, group: int) -> None:
        """Tokens against plain decoding of the same target and of the stock one; not timed."""
        prompts = self.batches[group].prompts
        stock = self.records.find(self.name, "generation", group, f"plain@{self.variants[0].label}")
        for method in self.methods:
            if self.records.find(self.name, "comparison", group, method.name):
                continue
            found = self.records.find(self.name, "generation", group, method.name)
            own = self.records.find(self.name, "generation", group, f"plain@{method.variant.label}")
            assert found is not None
            assert own is not None
            assert stock is not None
            rows = zip(prompts, own["tokens"], found["tokens"], strict=True)
            divergences = [first_divergence(method.variant.target, *row) for row in rows]
            agree = [a == b for a, b in zip(stock["tokens"], found["tokens"], strict=True)]
            key = {"kind": "comparison", "section": self.name, "group": group, "method": method.name}
            counts = {"rows": len(prompts), "identical": divergences.count(None), "identical_to_stock": sum(agree)}
            self.records.add({**key, **counts, "divergences": [d for d in divergences if d]})

    def _measure_costs(self) -> None:
        """Cost curves behind real text: prompts and answers, repeated up to the wanted context."""
        answered = [self.records.find(self.name, "generation", g, "plain@eager") for g in range(len(self.batches))]
        target = self.variants[0].target
        limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 2**30
        context = min(self.options.context, limit - 32)
        rows = []
        for b in range(len(self.batches[0].prompts)):
            text: list[int] = []
            for batch, record in zip(self.batches, answered, strict=True):
                assert record is not None
                text += [*batch.prompts[b].ids, *record["tokens"][b]]
            rows.append((text * (context // len(text) + 1))[:context])
        # With a static cache a pass has another form; its curve is that of the graphs (scripts/check_gpu.py).
        measured = [variant for variant in self.variants if not variant.generate_kwargs]
        costs = measure_costs(measured, torch.tensor(rows, device=target.device), sweeps=self.options.cost_sweeps)
        self.records.add({"kind": "costs", "section": self.name, "group": None, "method": None, "costs": costs})


def _fingerprint(prompts: Sequence[EncodedPrompt]) -> str:
    return hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode()).hexdigest()


def _without_folders(options: BenchmarkOptions) -> dict[str, Any]:
    """Settings to publish: where files lie on this machine is nobody's business."""
    settings = asdict(options)
    for name in ("target", "drafter", "eagle3", "assistant"):
        settings[name] = settings[name] and Path(settings[name]).name
    settings["prompts"] = ["/".join(Path(file).parts[-2:]) for file in options.prompts]
    return settings


# ---------------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None, load: Callable[[BenchmarkOptions, str], Loaded] = load_models) -> int:
    """Runs the command line; `load` gives the models. Returns the exit status."""
    options, output = parse_arguments(argv)
    json_path = output.json
    partial = None if json_path is None else json_path.with_name(json_path.name + ".partial.jsonl")
    command = command_line(sys.argv[1:] if argv is None else argv)
    result = run_benchmark(options, load, partial, output.resume, command)
    text = to_markdown(result)
    if json_path is not None:
        write_text(json_path, json.dumps(result, indent=1) + "\n")
    if output.markdown is not None:
        write_text(output.markdown, text)
    else:
        sys.stdout.write(text)
    if output.plot is not None:
        plot(result, output.plot)
    if partial is not None:
        partial.unlink(missing_ok=True)
    return 0
