"""A new head for a target, with as much of the target in it as fits."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_peagle.configuration_peagle import PEagleConfig
from hf_peagle.modeling_peagle import PEagleDrafterModel

from .config import TrainingConfig

logger = logging.getLogger(__name__)


def head_config(target: PreTrainedModel, config: TrainingConfig, draft_vocab_size: int) -> PEagleConfig:
    """The head configuration that `config` asks for on this target."""
    overrides: dict[str, Any] = {
        "num_hidden_layers": config.layers,
        "draft_vocab_size": draft_vocab_size,
        "share_embeddings": config.share_embeddings,
        "share_lm_head": config.share_lm_head,
        "norm_before_residual": config.norm_before_residual,
        "num_depths": config.num_depths,
        "draft_length": min(config.draft_length, config.num_depths),
    }
    if config.target_layer_ids:
        overrides["target_layer_ids"] = config.target_layer_ids
    return PEagleConfig.from_target(target.config, **overrides)


@torch.no_grad()
def new_head(target: PreTrainedModel, config: TrainingConfig, token_ids: torch.Tensor) -> PEagleDrafterModel:
    """
    A head in fp32 on the CPU that drafts the target tokens `token_ids` (ascending).

    Own tables are copies of the target's. With `init_layers="target"` layers and final norm are copies of the target's
    last ones wherever shapes agree; with `init_fc="stream"` `fc` passes on the last captured stream.
    """
    torch.manual_seed(config.seed)
    head = PEagleDrafterModel(head_config(target, config, token_ids.numel())).float()
    if head.has_vocab_map:
        head.set_draft_vocabulary(token_ids)
    table = getattr(target.get_input_embeddings(), "weight", None)
    output = target.get_output_embeddings()
    matrix = None if output is None else getattr(output, "weight", None)
    if _copies(table, head.config.target_hidden_size) and head.config.hidden_size == head.config.target_hidden_size:
        mean = table.float().mean(dim=0).cpu()
        if config.share_embeddings:
            head.mask_embedding.copy_(mean)
        else:
            head.embed_tokens.weight.copy_(table.float().cpu())
            head.embed_tokens.weight[head.config.mask_token_id] = mean
        if not config.share_lm_head and _copies(matrix, head.config.hidden_size):
            head.lm_head.weight.copy_(matrix[token_ids.to(matrix.device)].float().cpu())
    if config.init_layers == "target":
        _copy_layers(head, target)
    if config.init_fc == "stream" and head.config.hidden_size == head.config.target_hidden_size:
        width = head.config.hidden_size
        head.fc.weight.mul_(0.5)
        head.fc.weight[:, -width:] += torch.eye(width)
    return head


def _copies(matrix: torch.Tensor | None, width: int) -> bool:
    """Whether a table is a plain matrix of this width that can be read (not quantised, not offloaded)."""
    return matrix is not None and matrix.dim() == 2 and matrix.shape[1] == width and matrix.is_floating_point() and not matrix.is_meta


def _copy_layers(head: PEagleDrafterModel, target: PreTrainedModel) -> None:
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.base_model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) < len(head.layers):
        logger.warning("init_layers='target': %s has no list of layers to copy; starting at random", type(decoder))
        return
    copied = 0
    for own, theirs in zip(head.layers, layers[len(layers) - len(head.layers) :], strict=True):
        source = {n: p for n, p in theirs.named_parameters() if p.is_floating_point() and not p.is_meta}
        for name, parameter in own.named_parameters():
            original = source.get(name)
            if original is None:
                continue
            original = original.float().cpu()
            if original.shape == parameter.shape:
                parameter.copy_(original)
                copied += 1
            elif original.dim() == 2 and parameter.shape == (original.shape[0], 2 * original.shape[1]):
                # The fusion layer reads (embedding, feature): the target's projection belongs to the feature half.
                parameter[:, original.shape[1] :] = original
                copied += 1
    final = getattr(decoder, "norm", None)
    if isinstance(getattr(final, "weight", None), torch.Tensor) and final.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final.weight.float().cpu())
    logger.info("init_layers='target': %d parameters copied from the target", copied)
