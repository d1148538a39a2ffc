"""The target's side of one call: its cache, attention mask and positions, the passes over it, and rolling it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from .buffered_cache import BufferedLayer, use_buffers
from .features import FeatureCapture
from .verify_graph import VerifyGraphs, refusal, verify_graphs

# transformers renamed the keyword in 5.24; older releases know the second name only.
CACHE_NAMES = ("cache", "past_key_values")
# Rows of a batch that accept different numbers of tokens need their cached columns moved; these layers we can move.
MOVABLE_LAYERS = (DynamicLayer, BufferedLayer, DynamicSlidingWindowLayer)


def find_cache(model_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The name under which this transformers passes the cache, and the cache (or `None`)."""
    for name in CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            return name, model_kwargs[name]
    return CACHE_NAMES[0], None


class TargetState:
    """
    Columns of the cache are physical places; every row of the batch is kept contiguous and aligned at the right, with
    masked columns on its left. That is how left-padded prompts start, and `keep` restores it after each round by moving
    rows that accepted fewer tokens, so attention masks, sliding windows and positions stay those of plain decoding.

    Attributes:
        width (`int`): columns in the cache.
        starts (`list[int]`): first column of every row.
        next_position (`torch.Tensor`, *optional*): `[..., batch, 1]` position of the next token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        capture: FeatureCapture,
    ) -> None:
        self.model = model
        self.capture = capture
        self.generation_config = generation_config
        self.input_ids = input_ids
        self.batch_size = input_ids.shape[0]
        self.kwargs = dict(model_kwargs)
        self.cache_name, self.cache = find_cache(model_kwargs)
        use_buffers(self.cache)
        self.device = model.device
        self.mask: torch.Tensor | None = None
        self.next_position: torch.Tensor | None = None
        self.width = 0
        self.starts: list[int] = [0] * self.batch_size
        self.first_starts: list[int] = []
        self.prompt_columns = 0
        self.needs_no_preparation = False
        self.graphs: VerifyGraphs | None = None
        self.graph_note = "not asked for"

    @property
    def can_move_rows(self) -> bool:
        """Whether rows may accept different numbers of tokens. Otherwise they advance together."""
        layers = getattr(self.cache, "layers", [])
        offloads = getattr(self.cache, "offloading", False)
        position_ids = self.kwargs.get("position_ids")
        return (
            type(self.cache) is DynamicCache
            and not offloads
            and all(type(layer) in MOVABLE_LAYERS for layer in layers)
            and (position_ids is None or position_ids.dim() == 2)
        )

    # ------------------------------------------------------------------ passes

    def prefill(self) -> Any:
        """Runs the prompt as plain decoding does and returns the model's outputs for its (new) rows."""
        kwargs = {**self.kwargs, **self.capture.forward_kwargs}
        with self.capture.listening():
            outputs = self.model._prefill(self.input_ids, self.generation_config, kwargs)
        _, self.cache = find_cache(outputs)
        self.width = int(self.cache.get_seq_length())
        self.mask = self.kwargs.pop("attention_mask", None)
        if self.mask is not None:
            self.mask = self.mask[:, -self.width :]
            self.starts = _first_ones(self.mask)
        self.first_starts = list(self.starts)
        self.prompt_columns = self.width
        position_ids = self.kwargs.pop("position_ids", None)
        if position_ids is not None:
            self.next_position = position_ids[..., -1:] + 1
        self.kwargs.pop("inputs_embeds", None)
        for name in CACHE_NAMES:
            self.kwargs.pop(name, None)
        # The stock preparation only passes on what a plain text model on one device with a growing cache needs.
        preparation = getattr(type(self.model), "prepare_inputs_for_generation", None)
        stock = preparation is GenerationMixin.prepare_inputs_for_generation and not self.model.is_remote_code()
        plain = set(self.kwargs) <= {"use_cache", "logits_to_keep"}
        on_device = self.input_ids.device == self.device
        self.needs_no_preparation = stock and plain and on_device and type(self.cache) is DynamicCache
        self.graph_note = refusal(self.model, self.cache, self.capture, plain) or "captured"
        if self.graph_note == "captured":
            self.graphs = verify_graphs(self.model, self.cache, self.capture, self.batch_size)
            self.graphs.begin(self.mask)
        return outputs

    def verify(self, tokens: torch.Tensor, device: torch.device) -> tuple[Any, torch.Tensor]:
        """
        One pass over `tokens` (`[batch, q]`: every row's last committed token and its drafts).

        Returns:
            outputs with logits for all q rows, and their features `[batch, q, feature_size]` on `device`.
        """
        q = tokens.shape[1]
        positions = None
        if self.next_position is not None:
            positions = self.next_position + torch.arange(q, device=self.next_position.device)
        if self.graphs is not None and positions is not None:
            replayed = self.graphs.verify(tokens, positions, self.width)
            if replayed is not None:
                return ModelOutput(logits=replayed[0]), replayed[1].to(device)
            self.graph_note = next(iter(self.graphs.failed.values()))
            self.graphs.set_length(self.width)
        outputs = self._verify_eagerly(tokens, positions)
        return outputs, self.capture.take(outputs, device)

    def _verify_eagerly(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Any:
        q = tokens.shape[1]
        kwargs = {**self.kwargs, self.cache_name: self.cache, "use_cache": True}
        if self.mask is not None:
            kwargs["attention_mask"] = torch.cat([self.mask, self.mask.new_ones(self.batch_size, q)], dim=1)
        if positions is not None:
            kwargs["position_ids"] = positions
        for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if (types := kwargs.get(name)) is not None:
                last = types[..., -1:] if name == "token_type_ids" else torch.zeros_like(types[..., -1:])
                kwargs[name] = last.expand(*last.shape[:-1], q)
        inputs = self._prepare(tokens, q, kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = q
        inputs.update(self.capture.forward_kwargs)
        with self.capture.listening():
            return self.model(**inputs, return_dict=True)

    def _prepare(self, tokens: torch.Tensor, q: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.needs_no_preparation:
            return {"input_ids": tokens, **kwargs}
        return self.model.prepare_inputs_for_generation(tokens, next_sequence_length=q, is_first_iteration=False, **kwargs)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Around the rounds: transformers' own switch of expert kernels for small passes, and layers that can roll back."""
        # Sliding layers drop what left the window unless told to keep it until `crop`. Told so before the prefill they would
        # keep the whole prompt, and after the call, in a cache of the user's, everything.
        layers = [layer for layer in getattr(self.cache, "layers", []) if hasattr(layer, "record_past")]
        recorded = [layer.record_past for layer in layers]
        self.cache.activate_past_recording()
        try:
            with self.model._optimize_model_for_decode():
                yield
        finally:
            for layer, before in zip(layers, recorded, strict=True):
                layer.record_past = before

    # ------------------------------------------------------------------ rolling back

    def keep(self, counts: list[int], q: int) -> None:
        """Of the `q` columns that `verify` appended, keeps the first `counts[b]` of every row."""
        most = max(counts)
        if min(counts) == most:
            # Called for 0 too: it lets sliding layers forget what they recorded.
            if self.graphs is None:
                self.cache.crop(-(q - most))
            if self.mask is not None:
                self.mask = torch.cat([self.mask, self.mask.new_ones(self.batch_size, most)], dim=1)
            self.width += most
            if self.next_position is not None:
                self.next_position = self.next_position + most
            return
        extents = [self.width - start + count for start, count in zip(self.starts, counts, strict=True)]
        shifts = [self.width + count - max(extents) for count in counts]
        self._move_rows(shifts, max(extents), q, counts)
        if self.next_position is not None:
            self.next_position = self.next_position + torch.tensor(counts, device=self.next_position.device)[:, None]

    def close(self) -> None:
        """Leaves the cache with the columns that are kept, whatever way they were written."""
        if self.graphs is not None:
            self.graphs.set_length(self.width)

    def restore_layout(self, generated: int) -> None:
        """Puts every row back to the column where plain decoding has it after `generated` tokens of the longest row."""
        width = self.prompt_columns + generated - 1  # the last token was never fed
        if self.starts != self.first_starts or self.width != width:
            shifts = [now - first for now, first in zip(self.starts, self.first_starts, strict=True)]
            self._move_rows(shifts, width, 0, [0] * self.batch_size)

    def _move_rows(self, shifts: list[int], width: int, q: int, counts: list[int]) -> None:
        """New column `c` of row `b` becomes old column `c + shifts[b]`; `q` columns were appended, `counts` are valid."""
        old_width = self.width + q
        source = torch.arange(width, device=self.device) + torch.tensor(shifts, device=self.device)[:, None]
        for layer in self.cache.layers:
            if not layer.is_initialized or layer.keys.numel() == 0:
                continue
            kept = width
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = width if width < layer.sliding_window else layer.sliding_window - 1
                layer.cumulative_length = width
            first_stored = old_width - layer.keys.shape[-2]
            index = (source[:, width - kept :] - first_stored).clamp(0, layer.keys.shape[-2] - 1)
            index = index.to(layer.keys.device)[:, None, :, None]
            layer.keys = torch.take_along_dim(layer.keys, index, dim=2)
            layer.values = torch.take_along_dim(layer.values, index, dim=2)
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.batch_size, self.width, dtype=torch.long, device=self.device)
        if q:
            appended = torch.arange(q, device=mask.device) < torch.tensor(counts, device=mask.device)[:, None]
            mask = torch.cat([mask, appended.to(mask.dtype)], dim=1)
        source = source.to(mask.device)
        inside = (source >= 0) & (source < old_width)
        self.mask = mask.gather(1, source.clamp(0, old_width - 1)) * inside
        self.starts = [max(0, start - shift) for start, shift in zip(self.starts, shifts, strict=True)]
        self.width = width


def _first_ones(mask: torch.Tensor) -> list[int]:
    return mask.long().argmax(dim=1).tolist()
