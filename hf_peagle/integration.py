"""
The one place where the package touches transformers: a wrapper of `GenerationMixin._assisted_decoding`.

`generate(assistant_model=head)` prepares its inputs and then calls that method; the wrapper hands the call to the head if
it is a P-EAGLE head (by a marker attribute, since remote code makes another class object) and to the original method
otherwise. `custom_generate=head.custom_generate` needs no wrapper at all.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin

from .decoding import peagle_decode

logger = logging.getLogger(__name__)

HOOK_VERSION = 1
EXPECTED_PARAMETERS = {
    "self",
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "streamer",
    "assistant_model",
    "model_kwargs",
}


def install() -> None:
    """
    Installs the hook once per process, whichever copies of this code (package, remote code) are imported; a newer
    version replaces an older one. Where transformers' method no longer has the expected arguments nothing is changed.
    """
    current = GenerationMixin._assisted_decoding
    if getattr(current, "_peagle_hook_version", 0) >= HOOK_VERSION:
        return
    original = getattr(current, "_peagle_original", current)
    missing = EXPECTED_PARAMETERS - set(inspect.signature(original).parameters)
    if missing:
        logger.warning(
            "generate(assistant_model=head) is not available: this transformers' _assisted_decoding lacks %s. Use "
            "generate(custom_generate=head.custom_generate) instead.",
            ", ".join(sorted(missing)),
        )
        return

    @functools.wraps(original)  # generate() reads the signature
    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        head = kwargs.get("assistant_model")
        if getattr(head, "is_peagle_drafter", False):
            return head.decode(self, *args, **kwargs)  # every head brings its own version of the loop
        return original(self, *args, **kwargs)

    _assisted_decoding._peagle_hook_version = HOOK_VERSION  # type: ignore[attr-defined]
    _assisted_decoding._peagle_original = original  # type: ignore[attr-defined]
    GenerationMixin._assisted_decoding = _assisted_decoding


def uninstall() -> None:
    """Takes the hook out again; `custom_generate=head.custom_generate` keeps working."""
    original = getattr(GenerationMixin._assisted_decoding, "_peagle_original", None)
    if original is not None:
        GenerationMixin._assisted_decoding = original


class PEagleGenerationMixin:
    """What makes a drafter model usable from `generate()`."""

    is_peagle_drafter = True

    def decode(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The decoding loop for `target`, as `_assisted_decoding` is called by `generate()`."""
        return peagle_decode(target, *args, **kwargs)

    @property
    def custom_generate(self) -> Callable[..., Any]:
        """
        For `target.generate(..., custom_generate=head.custom_generate)`: the same loop without any hook.

        transformers passes neither a streamer nor a tokenizer to such a callable; see [`bind`].
        """
        return self.bind()

    def bind(self, streamer: Any = None) -> Callable[..., Any]:
        """
        The decoding loop as a `custom_generate` callable with this head and `streamer` bound.

        ```python
        target.generate(**inputs, custom_generate=head.bind(streamer=streamer))
        ```
        The prompt is put to the streamer here, as `generate()` only does so for a streamer of its own.
        """

        def custom_generate(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            synced_gpus: bool = False,
            **model_kwargs: Any,
        ) -> Any:
            if streamer is not None:
                streamer.put(input_ids.cpu())
            return self.decode(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                assistant_model=self,
                **model_kwargs,
            )

        return custom_generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """A head does not generate by itself."""
        raise RuntimeError(
            "A P-EAGLE head drafts for a target and cannot generate alone. Use target.generate(..., assistant_model=head); "
            "if that led here, the hook is not installed (import hf_peagle, or hf_peagle.install()), or use "
            "target.generate(..., custom_generate=head.custom_generate)."
        )

    def _supports_logits_to_keep(self) -> bool:
        """transformers' own assisted decoding asks this first; it was reached because the hook is missing."""
        return bool(self.generate())
