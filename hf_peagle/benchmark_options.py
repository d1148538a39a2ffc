"""What a benchmark measures: its options, and the command line that sets them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .speculation import TRANSFORMERS_DEFAULT_LENGTH

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FULL = {"limit": None, "max_new_tokens": 128, "num_assistant_tokens": [1, 2, 4, 8, "adaptive"], "runs": 5, "cost_sweeps": 9}
QUICK = {"limit": 2, "max_new_tokens": 64, "num_assistant_tokens": [2, 4, "adaptive"], "runs": 2, "cost_sweeps": 3}


@dataclass
class BenchmarkOptions:
    """
    What to measure. Names and meanings are those of the command line (`scripts/benchmark.py --help`); the defaults of
    the fields that are `None` there are in `FULL` and `QUICK`.
    """

    target: str | None = None
    drafter: str | None = None
    eagle3: str | None = None
    assistant: str | None = None
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 128
    max_prompt_tokens: int = 1024
    dtype: tuple[str, ...] = ("fp32",)
    batch_size: tuple[int, ...] = (1,)
    num_assistant_tokens: tuple[int | str, ...] = (1, 2, 4, 8, "adaptive")
    eagle3_tokens: tuple[int | str, ...] = (2, 4, "adaptive")
    oracle_tokens: tuple[int | str, ...] | None = None
    eager_tokens: tuple[int | str, ...] = ("adaptive",)
    random_head: bool = False
    prompt_lookup: bool = True
    optimise: bool = True
    runs: int = 5
    cost_sweeps: int = 9
    context: int = 256
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "runs", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.max_new_tokens < 2:
            raise ValueError("max_new_tokens=1: the first token comes from the prompt's pass; measure at least 2.")
        if unknown := [dtype for dtype in self.dtype if dtype not in DTYPES]:
            raise ValueError(f"dtype={unknown[0]!r}: choose from {', '.join(DTYPES)}.")
        if any(size < 1 for size in self.batch_size):
            raise ValueError(f"batch_size={min(self.batch_size)}: must be at least 1.")
        for lengths in (self.num_assistant_tokens, self.eagle3_tokens, self.eager_tokens, self.oracle_tokens or ()):
            for length in lengths:
                if length != "adaptive" and not (isinstance(length, int) and length >= 1):
                    raise ValueError(f"num_assistant_tokens={length!r}: give numbers of at least 1, or 'adaptive'.")
                if length == TRANSFORMERS_DEFAULT_LENGTH:
                    raise ValueError(f"num_assistant_tokens={length}: generate() cannot tell it from its own default; take another.")

    @property
    def oracle_lengths(self) -> tuple[int | str, ...]:
        """Draft lengths of the accept-all oracle: by default the longest one measured."""
        if self.oracle_tokens is not None:
            return self.oracle_tokens
        fixed = [length for length in self.num_assistant_tokens if isinstance(length, int)]
        return (max(fixed),) if fixed else ()


def _length(text: str) -> int | str:
    return text if text == "adaptive" else int(text)


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    p = argparse.ArgumentParser(description="Compares ways of decoding with a P-EAGLE head on this machine.")
    p.add_argument("--target", help="folder or Hub id of the target; default: the example target")
    p.add_argument("--drafter", help="P-EAGLE head; default: an untrained one (real costs, no acceptance)")
    p.add_argument("--eagle3", help="EAGLE-3 head to compare with")
    p.add_argument("--assistant", help="small model for classic assisted decoding")
    p.add_argument("--prompts", nargs="+", default=[], help="JSONL files in EAGLE's question or the messages format")
    p.add_argument("--limit", type=int, help="number of prompts in all, spread over the files; default: all")
    p.add_argument("--max-new-tokens", type=int, help="default 128")
    p.add_argument("--max-prompt-tokens", type=int, default=1024, help="leave longer prompts out")
    p.add_argument("--dtype", nargs="+", default=["fp32"], choices=list(DTYPES))
    p.add_argument("--batch-size", nargs="+", type=int, default=[1])
    p.add_argument("--num-assistant-tokens", nargs="+", type=_length, help="draft lengths; numbers and 'adaptive'")
    p.add_argument("--eagle3-tokens", nargs="+", type=_length, default=[2, 4, "adaptive"], help="lengths of the EAGLE-3 head")
    p.add_argument("--eager-tokens", nargs="*", type=_length, default=["adaptive"], help="P-EAGLE on the stock target")
    p.add_argument("--oracle-tokens", nargs="*", type=_length, help="accept-all oracle; default: the largest number")
    p.add_argument("--random-head", action="store_true", help="also a random head, the worst case of adaptive drafting")
    p.add_argument("--no-prompt-lookup", dest="prompt_lookup", action="store_false")
    p.add_argument("--no-optimise", dest="optimise", action="store_false", help="stock target only")
    p.add_argument("--runs", type=int, help="blocks of prompts whose ratios give median and range; default 5")
    p.add_argument("--cost-sweeps", type=int, help="repetitions of the cost curves, 0 for none; default 9")
    p.add_argument("--context", type=int, default=256, help="tokens before the passes of the cost curves")
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--quick", action="store_true", help="few prompts and lengths: a first look in about two minutes")
    p.add_argument("--json", type=Path, metavar="OUT", help="result; records go to OUT.partial.jsonl meanwhile")
    p.add_argument("--markdown", type=Path, metavar="OUT", help="tables; default: standard output")
    p.add_argument("--plot", type=Path, metavar="DIR", help="folder for PNG plots (needs matplotlib)")
    p.add_argument("--resume", action="store_true", help="go on from OUT.partial.jsonl")
    return p


@dataclass
class Output:
    """Where the result goes, and whether to go on from an interrupted run."""

    json: Path | None
    markdown: Path | None
    plot: Path | None
    resume: bool


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[BenchmarkOptions, Output]:
    """Reads a command line; leaves the process with a message where it makes no sense."""
    known = parser()
    arguments: dict[str, Any] = vars(known.parse_args(argv))
    defaults: dict[str, Any] = QUICK if arguments.pop("quick") else FULL
    arguments.update({name: value for name, value in defaults.items() if arguments[name] is None})
    output = Output(*(arguments.pop(name) for name in ("json", "markdown", "plot", "resume")))
    if output.resume and output.json is None:
        known.error("--resume continues OUT.partial.jsonl, so it needs --json OUT.")
    try:
        return BenchmarkOptions(**{n: tuple(v) if isinstance(v, list) else v for n, v in arguments.items()}), output
    except ValueError as error:
        known.error(str(error))
