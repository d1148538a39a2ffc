"""
Greedy decoding with drafts gives the tokens of plain `generate()`, whatever the drafts are.

A case is drawn from its seed: prompts, draft length, limits, stop ids, processors, and the head: a random network, or
an oracle whose drafts are right up to a scripted place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from .support.heads import oracle_head, random_head
from .support.processors import RecordingProcessor
from .support.targets import FAMILIES, PAD, VOCAB, ragged_prompts, tiny_target

CASES_PER_FAMILY = 30
# Padding is part of what these see, so a padded row differs from the same row alone even in plain decoding.
SEES_PADDING = {"repetition_penalty", "no_repeat_ngram_size", "logits_processor", "guidance_scale"}


def _processors(rng: random.Random, prompt_width: int) -> dict[str, Any]:
    choices: list[Callable[[], dict[str, Any]]] = [
        dict,
        lambda: {"repetition_penalty": rng.choice([1.3, 1.8])},
        lambda: {"no_repeat_ngram_size": rng.choice([1, 2, 3])},
        lambda: {"bad_words_ids": [[rng.randrange(3, VOCAB)] for _ in range(20)] + [[5, 6], [7, 8, 9]]},
        lambda: {"sequence_bias": {(t,): rng.uniform(-4, 4) for t in range(3, 40)} | {(5, 6): 3.0}},
        lambda: {"suppress_tokens": rng.sample(range(50, VOCAB), 30)},
        lambda: {"begin_suppress_tokens": rng.sample(range(3, VOCAB), 60)},
        lambda: {"forced_eos_token_id": rng.randrange(3, 50)},
        lambda: {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 1.2},
        lambda: {"logits_processor": LogitsProcessorList([RecordingProcessor()])},
        lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [(3 + 5 * i + int(ids[-1])) % VOCAB for i in range(9)]},
        lambda: {"guidance_scale": 1.5},
    ]
    picked = rng.choice(choices)()
    if rng.random() < 0.3:
        picked = {**picked, **rng.choice(choices)()}
    if rng.random() < 0.4:
        picked.setdefault("repetition_penalty", 1.4)  # keeps tiny models from looping
    return picked


def _fresh(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with stateful processors in their first state."""
    if "logits_processor" in kwargs:
        return {**kwargs, "logits_processor": LogitsProcessorList([RecordingProcessor()])}
    return kwargs


def _with_eos(rng: random.Random, kwargs: dict[str, Any], plain: torch.Tensor, prompt_width: int) -> dict[str, Any]:
    """Adds stop ids that some row meets somewhere in its answer, and limits that go with them."""
    answer = plain[rng.randrange(plain.shape[0]), prompt_width:].tolist()
    eos = [t for t in {rng.choice(answer), rng.choice(answer), 3} if t != PAD]
    kwargs = {**kwargs, "eos_token_id": eos if rng.random() < 0.7 else eos[0]}
    if rng.random() < 0.4:
        kwargs["min_new_tokens"] = rng.randrange(1, kwargs["max_new_tokens"] + 1)
    if rng.random() < 0.2:
        kwargs["exponential_decay_length_penalty"] = (rng.randrange(0, 5), rng.choice([1.2, 2.0]))
    return kwargs


def _script(rng: random.Random) -> Callable[[int, int], int]:
    kind = rng.choice(["all rejected", "all accepted", "alternating", "random", "random"])
    seed = rng.randrange(1000)
    return {
        "all rejected": lambda r, b: 0,
        "all accepted": lambda r, b: 99,
        "alternating": lambda r, b: 99 * ((r + b) % 2),
        "random": lambda r, b: random.Random(seed + 31 * r + 7 * b).choice([0, 0, 1, 1, 2, 3, 5, 99]),
    }[kind]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(CASES_PER_FAMILY))
def test_equals_plain_decoding(family: str, seed: int) -> None:
    rng = random.Random(f"{family} {seed}")
    target = tiny_target(family)
    lengths = [rng.choice([1, 1, 2, 5, 9, 13]) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    inputs = ragged_prompts(lengths, torch.Generator().manual_seed(rng.randrange(10**6)))
    width = max(lengths)
    k = rng.randrange(1, 17)
    kwargs: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": rng.choice([1, 2, 3, k, k + 1, 12, 20, 28]),
        **_processors(rng, width),
    }
    plain = target.generate(**inputs, **_fresh(kwargs))
    if rng.random() < 0.6:
        kwargs = _with_eos(rng, kwargs, plain, width)
        plain = target.generate(**inputs, **_fresh(kwargs))

    heads = [random_head(target, seed)] if seed % 3 == 0 else []
    if seed % 3 or len(lengths) > 1:
        truth = plain[:, width:].tolist()
        heads.append(oracle_head(target).script_with(truth, lengths, _script(rng)))
    for head in heads:
        drafted = target.generate(**inputs, **_fresh(kwargs), assistant_model=head, num_assistant_tokens=k)
        assert drafted.tolist() == plain.tolist(), (kwargs, lengths, k)

    if len(lengths) > 1 and not SEES_PADDING & kwargs.keys():
        for b, length in enumerate(lengths):
            own = target.generate(inputs["input_ids"][b : b + 1, width - length :], **kwargs)
            row = plain[b, width - length :].tolist()
            own_row = own[0].tolist()
            assert row[: len(own_row)] == own_row
            assert set(row[len(own_row) :]) <= {PAD}
