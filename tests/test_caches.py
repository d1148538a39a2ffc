"""Caches of every kind and prompts of every form, against plain decoding; the cache is left as plain decoding leaves it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Lfm2Config, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from hf_peagle import collect_statistics
from hf_peagle.token_buffer import TokenBuffer
from tests.support.heads import OracleHead, oracle_head, random_head
from tests.support.targets import PAD, VOCAB, ragged_prompts, tiny_target

needs_static_crop = pytest.mark.skipif(
    "crop" not in vars(StaticLayer), reason="this transformers cannot roll back a static cache; refused by test_compatibility.py"
)


def prompts(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    return ragged_prompts(list(lengths), torch.Generator().manual_seed(seed))


def oracle(target: PreTrainedModel, answers: torch.Tensor, slots: list[int]) -> OracleHead:
    """Drafts of all lengths of acceptance in turn; `slots` are the tokens per row that the drafter reads before its first draft."""
    return oracle_head(target).script_with(answers.tolist(), slots, lambda r, b: (5 * r + 2 * b) % 7)


def returned_cache(output: Any) -> Any:
    return output.get("cache") or output.get("past_key_values")


def check(target: PreTrainedModel, arguments: dict[str, Any], width: int, slots: list[int], k: int = 5) -> None:
    plain = target.generate(**arguments)
    head = oracle(target, plain[:, width:], slots)
    with collect_statistics() as calls:
        drafted = target.generate(**arguments, assistant_model=head, num_assistant_tokens=k)
    assert drafted.tolist() == plain.tolist()
    assert calls[0].accepted > 0


@needs_static_crop
@pytest.mark.parametrize("lengths", [(5,), (5, 3)])
def test_static_cache(lengths: tuple[int, ...]) -> None:
    target = tiny_target("qwen3")
    check(target, {**prompts(*lengths), "max_new_tokens": 20, "cache_implementation": "static"}, 5, list(lengths))


@needs_static_crop
def test_second_turn_on_a_static_cache() -> None:
    target = tiny_target("llama")
    cache = StaticCache(config=target.config, max_cache_len=60)
    first = target.generate(**prompts(5), max_new_tokens=10, past_key_values=cache, assistant_model=random_head(target))
    assert int(cache.get_seq_length()) == first.shape[1] - 1
    second = torch.cat([first, prompts(4, seed=9)["input_ids"]], dim=1)
    plain = target.generate(second, max_new_tokens=10)
    assert torch.equal(target.generate(second, max_new_tokens=10, past_key_values=cache, assistant_model=random_head(target)), plain)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
@pytest.mark.parametrize("only_new_ids", [False, True])
def test_second_turn(family: str, lengths: tuple[int, ...], only_new_ids: bool) -> None:
    """A user's cache, filled with drafts, goes on with drafts: with the whole conversation, or with the new ids alone."""
    target, prompt, batch = tiny_target(family), prompts(*lengths), len(lengths)
    cache = DynamicCache(config=target.config)
    first = target.generate(**prompt, max_new_tokens=8, past_key_values=cache, assistant_model=random_head(target))
    assert cache.get_seq_length() == first.shape[1] - 1
    whole = torch.cat([first, prompts(*[4] * batch, seed=9)["input_ids"]], dim=1)
    mask = torch.cat([prompt["attention_mask"], torch.ones(batch, 12, dtype=torch.long)], dim=1)
    expected = target.generate(whole, attention_mask=mask, max_new_tokens=10)[:, whole.shape[1] :]
    ids = whole[:, cache.get_seq_length() :] if only_new_ids else whole
    head = oracle(target, expected, [5] * batch)
    with collect_statistics() as calls:
        second = target.generate(ids, attention_mask=mask, max_new_tokens=10, past_key_values=cache, assistant_model=head, num_assistant_tokens=4)
    assert second[:, ids.shape[1] :].tolist() == expected.tolist()
    assert calls[0].accepted > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_sliding_layers_of_the_users_cache_are_as_plain_decoding_leaves_them(family: str) -> None:
    target, cache, plain_cache = tiny_target(family), DynamicCache(config=tiny_target(family).config), DynamicCache(config=tiny_target(family).config)
    arguments = {**prompts(12), "max_new_tokens": 15}
    plain = target.generate(**arguments, past_key_values=plain_cache)
    target.generate(**arguments, past_key_values=cache, assistant_model=oracle(target, plain[:, 12:], [12]), num_assistant_tokens=6)
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        assert not getattr(ours, "record_past", False)  # it would keep everything from now on
        assert ours.keys.shape == theirs.keys.shape
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-4)
        assert torch.allclose(ours.values, theirs.values, atol=1e-4)


