"""Which targets, caches and options a P-EAGLE head can serve; everything else gets an error before the prefill."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

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
        raise ValueError("use_cache=False: verifying drafts needs the target's cache. Drop use_cache or assistant_model.")
    _, cache = find_cache(model_kwargs)
    if not isinstance(cache, Cache):
        raise ValueError(
            f"{name} was given a cache of type {type(cache).__name__}, which is not a transformers Cache. Pass a "
            "DynamicCache or none, or generate without assistant_model."
        )
    # Only layers that know before their first use can be judged here; recurrent ones were refused above.
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


def plain_decoding_reason(synced_gpus: bool) -> str | None:
    """Why this call should decode without drafts, or `None`."""
    if synced_gpus:
        return "processes of a sharded target must run the same number of passes (synced_gpus=True)"
    return None


def _is_croppable(layer: Any) -> bool:
    # A linear-attention layer answers for its states only once it is initialised; asking before may not be possible.
    try:
        return bool(layer.is_croppable) or (not getattr(layer, "is_initialized", True) and _decides_later(layer))
    except AttributeError:
        return _decides_later(layer)


def _decides_later(layer: Any) -> bool:
    return "LinearAttention" in type(layer).__name__


def _made_for(config: Any) -> str:
    return f" (the head names {config.target_name_or_path})" if config.target_name_or_path else ""
