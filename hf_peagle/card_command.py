"""The command line of scripts/model_card.py: results into `head_card.json`, and the card made from it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import head_card
from .check_folder import first_difference
from .files import write_text
from .head_card import CardError
from .model_card import make_card


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if the card cannot be made, or differs with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the head")
    parser.add_argument("--evaluation", type=Path, help="evaluation summary (JSON), or a training log (the last one in it)")
    parser.add_argument("--how", help="with --evaluation: what was evaluated, in words")
    parser.add_argument("--benchmark", type=Path, help="result of scripts/benchmark.py; replaces the speed entries")
    parser.add_argument("--license", help="of the head, to start a head_card.json")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if README.md is not up to date")
    options = parser.parse_args(arguments)
    if options.evaluation and not options.how:
        parser.error("--evaluation needs --how: which prompts, which data type, greedy or not.")
    try:
        if options.check:
            return compare(options.folder)
        update(options.folder, options.evaluation, options.how, options.benchmark, options.license)
        write_text(options.folder / "README.md", make_card(options.folder))
    except (CardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def update(folder: Path, evaluation: Path | None, how: str | None, benchmark: Path | None, license: str | None) -> None:
    """Puts new measurements into the results file; an evaluation replaces the earlier one with as many drafts."""
    facts = head_card.read(folder)
    if facts is None:
        if license is None:
            raise CardError(f"{folder} has no {head_card.FILE}; start one with --license, for example --license apache-2.0.")
        facts = {"schema": 1}
    if license is not None:
        facts["license"] = license
    if evaluation is not None:
        entry = head_card.evaluation_entry(_summary(evaluation), how or "")
        others = [old for old in facts.get("evaluation", []) if old["k"] != entry["k"]]
        facts["evaluation"] = sorted([*others, entry], key=lambda known: known["k"])
    if benchmark is not None:
        facts["speed"] = head_card.speed_entries(json.loads(benchmark.read_text(encoding="utf-8")))
    head_card.write(folder, facts)


def compare(folder: Path) -> int:
    """0 if README.md is what the results file gives."""
    text, expected = (folder / "README.md").read_text(encoding="utf-8"), make_card(folder)
    if text == expected:
        return 0
    print(f"{folder / 'README.md'} differs from its results at line {first_difference(text, expected)}.", file=sys.stderr)
    return 1


def _summary(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    try:
        summary = json.loads(text)
    except ValueError:
        lines = [json.loads(line) for line in text.splitlines() if '"evaluation"' in line]
        if not lines:
            raise CardError(f"evaluation={file}: neither an evaluation nor a training log with one.") from None
        summary = lines[-1]
    if "accepted_share" not in summary.get("evaluation", summary):
        raise CardError(f"evaluation={file}: no accepted_share in it; give the summary of an evaluation or a training log.")
    return summary