def test_recording_ends_with_an_interrupted_call_too() -> None:
    target, cache = tiny_target("mistral"), DynamicCache(config=tiny_target("mistral").config)

    def stop(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] > 15:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts(12), max_new_tokens=9, past_key_values=cache, stopping_criteria=[stop], assistant_model=random_head(target))
    assert not any(layer.record_past for layer in cache.layers)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_rows_that_moved_are_put_back(family: str) -> None:
    """Padding in front of every row, rows that accept differently; the returned cache is in the prompt's own layout."""
    target, lengths = tiny_target(family), [9, 3, 7]
    prompt = {name: torch.nn.functional.pad(value, (6, 0)) for name, value in prompts(*lengths).items()}
    arguments = {**prompt, "max_new_tokens": 30, "repetition_penalty": 1.3}
    plain = target.generate(**arguments)
    head = oracle(target, plain[:, 15:], lengths)
    out = target.generate(**arguments, assistant_model=head, num_assistant_tokens=6, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    cache = returned_cache(out)
    assert cache.get_seq_length() == plain.shape[1] - 1
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 30), value=1)
    expected = target.generate(plain, attention_mask=mask, max_new_tokens=10)
    for assistant in ({}, {"assistant_model": random_head(target)}):
        again = target.generate(plain, attention_mask=mask, max_new_tokens=10, past_key_values=copy.deepcopy(cache), **assistant)
        assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("lengths", [(1,), (5,), (20, 2), (5, 3, 4)])
def test_convolution_layers(lengths: tuple[int, ...]) -> None:
    """LFM2: its layers are known to be free of recurrences only after the prefill."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        initializer_range=0.25,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, PAD
    check(target, {**prompts(*lengths), "max_new_tokens": 20, "repetition_penalty": 1.3}, max(lengths), list(lengths))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("lengths", [(11,), (11, 4)])
@pytest.mark.parametrize("states", [False, True])
def test_prompts_in_chunks_give_the_drafter_every_slot(family: str, lengths: tuple[int, ...], states: bool) -> None:
    target = tiny_target(family)
    arguments = {**prompts(*lengths), "max_new_tokens": 15, "prefill_chunk_size": 4}
    plain = target.generate(**arguments)
    head = oracle(target, plain[:, 11:], list(lengths))
    out = target.generate(**arguments, assistant_model=head, return_dict_in_generate=True, output_hidden_states=states, num_assistant_tokens=4)
    assert out.sequences.tolist() == plain.tolist()
    assert head.seen_lengths[0] == list(lengths)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 2)])
def test_prompts_of_embeddings(family: str, lengths: tuple[int, ...]) -> None:
    target, prompt = tiny_target(family), prompts(*lengths)
    embeds = target.get_input_embeddings()(prompt["input_ids"]).detach()
    arguments = {"inputs_embeds": embeds, "attention_mask": prompt["attention_mask"], "max_new_tokens": 15}
    check(target, arguments, 0, [1] * len(lengths))  # one slot: the other positions have no token ids


def test_masks_of_booleans_and_positions_of_the_user() -> None:
    target = tiny_target("mistral")
    prompt = prompts(12, 3, 7)
    prompt["attention_mask"] = prompt["attention_mask"].bool()
    check(target, {**prompt, "max_new_tokens": 30, "repetition_penalty": 1.3}, 12, [12, 3, 7])
    check(target, {**prompts(6), "position_ids": torch.arange(6)[None] + 7, "max_new_tokens": 12}, 6, [6])


def test_any_maximum_length() -> None:
    """Only what is generated takes memory, as in plain decoding."""
    target = tiny_target("llama")
    plain = target.generate(**prompts(5, 3), max_new_tokens=40, repetition_penalty=1.3)
    eos = plain[0, 30].item()
    arguments = {**prompts(5, 3), "max_new_tokens": 10**11, "repetition_penalty": 1.3, "eos_token_id": [eos, *plain[1, 35:].tolist()]}
    assert torch.equal(target.generate(**arguments, assistant_model=random_head(target)), target.generate(**arguments))


def test_the_token_buffer_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenBuffer, "FIRST_CAPACITY", 4)
    target = tiny_target("llama")
    for extra in ({}, {"logits_processor": [lambda ids, scores: scores]}):
        check(target, {**prompts(6, 2), "max_new_tokens": 30, "repetition_penalty": 1.3, **extra}, 6, [6, 2])
