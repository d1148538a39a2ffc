"""Records of a benchmark on disk, so that an interrupted one can go on; and where and how it was run."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .files import write_text
from .version import __version__

logger = logging.getLogger(__name__)


class Records:
    """
    Measurements as JSON lines, the first of which says what they are measurements of. Every record has `kind`,
    `section`, `group` and `method`, and there is one of each combination.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], resume: bool) -> None:
        """
        Args:
            path: file to keep the records in; `None` keeps them in memory only.
            header: settings; a file is continued only under equal ones.

        Raises:
            ValueError: the file is there but `resume` is false, or it has another header.
        """
        self.path = path
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        header = json.loads(json.dumps({"kind": "header", **header}))
        if path is None:
            return
        if path.exists() and not resume:
            raise ValueError(f"{path} holds an interrupted benchmark: go on with --resume, or delete the file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A line without its end was being written when the benchmark was stopped.
        whole = [line for line in lines if line.endswith("\n")]
        found = [json.loads(line) for line in whole]
        if found and found[0] != header:
            raise ValueError(
                f"{path} was measured with other settings or prompts ({_difference(found[0], header)}); use the same ones or delete the file."
            )
        if not found or len(whole) < len(lines):
            write_text(path, "".join(whole) or json.dumps(header) + "\n")
        for record in found[1:]:
            self._records[_key(record)] = record

    def add(self, record: dict[str, Any]) -> None:
        """Keeps `record`, on disk before this returns."""
        self._records[_key(record)] = record
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def find(self, section: str, kind: str, group: int | None = None, method: str | None = None) -> dict[str, Any] | None:
        """The record with this key, if there is one."""
        return self._records.get((section, kind, group, method))

    def of(self, section: str) -> list[dict[str, Any]]:
        """All records of `section`, in the order in which they were made."""
        return [record for record in self._records.values() if record["section"] == section]


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["section"], record["kind"], record["group"], record["method"]


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    settings = (old.get("settings", {}), new.get("settings", {}))
    names = sorted(n for n in settings[0].keys() | settings[1].keys() if settings[0].get(n) != settings[1].get(n))
    return ", ".join(f"{n}: {settings[0].get(n)} then, {settings[1].get(n)} now" for n in names) or "other prompts"


def command_line(arguments: Sequence[str]) -> str:
    """The command to repeat a benchmark, with absolute paths made relative to the current folder."""
    shown = [os.path.relpath(a) if os.path.isabs(a) else a for a in arguments]
    return shlex.join(["python", "scripts/benchmark.py", *shown])


def now() -> str:
    """The time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """The commit of the package's checkout, with "+" for uncommitted changes; `None` outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, memory, threads and versions."""
    described: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_peagle": __version__,
    }
    if hasattr(torch.backends.cpu, "get_cpu_capability"):
        described["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
