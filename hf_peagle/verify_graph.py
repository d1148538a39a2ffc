"""The target's verify pass over a static cache as a captured graph: one per number of verified rows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer

from .cuda_graphs import CudaBackend, GraphedStep, _runners, module_fingerprint, wants_graphs
from .features import FeatureCapture

logger = logging.getLogger(__name__)


class VerifyGraphs:
    """
    Verify passes of one target over one static cache.

    The length of the cache is an input: every replay first sets it, so rolling back after a round is forgetting, and a
    warm-up run leaves nothing behind. The attention mask is computed in the graph from that length and the row's padding,
    since transformers' own mask creation asks the device.
    """

    def __init__(self, target: PreTrainedModel, cache: StaticCache, capture: FeatureCapture, batch_size: int) -> None:
        self.target = target
        self.cache = cache
        self.capture = capture
        self.device = target.device
        self.columns = cache.layers[0].max_cache_len
        self.valid = torch.ones(batch_size, self.columns, dtype=torch.bool, device=self.device)
        self.failed: dict[int, str] = {}
        self._steps: dict[int, GraphedStep] = {}

    def begin(self, mask: torch.Tensor | None) -> None:
        """Takes the padding of a new call's prompt, `[batch, columns]`."""
        self.valid.fill_(True)
        if mask is not None:
            self.valid[:, : mask.shape[1]] = mask.bool()

    def verify(self, tokens: torch.Tensor, position_ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """
        Logits `[batch, q, vocab]` and features `[batch, q, feature_size]` of `tokens` (`[batch, q]`) behind `length`
        cached columns, or `None` if this width could not be captured.
        """
        q = tokens.shape[1]
        start = torch.tensor(length, device=self.device)
        inputs = {"tokens": tokens, "position_ids": position_ids, "start": start}
        if q not in self._steps and q not in self.failed:
            try:
                self._steps[q] = GraphedStep(_runners.backend, self._step, inputs)
            except Exception as error:  # whatever the runtime refuses: the eager path gives the same tokens
                self.failed[q] = f"capture failed: {type(error).__name__}: {error}"
                logger.warning("Verifying %d rows without a graph: %s", q, self.failed[q])
        if q in self.failed:
            return None
        logits, features = self._steps[q](**inputs)
        return logits, features

    def set_length(self, length: int) -> None:
        """Tells the cache how many columns are valid, before anything but a replay uses it."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    def _step(self, tokens: torch.Tensor, position_ids: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = tokens.shape[1]
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(start)
        column = torch.arange(self.columns, device=self.device)
        row = start + torch.arange(q, device=self.device)
        mask = (column <= row[:, None]) & self.valid[:, None, None, :]
        if self.target.config._attn_implementation == "eager":
            lowest = torch.finfo(self.target.dtype).min
            mask = torch.zeros_like(mask, dtype=self.target.dtype).masked_fill(~mask, lowest)
        outputs = self.target(
            input_ids=tokens,
            position_ids=position_ids,
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=q,
            return_dict=True,
            **self.capture.forward_kwargs,
        )
        return outputs.logits, self.capture.take(outputs, self.device)


def refusal(target: PreTrainedModel, cache: Any, capture: FeatureCapture, plain_inputs: bool) -> str | None:
    """Why the verify pass cannot be captured, or `None`."""
    if not wants_graphs():
        return "not asked for"
    if isinstance(_runners.backend, CudaBackend) and target.device.type != "cuda":
        return f"the target is on {target.device.type}, not on a CUDA device"
    if type(cache) is not StaticCache or any(type(layer) is not StaticLayer for layer in cache.layers):
        return 'the cache is not static in every layer (cache_implementation="static", no sliding window)'
    if target.config._attn_implementation not in ("sdpa", "eager"):
        return f"attention {target.config._attn_implementation!r} does not take a ready mask"
    if not capture.native or capture.all_states:
        return "hidden states are captured by hooks or returned to the caller"
    if hasattr(target, "_hf_hook") or len(set(getattr(target, "hf_device_map", {}).values())) > 1:
        return "the target is spread over devices by accelerate hooks"
    return None if plain_inputs else "the call passes further model inputs or returns attentions"


def verify_graphs(target: PreTrainedModel, cache: StaticCache, capture: FeatureCapture, batch_size: int) -> VerifyGraphs:
    """Graphs of this target and cache, kept while the buffers, the weights and the layers read stay the same."""
    key = (
        batch_size,
        tuple(capture.layer_ids),
        *((layer.keys.data_ptr(), layer.cumulative_length.data_ptr()) for layer in cache.layers),
        module_fingerprint(target),
    )
    with _runners.lock:
        kept = _runners.by_target.setdefault(target, {})
        if key not in kept:
            kept.clear()  # buffers of an older cache; a graph of them is of no more use
            kept[key] = VerifyGraphs(target, cache, capture, batch_size)
        return kept[key]
