"""Reading a checkpoint folder and its config values: nothing is executed, and every value is checked before use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_WEIGHTS, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# All that is ever downloaded of a Hub repository; the card is read for its base_model line only.
NEEDED_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "README.md")
BIN_FILES = ("pytorch_model*.bin", BIN_INDEX)


class FormatError(ValueError):
    """A checkpoint that cannot be read or written as asked; the message names the tensor or key and the remedy."""


@dataclass
class ReadOptions:
    """
    What a caller can say about a checkpoint that does not say it itself.

    Args:
        target_config: configuration of the target model (or a path or name of one, or the model): gives the layer
            count for default layer ids, and the width and vocabulary where neither config nor tensors tell.
        mask_token_id: id of the mask token, before any value in the file.
        target_layer_ids: captured streams, as in [`PEagleConfig`] (stream `i` *enters* layer `i`).
        checkpoint_format: name of the format, instead of detecting it.
        allow_bin: read `pytorch_model.bin` with `torch.load(weights_only=True)` where there is no safetensors file.
    """

    target_config: Any = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    checkpoint_format: str | None = None
    allow_bin: bool = False


@dataclass
class Checkpoint:
    """
    A checkpoint as it lies on disk.

    Attributes:
        name (`str`): as the user gave it.
        config (`dict`): config.json.
        tensors (`dict[str, torch.Tensor]`): by the file's own names.
        base_model (`str`, *optional*): `base_model` of the model card's metadata.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    base_model: str | None = None


class Values:
    """Typed access to a config dictionary; a value of the wrong type or range raises, naming the key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> FormatError:
        return FormatError(f"{self.where}: {key} is {self.values.get(key)!r}; {problem}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int | None:
        """An integer (or a string of digits: some exporters quote ids) of at least `minimum`, or the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"expected an integer of at least {minimum}.")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive finite number, or the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, "expected a positive number.")
        return value

    def flag(self, key: str, default: bool | None = False) -> bool | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false.")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "expected a string.")
        return value

    def integers(self, key: str) -> list[int] | None:
        """A list of distinct non-negative integers; `None` where the key is absent or the list empty."""
        value = self.values.get(key)
        if value is None or value == []:
            return None
        fits = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
        if not fits or len(set(value)) != len(value):
            raise self.error(key, "expected a list of distinct non-negative integers.")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
            raise self.error(key, "expected a list of strings.")
        return value

    def section(self, key: str) -> Values:
        """A nested dictionary; empty where absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "expected a dictionary.")
        return Values(value or {}, f"{self.where}: {key}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path} does not exist; a checkpoint folder needs it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds a {type(value).__name__}, expected an object.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; empty if there are none. An index must find all its files."""
    if (folder / WEIGHTS_INDEX).exists():
        return _indexed_files(folder, WEIGHTS_INDEX)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    return sorted(folder.glob("*.safetensors"))


def open_tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """(name, lazy slice) of every tensor in safetensors files; the slice tells shape and dtype without reading."""
    for file in files:
        try:
            f = safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from None
        with f:
            for name in f.keys():  # noqa: SIM118
                yield name, f.get_slice(name)


def read_checkpoint(folder: Path, name: str, allow_bin: bool = False) -> Checkpoint:
    """Config, tensors (on the CPU, in the file's dtypes) and the card's base model of a folder."""
    config = read_json(folder / "config.json")
    tensors: dict[str, torch.Tensor] = {}
    if files := weight_files(folder):
        for file in files:
            for key, tensor in _load(file).items():
                if key in tensors:
                    raise FormatError(f"{name}: tensor {key} is stored in two files; export the checkpoint again.")
                tensors[key] = tensor
    elif (folder / BIN_WEIGHTS).exists() or (folder / BIN_INDEX).exists():
        tensors = _read_bin(folder, name, allow_bin)
    else:
        raise FormatError(f"{name}: no {WEIGHTS} (or {WEIGHTS_INDEX}, or any *.safetensors) beside config.json.")
    return Checkpoint(name, config, tensors, _base_model(folder / "README.md"))


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> FormatError:
    return FormatError(f"{file} cannot be read as safetensors ({error}); download or export it again.")


def _indexed_files(folder: Path, index: str) -> list[Path]:
    weight_map = read_json(folder / index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(file, str) and Path(file).name == file for file in names):
        raise FormatError(f"{folder / index}: weight_map must map tensor names to file names of this folder.")
    for file in names:
        if not (folder / file).exists():
            raise FormatError(f"{folder / index} names {file}, which is missing; download the checkpoint again.")
    return [folder / file for file in sorted(names)]


def _read_bin(folder: Path, name: str, allow_bin: bool) -> dict[str, torch.Tensor]:
    if not allow_bin:
        raise FormatError(
            f"{name} has only {BIN_WEIGHTS}, a pickle file. It is not read unless you say so: pass allow_bin=True "
            "(scripts/convert.py: --allow-bin), which loads it with torch.load(weights_only=True)."
        )
    files = _indexed_files(folder, BIN_INDEX) if (folder / BIN_INDEX).exists() else [folder / BIN_WEIGHTS]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler refuses with several types, RuntimeError and UnpicklingError among them
            raise FormatError(f"{file} is not a plain file of tensors and was refused ({error}).") from None
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise FormatError(f"{file} must hold a dictionary of tensors.")
        tensors.update({str(key): value for key, value in state.items()})
    return tensors


def _base_model(card: Path) -> str | None:
    """`base_model` of a model card's front matter, if it names one model."""
    if not card.exists():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    names = re.findall(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([\w./-]+)[\"']?[ \t]*$", match.group(1) if match else "", re.M)
    return names[0] if len(names) == 1 else None


def text_config(target: Any) -> PreTrainedConfig:
    """The decoder's configuration from a config, a model, or the path or Hub name of one (no remote code)."""
    if isinstance(target, str | Path):
        target = AutoConfig.from_pretrained(target)
    config = getattr(target, "config", target)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"target_config={target!r}: expected a config, a model, or the path or name of one.")
    return config.get_text_config()
