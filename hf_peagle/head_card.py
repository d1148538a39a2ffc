"""
`head_card.json`, the results file beside a head: what was trained and measured. The model card is made from it, so every
figure of a card has its place there.

| key | holds |
|-|-|
| `schema` | 1 |
| `license` | of the head, as the Hub spells it |
| `repo_id` | where it is published (optional; publishing fills in the real one) |
| `language` | list of codes (optional) |
| `target` | `repo_id`, and `weights`: which weights were drafted for, in words (optional) |
| `datasets` | list of `name`, `use` and, if it is on the Hub, `repo_id` |
| `training` | label -> value, in the order to show |
| `evaluation` | list, one entry per number of drafts `k`: see [`evaluation_entry`] |
| `speed` | list, one entry per benchmarked machine, data type and batch size: see [`speed_entries`] |
| `plots` | list of `file` (inside the folder) and `caption` |
| `limits` | list of sentences |
| `export_mask_token_id` | for heads without a mask token of their own: which one to use in other formats (optional) |
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import write_text

FILE = "head_card.json"
_TYPES: dict[str, type] = {
    "schema": int,
    "license": str,
    "repo_id": str,
    "language": list,
    "target": dict,
    "datasets": list,
    "training": dict,
    "evaluation": list,
    "speed": list,
    "plots": list,
    "limits": list,
    "export_mask_token_id": int,
}
_REQUIRED = {
    "datasets": ("name", "use"),
    "evaluation": ("k", "acceptance_length", "how"),
    "speed": ("hardware", "dtype", "batch_size", "rows"),
    "plots": ("file", "caption"),
}
_ROW = ("k", "acceptance_length", "speedup_median", "speedup_min", "speedup_max", "identical")


class CardError(ValueError):
    """A results file or card that cannot be used; the message names the place and the remedy."""


def read(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The checked results file of `folder`, or `None` if it has none."""
    file = Path(folder) / FILE
    if not file.exists():
        return None
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CardError(f"{file} is not JSON: {error}.") from error
    check(facts, file)
    return facts


def write(folder: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
    """Writes the results file of `folder`, all or nothing."""
    check(facts, Path(folder) / FILE)
    write_text(Path(folder) / FILE, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def check(facts: Any, file: Path) -> None:
    """Raises [`CardError`] naming the first entry that is missing, unknown or of the wrong kind."""
    if not isinstance(facts, dict) or facts.get("schema") != 1:
        raise CardError(f"{file}: expected an object with schema 1.")
    for key, value in facts.items():
        if key not in _TYPES:
            raise CardError(f"{file}: unknown entry {key!r}; known are {', '.join(_TYPES)}.")
        if not isinstance(value, _TYPES[key]):
            raise CardError(f"{file}: {key} must be a {_TYPES[key].__name__}, not {value!r}.")
    if not facts.get("license"):
        raise CardError(f"{file}: license is missing; give the head's, for example apache-2.0.")
    for key, names in _REQUIRED.items():
        for i, entry in enumerate(facts.get(key, [])):
            _has(entry, names, f"{file}: {key}[{i}]")
    for i, entry in enumerate(facts.get("speed", [])):
        for j, row in enumerate(entry["rows"]):
            _has(row, _ROW, f"{file}: speed[{i}].rows[{j}]")
    for place, number in _numbers(facts, ""):
        if not math.isfinite(number):
            raise CardError(f"{file}: {place} is {number}; leave out what was not measured.")


def evaluation_entry(summary: Mapping[str, Any], how: str) -> dict[str, Any]:
    """
    An `evaluation` entry from the summary of `training.evaluate.evaluate`, or from a line of a training log that has one.

    Args:
        summary: with `acceptance_length`, `accepted_share`, `rounds`, `tokens` and `by_source`.
        how: what was evaluated, in words: prompts, data type, greedy or not.
    """
    summary = summary.get("evaluation", summary)  # a line of the training log has it one level down
    return {
        "k": len(summary["accepted_share"]),
        "acceptance_length": summary["acceptance_length"],
        "accepted_share": list(summary["accepted_share"]),
        "rounds": summary["rounds"],
        "tokens": summary["tokens"],
        "by_benchmark": dict(summary.get("by_source", {})),
        "how": how,
    }


def speed_entries(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`speed` entries from the result of `scripts/benchmark.py`: one per section, with its P-EAGLE rows."""
    from .benchmark_report import readme_rows

    entries = []
    for section in result["sections"]:
        rows = readme_rows(section)
        if rows:
            entry = {
                "hardware": hardware(result["machine"]),
                "dtype": section["dtype"],
                "batch_size": section["batch_size"],
                "target": result["target"],
                "prompts": result["prompts"]["count"],
                "date": result["date"],
                "command": result["command"],
                "rows": rows,
            }
            entries.append(entry)
    if not entries:
        raise CardError("benchmark: the result has no P-EAGLE rows with a speed-up; run it with --drafter and plain decoding.")
    return entries


def hardware(machine: Mapping[str, Any]) -> str:
    """The machine of a benchmark in one phrase."""
    return str(machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads")


def _has(entry: Any, names: tuple[str, ...], place: str) -> None:
    if not isinstance(entry, dict):
        raise CardError(f"{place} must be an object, not {entry!r}.")
    for name in names:
        if entry.get(name) is None:
            raise CardError(f"{place} lacks {name!r}.")


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{place}[{i}]")
