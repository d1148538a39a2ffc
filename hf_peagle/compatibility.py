"""Which targets, caches and options a P-EAGLE head can serve; everything else gets an error before the prefill."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedLayer

from .target_state import find_cache


def check_pair(target: PreTrainedModel, head: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError`, naming the cause and the remedy, if `head` cannot draft for `target` in this call."""
    check_fit(target, head)
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; P-EAGLE drafts for decoder-only targets. Generate without assistant_model.")
    if getattr(target, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent state that cannot be rolled back after a rejected draft. Generate without assistant_model.")
    if not model_kwargs.get("use_cache", True):
        raise ValueError(
            "use_cache=False (of the call, a generation config, or the target's own): verifying drafts needs the target's "
            "cache. Pass use_cache=True, or generate without assistant_model."
        )
    check_cache(target, find_cache(model_kwargs)[1])


def check_cache(target: PreTrainedModel, cache: Any) -> None:
    """
    Raises `ValueError` if rejected drafts cannot be removed from `cache`. Called again after the prefill, as layers that
    keep other states than keys and values can be judged only then.
    """
    name = type(target).__name__
    if not isinstance(cache, Cache):
        raise ValueError(
            f"{name} was given a cache of type {type(cache).__name__}, which is not a transformers Cache. Pass a "
            "DynamicCache or none, or generate without assistant_model."
        )
    stuck = sorted({type(layer).__name__ for layer in getattr(cache, "layers", []) if not _is_croppable(layer)})
    if stuck:
        raise ValueError(
            f"The cache has layers that cannot be rolled back after a rejected draft ({', '.join(stuck)}). Leave "
            "cache_implementation unset (a dynamic cache), or generate without assistant_model."
        )


def check_fit(target: PreTrainedModel, head: Any) -> None:
    """Raises `ValueError` unless the head's configuration fits the target's vocabulary, width and layers."""
    text = target.config.get_text_config()
    config = head.config
    if config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"The head reads hidden states of width {config.target_hidden_size} (fc takes {config.feature_size} = "
            f"{config.num_aux_hidden_states} streams), but {type(target).__name__} has width {text.hidden_size}: it was "
            f"made for another target{_made_for(config)}."
        )
    if config.vocab_size != text.vocab_size:
        raise ValueError(
            f"The head was made for a vocabulary of {config.vocab_size}, but {type(target).__name__} has {text.vocab_size}{_made_for(config)}."
        )
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and max(config.target_layer_ids) > layers:
        raise ValueError(
            f"The head reads target_layer_ids={config.target_layer_ids}, but {type(target).__name__} has streams 0 to "
            f"{layers} only{_made_for(config)}."
        )


def plain_decoding_reason(synced_gpus: bool, generation_config: GenerationConfig) -> str | None:
    """Why this call should decode without drafts, or `None`."""
    if generation_config.num_beams > 1:
        return f"beam search (num_beams={generation_config.num_beams}) has no use for drafts"
    if synced_gpus:
        return "processes of a sharded target must run the same number of passes (synced_gpus=True)"
    return None


def _is_croppable(layer: Any) -> bool:
    if isinstance(layer, QuantizedLayer):  # older releases say yes, but cannot crop what is quantised already
        return False
    # transformers answers "no" for a layer of convolutions or recurrences until the first pass has shown which it has.
    recurrent = getattr(layer, "is_recurrent_states_initialized", None)
    if recurrent is not None and not any(recurrent.values()):
        return True
    return bool(layer.is_croppable)


def _made_for(config: Any) -> str:
    return f" (the head names {config.target_name_or_path})" if config.target_name_or_path else ""
