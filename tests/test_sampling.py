"""Sampling with drafts has exactly the target's distribution, and with greedy drafts the very tokens of plain sampling."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_peagle import collect_statistics
from hf_peagle.drafting import DraftState
from hf_peagle.sampling_noise import NoiseStream
from hf_peagle.verification import Drafts, accept_choices, accept_sampled
from tests.support.heads import oracle_head, random_head
from tests.support.targets import FAMILIES, ragged_prompts, tiny_target

VOCAB, DRAWS, ROWS, TOKENS = 8, 40_000, 1000, 3
PROMPT = [[3, 5, 1, 6]]


@functools.cache
def small_vocabulary_target():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.6,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def warpers(temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1.0 else [])
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    chain += [MinPLogitsWarper(min_p)] if min_p is not None else []
    return chain


@torch.no_grad()
def exact_law(**options):
    """`[VOCAB] * TOKENS` joint probabilities of the first tokens, by enumeration."""
    target, chain = small_vocabulary_target(), warpers(**options)
    law = torch.zeros([VOCAB] * TOKENS, dtype=torch.float64)
    prefixes = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS - 1)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], dim=1)
    logits = target(ids).logits[:, -TOKENS:]
    conditional = [chain(ids, logits[:, i].clone()).double().softmax(-1) for i in range(TOKENS)]
    for row, prefix in enumerate(prefixes.tolist()):
        mass = 1.0
        for i, token in enumerate(prefix):
            mass = mass * conditional[i][row, token]
        law[tuple(prefix)] = mass * conditional[TOKENS - 1][row]
    return law.flatten()


def p_value(head, draws=DRAWS, **options):
    """Chi-square of `draws` generated continuations against the exact joint law; rare cells are merged."""
    target, law = small_vocabulary_target(), exact_law(**options)
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    counts = torch.zeros_like(law)
    with collect_statistics() as calls:
        for _ in range(draws // ROWS):
            out = target.generate(
                torch.tensor(PROMPT).expand(ROWS, -1),
                attention_mask=torch.ones(ROWS, len(PROMPT[0]), dtype=torch.long),
                do_sample=True,
                max_new_tokens=TOKENS,
                assistant_model=head,
                **sampling,
            )
            new = out[:, len(PROMPT[0]) :]
            index = (new * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(dim=1)
            counts += torch.bincount(index, minlength=law.numel())
    assert sum(call.accepted for call in calls) > draws / 50  # drafts take part
    expected = law * counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = wanted > 0
    return stats.chisquare(observed[keep].numpy(), (wanted[keep] * observed.sum() / wanted.sum()).numpy()).pvalue


def drafter(sampling, **overrides):
    return random_head(
        small_vocabulary_target(),
        seed=1,
        draft_schedule="constant",
        draft_length=2,
        draft_sampling=sampling,
        target_layer_ids=[1, 2, 3],
        **overrides,
    )


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 4},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_joint_distribution_of_three_tokens_is_the_targets(sampling, options):
    torch.manual_seed(17)
    assert p_value(drafter(sampling), **options) > 1e-3


def test_joint_distribution_with_a_pruned_draft_vocabulary():
    torch.manual_seed(18)
    head = drafter("probabilistic", draft_vocab_size=5)
    head.set_draft_vocabulary(torch.tensor([0, 2, 3, 6, 7]))
    assert p_value(head, temperature=0.8) > 1e-3


def test_greedy_drafts_that_claim_to_be_sampled_are_caught(monkeypatch):
    """Negative control: argmax drafts reported with the head's soft distribution."""
    original = DraftState._sample

    def wrong(self, logits):
        _, probabilities = original(self, logits)
        return logits.argmax(-1), probabilities

    monkeypatch.setattr(DraftState, "_sample", wrong)
    torch.manual_seed(17)
    assert p_value(drafter("probabilistic")) < 1e-9


