"""Capturing the target's hidden states that the drafter reads: only the needed layers, only for the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

# output_hidden_states=[i] of older releases gives the output of layer i, which is stream i + 1, and never stream 0.
SELECTS_STREAMS = Version(transformers.__version__).release >= (5, 23)


class FeatureCapture:
    """
    Gathers the streams `layer_ids` of a target's forward passes (stream `i` enters layer `i`; the last id is the state
    after the final norm) and concatenates them to features `[batch, rows, len(layer_ids) * target_hidden_size]`.

    Models whose forward records hidden states by hooks of transformers are asked for just these layers
    (`output_hidden_states=[ids]`, transformers >= 5.23). Others get hooks of ours on their decoder layers while `active()` is open; the hooks
    listen to the thread that opened it only, so concurrent calls on one target do not mix.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], all_states: bool = False, chunked_prefill: bool = False) -> None:
        """
        Args:
            all_states: the caller of `generate()` wants every hidden state, so there is nothing to select.
            chunked_prefill: the prompt runs in several passes of which only the last one's outputs are seen.
        """
        self.layer_ids = layer_ids
        self.all_states = all_states
        records = records_hidden_states(target)
        selects = all_states or SELECTS_STREAMS
        self._layers = None if records and selects and not chunked_prefill else find_decoder_layers(target)
        # Without layers to hook, what the outputs hold must do: of a chunked prompt that is the last chunk.
        self.native = self._layers is None and (records or all_states)
        self._listening = False
        self._seen: dict[int, list[torch.Tensor]] = {}
        if not self.native and self._layers is None:
            raise ValueError(
                f"{type(target).__name__} neither records hidden states (output_hidden_states=[...]) nor has a list of "
                "decoder layers to hook, so a P-EAGLE head cannot read it. Generate without assistant_model."
            )

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """Arguments to add to the target's forward."""
        if self.all_states or not self.native:
            return {}
        return {"output_hidden_states": states_request(self.layer_ids)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around every pass to be captured: a processor or criterion may run the same model for its own ends."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keeps hooks installed for the block, if this target needs them."""
        if self.native:
            yield
            return
        assert self._layers is not None
        layers, final_norm = self._layers
        owner = threading.get_ident()
        handles = []

        def remember(index: int, state: torch.Tensor) -> None:
            if self._listening and threading.get_ident() == owner:
                self._seen.setdefault(index, []).append(state)

        for index in self.layer_ids:
            if index < len(layers):

                def before(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
                    remember(index, args[0] if args else kwargs["hidden_states"])

                handles.append(layers[index].register_forward_pre_hook(before, with_kwargs=True))
            else:

                def after(_: nn.Module, args: Any, output: torch.Tensor, index: int = index) -> None:
                    remember(index, output)

                handles.append(final_norm.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def take(self, outputs: Any, device: torch.device) -> torch.Tensor:
        """The features of the forward that gave `outputs`, on `device`; nothing of them is kept here."""
        if self.native:
            states = getattr(outputs, "hidden_states", None)
            picked = None if states is None else [states[i] if i < len(states) else None for i in self.layer_ids]
        else:
            picked = [torch.cat(self._seen.pop(i), dim=1) if i in self._seen else None for i in self.layer_ids]
        if picked is None or any(state is None for state in picked):
            raise ValueError(
                f"The target returned no hidden state for one of target_layer_ids={self.layer_ids}. Its forward must "
                "accept output_hidden_states; generate without assistant_model, or use a head made for this target."
            )
        return torch.cat([state.to(device) for state in picked], dim=-1)


def states_request(layer_ids: list[int]) -> list[int] | bool:
    """The value of `output_hidden_states` that gives these streams at their own places in `hidden_states`."""
    return list(layer_ids) if SELECTS_STREAMS else True


def records_hidden_states(target: PreTrainedModel) -> bool:
    """Whether the decoder's forward captures hidden states through transformers' own hooks, and so can select them."""
    for module in (_decoder(target), target):
        recordable = getattr(module, "_can_record_outputs", None)
        if isinstance(recordable, dict) and "hidden_states" in recordable:
            return True
    return False


def find_decoder_layers(target: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module] | None:
    """The decoder's layers and the final norm of a model that does not record hidden states; `None` if not found."""
    decoder = _decoder(target)
    count = getattr(target.config.get_text_config(), "num_hidden_layers", None)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            parent = decoder.get_submodule(name.rpartition(".")[0]) if "." in name else decoder
            for norm_name in ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f"):
                if isinstance(norm := getattr(parent, norm_name, None), nn.Module):
                    return module, norm
    return None


def _decoder(target: PreTrainedModel) -> nn.Module:
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    return target if decoder is None else decoder
