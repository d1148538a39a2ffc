"""Prompts of a benchmark: which ones, in what order, and as token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .training.prompts import Prompt, read_jsonl

logger = logging.getLogger(__name__)

# For a first look without a prompts file: short tasks of the kinds people ask a small model for.
DEFAULT_PROMPTS = (
    "Explain to a child why the sky turns red at sunset.",
    "Write a Python function that returns the second largest number of a list, and show one call of it.",
    "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Show each step.",
    "Give me a packing list for a three-day hike in the mountains in autumn.",
    "Summarise in two sentences what photosynthesis does and where it happens.",
    "Write a polite e-mail that moves a meeting from Monday to Wednesday afternoon.",
    "Rewrite this sentence so that it is easier to read: The implementation of the aforementioned policy was "
    "subsequently effectuated by the committee.",
    "List five differences between a lake and a pond.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Turn this into JSON with the keys name, age and city: Maria is 34 and lives in Porto.",
)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the target reads it. `ids` are its tokens, chat template and generation prompt included."""

    id: str
    ids: tuple[int, ...]


def conversation_to_answer(prompt: Prompt) -> list[dict[str, str]]:
    """
    The messages up to the first user turn that has no answer, or up to the last one if all have. Of EAGLE's multi-turn
    questions (user turns only) that is the first turn.
    """
    messages = list(prompt.messages)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    followed = {i for i in users if i + 1 < len(messages) and messages[i + 1]["role"] != "user"}
    open_turns = [i for i in users if i not in followed]
    return messages[: (open_turns[0] if open_turns else users[-1]) + 1]


def encode_with(tokenizer: Any) -> Callable[[Prompt], list[int]]:
    """Turns a prompt into ids with the tokenizer's chat template, or with the bare text where it has none."""

    def encode(prompt: Prompt) -> list[int]:
        messages = conversation_to_answer(prompt)
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer(messages[-1]["content"])["input_ids"]

    return encode


def select_prompts(
    files: Sequence[str | Path],
    encode: Callable[[Prompt], list[int]],
    limit: int | None = None,
    max_prompt_tokens: int = 1024,
) -> list[EncodedPrompt]:
    """
    The prompts of `files` in turn (one of each file, then the next of each), always the same ones in the same order.

    Args:
        limit: this many in all, shared equally between the files and spread evenly over each, as such files are often
            sorted by category.
        max_prompt_tokens: longer prompts are left out before the selection.

    Raises:
        ValueError: a file has no usable prompt, or `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: give the number of prompts, at least 1, or leave it out for all.")
    queues = []
    if files:
        for file in files:
            queues.append(_usable(str(file), list(read_jsonl(file)), encode, max_prompt_tokens))
    else:
        turns = [({"role": "user", "content": text},) for text in DEFAULT_PROMPTS]
        own = [Prompt(f"default/{i}", "default", turn) for i, turn in enumerate(turns)]
        queues.append(_usable("the default prompts", own, encode, max_prompt_tokens))
    if limit is not None:
        shares = [limit // len(queues) + (i < limit % len(queues)) for i in range(len(queues))]
        queues = [_spread(queue, share) for queue, share in zip(queues, shares, strict=True)]
    longest = max(len(queue) for queue in queues)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def _usable(name: str, prompts: list[Prompt], encode: Callable[[Prompt], list[int]], max_prompt_tokens: int) -> list[EncodedPrompt]:
    encoded = [EncodedPrompt(prompt.id, tuple(encode(prompt))) for prompt in prompts]
    kept = [prompt for prompt in encoded if 0 < len(prompt.ids) <= max_prompt_tokens]
    if len(kept) < len(encoded):
        logger.info("%s: %d prompts longer than %d tokens left out", name, len(encoded) - len(kept), max_prompt_tokens)
    if not kept:
        raise ValueError(f"prompts={name}: no prompt of at most max_prompt_tokens={max_prompt_tokens} tokens in it.")
    return kept


def _spread(queue: list[EncodedPrompt], count: int) -> list[EncodedPrompt]:
    count = min(count, len(queue))
    return [queue[(2 * i + 1) * len(queue) // (2 * count)] for i in range(count)]
