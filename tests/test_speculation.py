"""The drafting length: scripted acceptance and costs in, expected lengths out. No clock is read."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GenerationConfig

from hf_peagle import collect_statistics
from hf_peagle.speculation import AdaptiveDraftLength, ConstantDraftLength, Experience, draft_length_policy
from tests.support.heads import oracle_head, random_head
from tests.support.targets import ragged_prompts, tiny_target


def play(policy, rate, cost, rounds, seed=0):
    """Lets `policy` choose for `rounds` rounds in which drafts are accepted at `rate(depth)`; returns its choices."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(rounds):
        k = policy.choose()
        accepted = 0
        while accepted < k and rng.random() < rate(accepted):
            accepted += 1
        policy.observe(k, [accepted], cost(k))
        chosen.append(k)
    return chosen


def adaptive(longest=8, recommended=4, **kwargs):
    return AdaptiveDraftLength(longest, recommended, Experience(longest), **kwargs)


def best_length(rate, cost, longest=8):
    def speed(k):
        expected, reach = 1.0, 1.0
        for depth in range(k):
            reach *= rate(depth)
            expected += reach
        return expected / cost(k)

    return max(range(longest + 1), key=speed)


@pytest.mark.parametrize(
    ("rate", "cost"),
    [
        (lambda d: 0.9, lambda k: 1.0 + 0.05 * k),  # wide drafts are nearly free and good
        (lambda d: 0.6, lambda k: 1.0 + 0.25 * k),  # rows cost: short drafts
        (lambda d: 0.8, lambda k: 1.0 if k == 0 else 1.6 + 0.02 * k),  # a step at the first draft, then flat
        (lambda d: 0.75 if d < 2 else 0.2, lambda k: 1.0 + 0.1 * k),  # acceptance falls off behind depth 2
        (lambda d: 0.2, lambda k: 1.0 + 0.5 * k),  # nothing pays
    ],
)
def test_settles_at_the_fastest_length(rate, cost):
    chosen = play(adaptive(), rate, cost, 400)
    settled = [k for k in chosen[200:] if k > 0] if best_length(rate, cost) else chosen[200:]
    most_common = max(set(settled), key=settled.count)
    assert abs(most_common - best_length(rate, cost)) <= 1


def test_tries_recommended_none_and_longest_first():
    assert play(adaptive(), lambda d: 0.5, lambda k: 1.0, 3)[:3] == [4, 0, 8]


def test_a_useless_head_costs_almost_nothing():
    """Plain steps, but for three trials and probes that become rarer."""
    chosen = play(adaptive(), lambda d: 0.0, lambda k: 1.0 + 0.2 * k, 600)
    assert chosen.count(0) >= 585
    spent = sum(1.0 + 0.2 * k for k in chosen)
    assert spent / 600 < 1.03


def test_probes_again_and_finds_that_the_text_became_easy():
    policy = adaptive()
    cost = lambda k: 1.0 + 0.2 * k  # noqa: E731
    assert play(policy, lambda d: 0.0, cost, 100)[-1] == 0
    chosen = play(policy, lambda d: 1.0, cost, 400)
    assert chosen[-1] >= 4


def test_costs_that_change_are_followed():
    """Another job takes the machine: what was cheap becomes dear within a few rounds."""
    policy = adaptive()
    assert play(policy, lambda d: 0.7, lambda k: 1.0 + 0.02 * k, 100)[-1] >= 4
    chosen = play(policy, lambda d: 0.7, lambda k: 1.0 + 3.0 * k, 100)
    assert chosen[-1] == 0


def test_the_same_script_gives_the_same_lengths():
    runs = [play(adaptive(), lambda d: 0.6, lambda k: 1.0 + 0.1 * k, 200, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_rows_in_lockstep_get_shorter_drafts():
    """Eight rows that advance by the worst of them rarely use a long draft."""
    experience = Experience(8)
    for _ in range(200):
        experience.add(8, [3], 1.8)
        experience.add(0, [0], 1.0)
    alone = AdaptiveDraftLength(8, 4, experience).choose()
    together = AdaptiveDraftLength(8, 4, experience, lockstep_rows=8).choose()
    assert together <= alone


def test_acceptance_of_a_batch_is_pooled():
    experience = Experience(2, prior_acceptance=0.5)
    for _ in range(500):
        experience.add(2, [2, 1, 0, 0], 1.0)
    assert experience.rate(0) == pytest.approx(0.5, abs=0.01)  # 2 of 4 rows
    assert experience.rate(1) == pytest.approx(0.5, abs=0.01)  # 1 of the 2 that got there


def policy_for(target, head, fixed=False, **options):
    config = GenerationConfig(**{"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", **options})
    return draft_length_policy(target, head, config, 1, lockstep=False, fixed=fixed)


def test_who_decides_the_length():
    target = tiny_target("llama")
    head = random_head(target, num_depths=6, draft_length=3)
    assert isinstance(policy_for(target, head), AdaptiveDraftLength)
    assert policy_for(target, head).longest == 6
    explicit = policy_for(target, head, num_assistant_tokens=5)
    assert isinstance(explicit, ConstantDraftLength)
    assert explicit.choose() == 5
    capped = policy_for(target, head, num_assistant_tokens=2, num_assistant_tokens_schedule="adaptive")
    assert isinstance(capped, AdaptiveDraftLength)
    assert capped.longest == 2
    assert policy_for(target, head, fixed=True).choose() == 3
    constant = random_head(target, num_depths=6, draft_length=3, draft_schedule="constant")
    assert policy_for(target, constant).choose() == 3
    assert policy_for(target, head, num_assistant_tokens=0).choose() == 0


@pytest.mark.parametrize("value", [-1, 2.5, "4", True])
def test_a_bad_length_is_named(value):
    target = tiny_target("llama")
    config = GenerationConfig()
    config.num_assistant_tokens = value
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        draft_length_policy(target, random_head(target), config, 1, lockstep=False)


def test_a_bad_schedule_is_named():
    target = tiny_target("llama")
    config = GenerationConfig()
    config.num_assistant_tokens_schedule = "clever"
    with pytest.raises(ValueError, match="num_assistant_tokens_schedule"):
        draft_length_policy(target, random_head(target), config, 1, lockstep=False)


@pytest.mark.parametrize("batch", [1, 3])
def test_adaptive_decoding_keeps_the_drafter_in_step(batch):
    """Rounds without drafts in between: what they committed is read before the next draft, nothing is lost."""
    target = tiny_target("llama")
    lengths = [5, 2, 9][:batch]
    prompt = ragged_prompts(lengths, torch.Generator().manual_seed(3))
    plain = target.generate(**prompt, max_new_tokens=60)
    truth = plain[:, prompt["input_ids"].shape[1] :].tolist()
    head = oracle_head(target, num_depths=6).script_with(truth, lengths, lambda r, b: (r * 7 + b) % 5)
    with collect_statistics() as calls:
        out = target.generate(**prompt, max_new_tokens=60, assistant_model=head)
    assert torch.equal(out, plain)
    assert {drafted for drafted, _ in calls[0].rounds} >= {0, 4}
    # The oracle reads its place from the drafter's cache: were a row lost, it would draft the wrong tokens.
    assert calls[0].accepted > 0