def test_unwarped_draft_probabilities_are_caught(monkeypatch):
    """Negative control: drafts drawn from the warped distribution, reported with the raw one."""
    original = DraftState._sample

    def wrong(self, logits):
        drafted, _ = original(self, logits)
        return drafted, logits.softmax(-1)

    monkeypatch.setattr(DraftState, "_sample", wrong)
    torch.manual_seed(17)
    assert p_value(drafter("probabilistic"), temperature=0.5) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_a_seed_samples_the_tokens_of_plain_decoding(family, seed):
    """Batches, any number of drafts, any acceptance, adaptive or not; and the generator ends where it would."""
    rng = random.Random(f"{family} {seed}")
    target = tiny_target(family)
    lengths = [rng.choice([1, 2, 5, 9, 14]) for _ in range(rng.choice([1, 1, 2, 4]))]
    prompt = ragged_prompts(lengths, torch.Generator().manual_seed(seed))
    kwargs = {
        "do_sample": True,
        "max_new_tokens": rng.choice([2, 5, 20, 50]),
        "temperature": rng.choice([0.3, 0.7, 1.0]),
        "top_k": rng.choice([0, 5, 50]),
        "top_p": rng.choice([1.0, 0.8]),
        "eos_token_id": rng.choice([None, [5, 6, 7, 8]]),
    }
    if rng.random() < 0.4:
        kwargs["repetition_penalty"] = 1.3
    torch.manual_seed(seed)
    plain = target.generate(**prompt, **kwargs)
    state = torch.get_rng_state()
    truth = plain[:, prompt["input_ids"].shape[1] :].tolist()
    oracle = oracle_head(target).script_with(truth, lengths, lambda r, b: random.Random(31 * r + b).choice([0, 1, 3, 9]))
    for head in (random_head(target), oracle):
        for drafts in ({}, {"num_assistant_tokens": rng.choice([1, 3, 7])}):
            torch.manual_seed(seed)
            oracle._round = 0
            assert torch.equal(target.generate(**prompt, **kwargs, **drafts, assistant_model=head), plain)
            assert torch.equal(torch.get_rng_state(), state)


def test_noise_far_behind_the_newest_is_drawn_again():
    torch.manual_seed(0)
    stream = NoiseStream(2, torch.device("cpu"))
    first = stream.rows([0, 0], 7).clone()
    stream.rows([NoiseStream.KEPT_STEPS + 5] * 2, 7)
    state = torch.get_rng_state()
    again = stream.rows([0, NoiseStream.KEPT_STEPS + 5], 7)
    assert torch.equal(again[0], first[0])
    assert torch.equal(torch.get_rng_state(), state)


def _accepts(p, q, drawn_from, one_hot, seed, draws=200_000):
    """Frequencies of the first committed token for a draft drawn from `drawn_from` and judged against `q`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(drawn_from.expand(draws, -1), 1, generator=generator)
    scores = p.log()[None, None].expand(draws, 2, -1)
    drafts = Drafts(tokens) if one_hot else Drafts(tokens, q[None, None].expand(draws, 1, -1), tokens, torch.arange(4))
    _, committed = accept_sampled(scores, drafts)
    return torch.bincount(committed[:, 0], minlength=4) / draws


def test_rejection_sampling_restores_p_and_only_for_the_true_q():
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    argmax = torch.tensor([0.0, 1.0, 0.0, 0.0])
    torch.manual_seed(0)
    assert torch.allclose(_accepts(p, q, q, False, 1), p, atol=5e-3)
    assert torch.allclose(_accepts(p, q, argmax, True, 2), p, atol=5e-3)
    assert not torch.allclose(_accepts(p, q, argmax, False, 3), p, atol=5e-2)


def test_identical_p_and_q_accept_everything():
    p = torch.tensor([0.25, 0.25, 0.5])
    drafts = Drafts(torch.tensor([[2, 0]]), p.expand(1, 2, -1), torch.tensor([[2, 0]]), torch.arange(3))
    for seed in range(50):
        torch.manual_seed(seed)
        accepted, tokens = accept_sampled(p.log().expand(1, 3, -1), drafts)
        assert accepted.tolist() == [2]
        assert tokens[0, :2].tolist() == [2, 0]


def test_choices_accept_the_longest_equal_prefix():
    drafts = Drafts(torch.tensor([[4, 5, 6], [1, 9, 3], [9, 2, 3]]))
    choices = torch.tensor([[4, 5, 6, 7], [1, 2, 3, 4], [1, 2, 3, 4]])
    accepted, tokens = accept_choices(choices, drafts)
    assert accepted.tolist() == [3, 1, 0]
    assert torch.equal(tokens, choices)
