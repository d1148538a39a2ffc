"""Generation ends exactly where plain decoding ends: stop strings, criteria of the user, lengths, time."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteriaList

from tests.support.heads import oracle_head
from tests.support.processors import Contains, LastTokenIs, RecordingCriterion, RecordingProcessor, StopAfterCalls
from tests.support.targets import PAD, VOCAB, ragged_prompts, tiny_target

K = 6


def letters():
    """One printable character a token, so that a stop string ends at any place of a draft."""
    vocab = {chr(33 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", clean_up_tokenization_spaces=False)


def setting(lengths=(6,), new_tokens=40, family="llama", **kwargs):
    """Target, prompt, plain answer, and an oracle that drafts it with all lengths of acceptance in turn."""
    target = tiny_target(family)
    prompt = ragged_prompts(list(lengths), torch.Generator().manual_seed(7))
    arguments = {**prompt, "max_new_tokens": new_tokens, "repetition_penalty": 1.3, **kwargs}
    plain = target.generate(**arguments)
    truth = plain[:, max(lengths) :].tolist()
    head = oracle_head(target).script_with(truth, list(lengths), lambda r, b: (5 * r + b) % (K + 2))
    return target, arguments, truth, head


def both(target, head, arguments, fresh):
    """Outputs of plain and drafted decoding; `fresh()` makes the stateful arguments of each call anew."""
    head._round = 0
    plain = target.generate(**arguments, **fresh())
    return plain, target.generate(**arguments, **fresh(), assistant_model=head, num_assistant_tokens=K)


@pytest.mark.parametrize("end", range(1, 20, 2))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings_at_every_place_of_a_draft(end, width):
    target, arguments, truth, head = setting()
    tokenizer = letters()
    stop = "".join(chr(33 + t) for t in truth[0][max(0, end - width) : end])
    plain, drafted = both(target, head, arguments, lambda: {"stop_strings": [stop], "tokenizer": tokenizer})
    assert plain.tolist() == drafted.tolist()
    assert plain.shape[1] <= 6 + end


@pytest.mark.parametrize("eos", [None, "late"])
def test_stop_strings_in_a_batch(eos):
    """With an end token finished rows are padded; without one plain decoding lets them go on until the last stops."""
    target, arguments, truth, head = setting((6, 2, 9), **({} if eos is None else {"eos_token_id": 96}))
    tokenizer = letters()
    stops = ["".join(chr(33 + t) for t in row[end - 2 : end]) for row, end in zip(truth, (5, 11, 23), strict=True)]
    plain, drafted = both(target, head, arguments, lambda: {"stop_strings": stops, "tokenizer": tokenizer})
    assert plain.tolist() == drafted.tolist()
    assert plain.shape[1] < 9 + 40


@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9)])
@pytest.mark.parametrize("place", [0, 1, 4, 5, 6, 13, 22])
def test_criteria_of_the_user(lengths, place):
    target, arguments, truth, head = setting(lengths)
    makers = [
        lambda: LastTokenIs(truth[-1][place]),
        lambda: Contains(truth[-1][place], max(lengths)),
        lambda: StopAfterCalls(place + 1),
    ]
    for make in makers:
        plain, drafted = both(target, head, arguments, lambda make=make: {"stopping_criteria": StoppingCriteriaList([make()])})
        assert plain.tolist() == drafted.tolist()


@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9)])
@pytest.mark.parametrize("outputs", [False, True])
def test_a_criterion_and_a_processor_see_every_prefix_once(lengths, outputs):
    target, arguments, _, head = setting(lengths, eos_token_id=[40, 41, 42, 43])
    seen = []

    def fresh():
        seen.append((RecordingCriterion(), RecordingProcessor()))
        return {
            "stopping_criteria": StoppingCriteriaList([seen[-1][0]]),
            "logits_processor": [seen[-1][1]],
            "return_dict_in_generate": outputs,
            "output_scores": outputs,
        }

    plain, drafted = both(target, head, arguments, fresh)
    if outputs:
        plain, drafted = plain.sequences, drafted.sequences
    assert plain.tolist() == drafted.tolist()
    (criterion, processor), (drafted_criterion, drafted_processor) = seen
    assert drafted_criterion.prefixes == criterion.prefixes
    assert drafted_criterion.scores == criterion.scores
    assert drafted_processor.prefixes == processor.prefixes


@pytest.mark.parametrize("offset", range(K + 1))
@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9, 4)])
def test_end_tokens_at_every_place_of_a_draft(offset, lengths):
    target, arguments, truth, head = setting(lengths)
    head.script_with(truth, list(lengths), lambda r, b: K)
    eos = [truth[0][1 + offset], truth[-1][9 + offset]]
    plain, drafted = both(target, head, arguments, lambda: {"eos_token_id": eos})
    assert plain.tolist() == drafted.tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, K, K + 1, K + 2])
@pytest.mark.parametrize("lengths", [(1,), (6, 2)])
def test_lengths(new_tokens, lengths):
    target, arguments, truth, head = setting(lengths)
    head.script_with(truth, list(lengths), lambda r, b: K)
    arguments["max_new_tokens"] = new_tokens
    plain, drafted = both(target, head, arguments, dict)
    assert plain.tolist() == drafted.tolist()
    del arguments["max_new_tokens"]
    plain, drafted = both(target, head, arguments, lambda: {"max_length": max(lengths) + new_tokens})
    assert plain.tolist() == drafted.tolist()
    assert drafted.shape[1] == max(lengths) + new_tokens


def test_min_new_tokens_holds_an_early_end_back():
    target, arguments, truth, head = setting()
    plain, drafted = both(target, head, arguments, lambda: {"eos_token_id": truth[0][2], "min_new_tokens": 20})
    assert plain.tolist() == drafted.tolist()
    assert drafted.shape[1] >= 26


def test_no_time_left_stops_after_the_first_token():
    target, arguments, _, head = setting()
    plain, drafted = both(target, head, arguments, lambda: {"max_time": 1e-9})
    assert plain.tolist() == drafted.tolist()
    assert drafted.shape[1] == 7


def test_rows_that_finish_are_padded():
    target, arguments, truth, head = setting((6, 2))
    eos = truth[1][3]
    plain, drafted = both(target, head, arguments, lambda: {"eos_token_id": eos})
    assert plain.tolist() == drafted.tolist()
    assert drafted[1, 6 + truth[1].index(eos) + 1 :].unique().tolist() in ([PAD], [])
