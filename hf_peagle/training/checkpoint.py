"""Folders that are replaced as a whole, and the state a run needs to go on exactly where it was."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a run is: everything its further course depends on besides weights and optimiser states."""

    step: int = 0
    epoch: int = 0
    pack: int = 0
    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    files: list[str] = field(default_factory=list)
    best: float = 0.0


def replace_folder(folder: str | Path, write: Callable[[Path], None]) -> None:
    """
    Lets `write` fill a new folder and puts it in the place of `folder`. Readers find the old or the new one, apart from
    the instant between two renames; an interrupted call leaves the old one, under its name or with `.old` behind it.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    if new.exists():
        shutil.rmtree(new)
    new.mkdir()
    write(new)
    if old.exists() and folder.exists():
        shutil.rmtree(old)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    if old.exists():
        shutil.rmtree(old)


def current_folder(folder: str | Path) -> Path | None:
    """The folder `replace_folder` wrote last, also after an interruption between its renames."""
    folder = Path(folder)
    for candidate in (folder, folder.with_name(f"{folder.name}.old")):
        if candidate.exists():
            return candidate
    return None


def save_state(folder: str | Path, progress: Progress, tensors: dict[str, Any]) -> None:
    """Writes the state of a run: `progress.json` and `state.pt` (weights, optimisers)."""

    def write(path: Path) -> None:
        torch.save(tensors, path / "state.pt")
        (path / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")

    replace_folder(folder, write)


def load_state(folder: str | Path) -> tuple[Progress, dict[str, Any]] | None:
    """The state of a run, or None where there is none yet."""
    found = current_folder(folder)
    if found is None:
        return None
    progress = Progress(**json.loads((found / "progress.json").read_text(encoding="utf-8")))
    return progress, torch.load(found / "state.pt", map_location="cpu", weights_only=True)
