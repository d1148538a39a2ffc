"""Plots of a benchmark's result as PNG files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def plot(result: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """
    Writes `speed-*.png`, `costs-*.png` and `time-*.png` for every section into `folder` and returns the paths; without
    matplotlib it says so and writes nothing.
    """
    try:
        import matplotlib
    except ImportError:
        logger.warning("No plots are drawn: they need matplotlib (pip install matplotlib).")
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in result["sections"]:
        name = f"{section['dtype']}-b{section['batch_size']}"
        drawings = {"speed": _speed, "time": _time}
        if section["costs"]:
            drawings["costs"] = _costs
        for kind, draw in drawings.items():
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            draw(figure.add_subplot(), section)
            path = folder / f"{kind}-{name}.png"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _speed(axes: Any, section: Mapping[str, Any]) -> None:
    """Speed over the stock target's plain decoding, median and range."""
    rows = [m for m in section["methods"] if m.get("speedup_stock")][::-1]
    ratios = [m["speedup_stock"] for m in rows]
    middle = [r["median"] for r in ratios]
    spread = [[r["median"] - r["min"] for r in ratios], [r["max"] - r["median"] for r in ratios]]
    colours = ["tab:blue" if m["kind"] == "peagle" else "tab:gray" for m in rows]
    axes.barh([m["method"] for m in rows], middle, xerr=spread, color=colours, ecolor="black", capsize=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("tokens per second over stock plain generate()")
    axes.set_title(f"{section['dtype']}, batch {section['batch_size']}")


def _costs(axes: Any, section: Mapping[str, Any]) -> None:
    """Cost of verify and draft passes by width, over a one-token pass."""
    labels = {"verify": "verify q rows", "draft": "draft K, one pass", "draft_sequential": "draft K, K passes"}
    for variant, curves in section["costs"].items():
        style = "--" if variant == "eager" else "-"
        for curve, colour in zip(labels, ("tab:blue", "tab:orange", "tab:gray"), strict=True):
            if entries := curves.get(curve):
                widths = [int(width) for width in entries]
                axes.plot(widths, [e["ratio"] for e in entries.values()], style, color=colour, marker="o", markersize=3)
                low, high = ([e[key] for e in entries.values()] for key in ("ratio_min", "ratio_max"))
                axes.fill_between(widths, low, high, color=colour, alpha=0.12)
                axes.plot([], [], style, color=colour, label=f"{labels[curve]} ({variant})")
    axes.set_xlabel("rows q / drafts K")
    axes.set_ylabel("cost over a one-token target pass")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    axes.set_title(f"{section['dtype']}, batch {section['batch_size']}")


def _time(axes: Any, section: Mapping[str, Any]) -> None:
    """Where the time of a round goes."""
    rows = [m for m in section["methods"] if m["split"]][::-1]
    left = [0.0] * len(rows)
    for part, label in (("verify", "target"), ("draft", "draft"), ("other", "rest")):
        shares = [m["split"]["share_of_round"][part] for m in rows]
        axes.barh([m["method"] for m in rows], shares, left=left, label=label)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlabel("share of the time after the prompt")
    axes.legend(fontsize="small")
    axes.set_title(f"{section['dtype']}, batch {section['batch_size']}")
