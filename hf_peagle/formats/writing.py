"""What every writer shares: the head's tensors complete with borrowed tables, and a folder that appears whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..configuration_peagle import PEagleConfig
from ..modeling_peagle import PEagleDrafterModel
from .common import FormatError

logger = logging.getLogger(__name__)


@dataclass
class Exported:
    """Tensors of a head by this library's names, none borrowed any more, and the mask token's row in its table."""

    tensors: dict[str, torch.Tensor]
    mask_token_id: int | None


@torch.no_grad()
def export_tensors(head: PEagleDrafterModel, target: PreTrainedModel | None, tokenizer: Any, mask_token_id: int | None) -> Exported:
    """
    The head's tensors on the CPU, bit for bit. What it borrows is written out: the target's embedding with the mask
    slot's vector in row `mask_token_id`, and the target's output rows of the draft vocabulary.
    """
    config = head.config
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    peagle = config.algorithm == "peagle"
    borrows = (config.share_embeddings and peagle) or config.share_lm_head
    if borrows and target is None:
        what = [name for name in ("share_embeddings", "share_lm_head") if getattr(config, name)]
        raise FormatError(
            f"{' and '.join(what)} is true: this head borrows the target's tables, which the other format stores. Pass the "
            "target model (scripts/convert.py: --target)."
        )
    borrowed = head.borrow(target) if borrows and target is not None else None
    if config.share_embeddings and peagle:
        assert borrowed is not None
        mask_token_id = choose_mask_token(config, tokenizer, mask_token_id)
        table = head.embed(torch.arange(config.vocab_size, device=borrowed.embed_tokens.weight.device), borrowed)
        table = table.detach().cpu().clone()
        table[mask_token_id] = tensors.pop("mask_embedding").to(table.dtype)
        tensors["embed_tokens.weight"] = table
    elif peagle:
        if mask_token_id is not None and mask_token_id != config.mask_token_id:
            raise FormatError(
                f"mask_token_id={mask_token_id}: this head has its own table, whose mask row is {config.mask_token_id}; leave the argument out."
            )
        mask_token_id = config.mask_token_id
    else:
        mask_token_id = None
    if config.share_lm_head:
        assert borrowed is not None and borrowed.lm_head is not None
        tensors["lm_head.weight"] = borrowed.lm_head.detach().cpu()
    return Exported(tensors, mask_token_id)


def choose_mask_token(config: PEagleConfig, tokenizer: Any, mask_token_id: int | None) -> int:
    """
    A row of the embedding that no text needs: the argument, else the config's, else the highest id the tokenizer
    does not know. A row of a token that occurs would show the head the mask vector wherever that token stands.
    """
    known = set() if tokenizer is None else set(tokenizer.get_vocab().values())
    chosen = config.mask_token_id if mask_token_id is None else mask_token_id
    if chosen is None:
        if tokenizer is None:
            raise FormatError(
                "mask_token_id is unknown: this head shares the target's embedding, and the other format needs an unused "
                "row for the mask slot. Pass mask_token_id (scripts/convert.py: --mask-token-id), or the target with its "
                "tokenizer."
            )
        unused = [i for i in range(config.vocab_size) if i not in known]
        if not unused:
            raise FormatError(
                f"mask_token_id is unknown, and the tokenizer uses all {config.vocab_size} rows. Pass mask_token_id "
                "(scripts/convert.py: --mask-token-id) with the id of a reserved token that never occurs in text."
            )
        chosen = unused[-1]
    if not 0 <= chosen < config.vocab_size:
        raise FormatError(f"mask_token_id={chosen} is outside the vocabulary of {config.vocab_size}.")
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    taken = {"bos_token_id": [config.bos_token_id], "eos_token_id": ends}
    for name, ids in taken.items():
        if chosen in ids:
            raise FormatError(f"mask_token_id={chosen} is the {name}, which occurs in every text; choose an unused id.")
    if chosen in known:
        logger.warning(
            "mask_token_id=%d is the tokenizer's %r; the exported head misreads that token wherever it occurs.",
            chosen,
            tokenizer.convert_ids_to_tokens(chosen),
        )
    return chosen


def check_layer_ids(config: PEagleConfig) -> None:
    """Raises for captured streams that only this library numbers: the state after the target's final norm."""
    total, highest = config.target_num_hidden_layers, max(config.target_layer_ids or [0])
    if total is not None and highest >= total:
        raise FormatError(
            f"target_layer_ids has {highest}, the state after the final norm of a target with {total} layers; vLLM and "
            "speculators capture streams entering a layer (0 to n - 1) only."
        )
    if total is None:
        logger.warning("target_num_hidden_layers is unknown, so target_layer_ids %s is not checked.", config.target_layer_ids)


def identity_map(head: PEagleDrafterModel) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a head with the full vocabulary, for layouts that always store them."""
    if head.has_vocab_map:
        return {}
    size = head.config.vocab_size
    return {"d2t": torch.zeros(size, dtype=torch.long), "t2d": torch.ones(size, dtype=torch.bool)}


def write_folder(folder: str | Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], max_shard_size: int | str) -> Path:
    """config.json and (sharded, if large) safetensors, written beside `folder` first and then renamed."""
    with new_folder(folder) as part:
        plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
        for file, names in plan.filename_to_tensors.items():
            shard = {name: tensors[name].contiguous() for name in names}
            save_file(_unshared(shard), part / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Path(folder)


def write_own(head: PEagleDrafterModel, folder: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Writes `head` in this library's own format; as with the others, `folder` appears complete or not at all."""
    with new_folder(folder) as part:
        head.save_pretrained(part, max_shard_size=max_shard_size)
    return Path(folder)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder beside `folder` to write to, which takes its place when the block ends without an error."""
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FormatError(f"{folder} exists and is not an empty folder; choose another destination or remove it.")
    part = folder.parent / f".{folder.name}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors that lie in one storage, which safetensors does not take (a borrowed tied table, for one)."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return out
