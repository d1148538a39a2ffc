"""
Checkpoints of other projects: read as heads of this library, and written for other servers.

[`read_foreign`] is what `PEagleDrafterModel.from_pretrained` calls for a folder or Hub repository that is not this
library's own; the writers are `formats.vllm.write` and `formats.speculators.write`, the checker is
`formats.check_vllm.check`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download

from . import eagle3, nemo, specforge, speculators, vllm
from .common import BIN_FILES, NEEDED_FILES, FormatError, ReadOptions, read_checkpoint, read_json
from .detect import FORMATS, OURS, detect
from .network import ForeignHead

logger = logging.getLogger(__name__)

__all__ = ["FORMATS", "ForeignHead", "FormatError", "ReadOptions", "is_foreign", "load_arguments", "read_foreign"]

_READERS = {
    vllm.NAME: vllm.read,
    specforge.NAME: specforge.read,
    nemo.NAME: nemo.read,
    **dict.fromkeys(speculators.NAMES.values(), speculators.read),
    **dict.fromkeys(eagle3.NAMES, eagle3.read),
}
_HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


def read_foreign(folder: str | Path, options: ReadOptions | None = None, name: str | None = None) -> ForeignHead:
    """
    Reads a checkpoint folder of another project.

    Args:
        folder: with config.json and weights.
        options: see [`ReadOptions`].
        name: what to call the checkpoint in messages; default the folder.

    Raises [`FormatError`], naming the tensor or key, for everything missing, misshapen or contradictory.
    """
    options = options or ReadOptions()
    checkpoint = read_checkpoint(Path(folder), name or str(folder), options.allow_bin)
    kind = options.checkpoint_format or detect(checkpoint)
    if kind not in _READERS:
        raise FormatError(f"{checkpoint.name}: checkpoint_format {kind!r}, expected one of {tuple(_READERS)}.")
    head = _READERS[kind](checkpoint, options)
    logger.info("%s read as %s (%s).", checkpoint.name, head.checkpoint_format, head.config.algorithm)
    return head


def is_foreign(source: str | Path, subfolder: str = "", **hub: Any) -> bool:
    """
    Whether a folder or Hub repository holds another project's checkpoint. False also where there is no readable
    config.json: transformers says best why.

    Args:
        hub: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, as for `from_pretrained`.
    """
    file = Path(source) / subfolder / "config.json"
    if not Path(source).is_dir():
        try:
            file = Path(hf_hub_download(str(source), "config.json", subfolder=subfolder or None, **hub))
        except (OSError, ValueError):
            return False
    return file.exists() and read_json(file).get("model_type") != OURS


def load_arguments(source: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """
    Arguments for transformers' `from_pretrained`: unchanged for this library's own checkpoints, and `config` with
    `state_dict` for those of others. Takes the fields of [`ReadOptions`] out of `kwargs`.
    """
    fields = {name: kwargs.pop(name) for name in ("target_config", "checkpoint_format", "allow_bin") if name in kwargs}
    folder = Path(source) if source is not None else None
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}
    subfolder = kwargs.get("subfolder") or ""
    if folder is None or "config" in kwargs or "state_dict" in kwargs or not is_foreign(source, subfolder, **hub):
        return source, kwargs
    options = ReadOptions(
        **fields,
        mask_token_id=kwargs.pop("mask_token_id", None),
        target_layer_ids=kwargs.pop("target_layer_ids", None),
    )
    if not folder.is_dir():
        patterns = [*NEEDED_FILES, *(BIN_FILES if options.allow_bin else ())]
        prefix = f"{subfolder}/" if subfolder else ""
        folder = Path(snapshot_download(str(source), allow_patterns=[prefix + p for p in patterns], **hub))
    foreign = read_foreign(folder / subfolder, options, str(source))
    for name in (*_HUB_ARGUMENTS, "subfolder", "variant"):
        kwargs.pop(name, None)
    return None, {**kwargs, "config": foreign.config, "state_dict": foreign.tensors}
