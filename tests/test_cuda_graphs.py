"""Is the draft step ready to be captured? Every check that needs no GPU (a script checks the rest on one)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_peagle import collect_statistics, cuda_graphs
from hf_peagle.cuda_graphs import reset_graphs, use_cuda_graphs
from tests.support.heads import oracle_head, random_head
from tests.support.replay import OpRecorder, ReplayBackend
from tests.support.targets import ragged_prompts, tiny_target

K = 4


@pytest.fixture
def backend(monkeypatch):
    emulator = ReplayBackend()
    reset_graphs()
    monkeypatch.setattr(cuda_graphs._runners, "backend", emulator)
    yield emulator
    reset_graphs()


def _head(target, **overrides):
    return random_head(target, draft_vocab_size=60, draft_schedule="constant", **overrides)


def _step_inputs(head, batch, counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "token_ids": torch.randint(3, 90, (batch, K + 1), generator=generator),
        "features": torch.randn(batch, K + 1, head.config.feature_size, generator=generator),
        "counts": torch.tensor(counts),
    }


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
@pytest.mark.parametrize("shares", [True, False])
def test_replayed_drafts_equal_eager_ones_round_by_round(backend, algorithm, shares):
    """Poisoned intermediates, inputs that change every round, three acceptance patterns in turn."""
    target = tiny_target("llama")
    head = _head(target, algorithm=algorithm, share_embeddings=shares, share_lm_head=shares)
    borrowed = head.borrow(target)
    eager, graphs = head.new_cache(2), cuda_graphs.DraftGraphs(head, target, 2, 256, backend)
    prompt = torch.randint(3, 90, (2, 7)), torch.randn(2, 7, head.config.feature_size), torch.tensor([7, 5])
    for cache in (eager, graphs.cache):
        head.draft(*prompt, K, cache, borrowed, longest=7)
    drafted = set()
    for step, counts in enumerate([[1, 1], [5, 2], [3, 4], [1, 5], [5, 5], [2, 1]]):
        inputs = _step_inputs(head, 2, counts, seed=step)
        expected = head.draft(**inputs, num_tokens=K, cache=eager, borrowed=borrowed)
        assert torch.equal(graphs.draft(**inputs, k=K), expected.tokens)
        assert torch.equal(graphs.cache.lengths, eager.lengths)
        drafted.add(tuple(expected.tokens.flatten().tolist()))
    assert len(drafted) == 6  # a replay of stale inputs would repeat itself
    assert backend.captures == 1
    assert backend.replays == 6


def test_the_emulator_catches_a_step_that_bakes_in_a_python_value(backend):
    """The negative control of the test above."""
    calls = []

    def step(x):
        calls.append(1)
        return (x + len(calls),)

    graphed = cuda_graphs.GraphedStep(backend, step, {"x": torch.zeros(3)})
    assert not torch.equal(graphed(x=torch.ones(3))[0], torch.ones(3) + len(calls) + 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_with_graphs_gives_the_same_rounds(backend, batch):
    target = tiny_target("qwen3")
    lengths = [7, 3, 5][:batch]
    prompt = ragged_prompts(lengths, torch.Generator().manual_seed(0))
    plain = target.generate(**prompt, max_new_tokens=25)
    head = _head(target)
    seen = []
    for enabled in (False, True):
        with use_cuda_graphs(enabled), collect_statistics() as calls:
            out = target.generate(**prompt, max_new_tokens=25, assistant_model=head, num_assistant_tokens=K)
        assert torch.equal(out, plain)
        seen.append(calls[0])
    assert seen[0].draft_graph == "not asked for"
    assert seen[1].draft_graph == "captured"
    assert seen[0].rounds == seen[1].rounds
    assert backend.captures > 0


def test_the_step_never_asks_the_device_and_does_the_same_for_every_acceptance():
    target = tiny_target("llama")
    head = _head(target)
    borrowed, cache = head.borrow(target), head.new_cache(2, static_capacity=256)
    traces = []
    for counts in ([1, 1], [5, 5], [2, 4], [0, 3]):
        with OpRecorder() as recorder:
            head.draft(**_step_inputs(head, 2, counts), num_tokens=K, cache=cache, borrowed=borrowed, longest=0)
        assert recorder.syncs == []
        traces.append(recorder.trace)
    # The first pass also computes the mask slot, once per call.
    assert traces[1] == traces[2] == traces[3]


def test_buffers_keep_their_addresses():
    target = tiny_target("llama")
    head = _head(target)
    borrowed, cache = head.borrow(target), head.new_cache(2, static_capacity=256)

    def addresses():
        return [t.data_ptr() for t in (cache.lengths, *cache.keys, *cache.values)]

    before = addresses()
    for counts in ([3, 5], [1, 1], [5, 2]):
        head.draft(**_step_inputs(head, 2, counts), num_tokens=K, cache=cache, borrowed=borrowed, longest=0)
    assert addresses() == before


def test_the_step_runs_on_fake_tensors():
    """Data-dependent shapes or branches raise there, even where a CPU would hide them."""
    target = tiny_target("llama")
    head = _head(target, share_embeddings=False, share_lm_head=False)
    cache = head.new_cache(1, static_capacity=256)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {name: mode.from_tensor(t) for name, t in _step_inputs(head, 1, [2]).items()}
        cache.lengths = mode.from_tensor(cache.lengths)
        cache.keys = [mode.from_tensor(t) for t in cache.keys]
        cache.values = [mode.from_tensor(t) for t in cache.values]
        out = head.draft(**inputs, num_tokens=K, cache=cache, longest=0)
    assert out.tokens.shape == (1, K)


def test_dynamo_traces_the_step_whole_and_never_again():
    target = tiny_target("llama")
    head = _head(target, share_embeddings=False, share_lm_head=False)
    cache = head.new_cache(2, static_capacity=256)
    cache.mask_slot = head.mask_slot()

    def step(token_ids, features, counts):
        return head.draft(token_ids, features, counts, K, cache, longest=0).tokens

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    expected, got = [], []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for run, into in ((step, expected), (compiled, got)):
            cache.reset()
            for seed, counts in enumerate([[5, 5], [1, 3], [2, 2]]):
                into.append(run(**_step_inputs(head, 2, counts, seed)))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_failing_capture_falls_back_with_the_reason(backend, monkeypatch):
    target = tiny_target("llama")
    head = _head(target)
    prompt = ragged_prompts([6], torch.Generator().manual_seed(1))

    def refuse(step):
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(backend, "capture", refuse)
    with use_cuda_graphs(), collect_statistics() as calls:
        out = target.generate(**prompt, max_new_tokens=12, assistant_model=head, num_assistant_tokens=K)
    assert torch.equal(out, target.generate(**prompt, max_new_tokens=12))
    assert "no graphs today" in calls[0].draft_graph


def test_new_weights_are_captured_again(backend):
    target = tiny_target("llama")
    head = _head(target)
    prompt = ragged_prompts([6], torch.Generator().manual_seed(1))

    def rounds():
        with use_cuda_graphs():
            target.generate(**prompt, max_new_tokens=12, assistant_model=head, num_assistant_tokens=K)

    rounds()
    rounds()
    assert backend.captures == 1
    with torch.no_grad():
        head.fc.weight.mul_(0.5)
    rounds()
    assert backend.captures == 2


def test_buffers_that_are_too_short_are_replaced(backend):
    target = tiny_target("llama")
    head = _head(target)
    for new_tokens in (10, 300):
        prompt = ragged_prompts([6], torch.Generator().manual_seed(1))
        with use_cuda_graphs():
            out = target.generate(**prompt, max_new_tokens=new_tokens, assistant_model=head, num_assistant_tokens=K)
        assert torch.equal(out, target.generate(**prompt, max_new_tokens=new_tokens))
    assert backend.captures == 2


def test_a_second_thread_decodes_without_the_graphs_in_use(backend):
    target = tiny_target("llama")
    head = _head(target)
    prompt = ragged_prompts([6], torch.Generator().manual_seed(1))
    plain = target.generate(**prompt, max_new_tokens=20)
    results = {}

    def run(name):
        with use_cuda_graphs(), collect_statistics() as calls:
            out = target.generate(**prompt, max_new_tokens=20, assistant_model=head, num_assistant_tokens=K)
        results[name] = (torch.equal(out, plain), calls[0].draft_graph)

    with cuda_graphs.draft_graphs(head, target, 1, 64):
        worker = threading.Thread(target=run, args=("other",))
        worker.start()
        worker.join()
    run("after")
    assert results["other"] == (True, "another thread is using the graphs")
    assert results["after"] == (True, "captured")


def test_reasons_for_not_capturing_are_named():
    target = tiny_target("llama")
    head = _head(target)
    assert cuda_graphs.refusal(head, False) == "not asked for"
    with use_cuda_graphs():
        assert "not on a CUDA device" in cuda_graphs.refusal(head, False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[7], [7, 3, 5]])
def test_verify_passes_over_a_static_cache_replay(backend, lengths, attention):
    if not _has_static_rollback():
        pytest.skip("this transformers cannot roll back a static cache")
    target = tiny_target("qwen3")
    before = target.config._attn_implementation
    target.set_attn_implementation(attention)
    try:
        prompt = ragged_prompts(lengths, torch.Generator().manual_seed(0))
        kwargs = {**prompt, "max_new_tokens": 25, "cache_implementation": "static"}
        plain = target.generate(**kwargs)
        truth = plain[:, prompt["input_ids"].shape[1] :].tolist()
        head = oracle_head(target).script_with(truth, lengths, lambda r, b: r % 5)
        for _ in range(2):  # the second call finds the graphs of the first
            head._round = 0
            with use_cuda_graphs(), collect_statistics() as calls:
                out = target.generate(**kwargs, assistant_model=head, num_assistant_tokens=K)
            assert torch.equal(out, plain)
            assert calls[0].verify_graph == "captured"
        assert calls[0].accepted > 0
        assert backend.replays > calls[0].target_forwards
    finally:
        target.set_attn_implementation(before)


def _has_static_rollback():
    from transformers.cache_utils import StaticLayer

    return StaticLayer.is_croppable
