"""What generate() returns, streams and leaves behind, against plain decoding."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_peagle import collect_statistics, uninstall
from tests.support.heads import oracle_head, random_head
from tests.support.targets import ragged_prompts, tiny_target

OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def setting(family="llama", lengths=(6,), new_tokens=24):
    target = tiny_target(family)
    prompt = ragged_prompts(list(lengths), torch.Generator().manual_seed(7))
    arguments = {**prompt, "max_new_tokens": new_tokens, "repetition_penalty": 1.3}
    truth = target.generate(**arguments)[:, max(lengths) :].tolist()
    return target, arguments, oracle_head(target).script_with(truth, list(lengths), lambda r, b: (3 * r + 2 * b) % 6)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9)])
def test_scores_states_and_attentions(family, lengths):
    target, arguments, head = setting(family, lengths)
    before = target.config._attn_implementation
    target.set_attn_implementation("eager")
    try:
        plain = target.generate(**arguments, **OUTPUTS)
        drafted = target.generate(**arguments, **OUTPUTS, assistant_model=head, num_assistant_tokens=4)
    finally:
        target.set_attn_implementation(before)
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        a, b = getattr(plain, name), getattr(drafted, name)
        assert len(a) == len(b) == 24
        assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(a, b, strict=True)), name
    for name in ("hidden_states", "attentions"):
        a, b = getattr(plain, name), getattr(drafted, name)
        assert len(a) == len(b)
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            for layer_x, layer_y in zip(x, y, strict=True):
                assert layer_x.shape == layer_y.shape, (name, step)
                if step:  # at the prompt, padded places hold anything
                    assert torch.allclose(layer_x, layer_y, atol=1e-4), (name, step)


@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9)])
def test_the_returned_cache_goes_on(lengths):
    target, arguments, head = setting("llama", lengths)
    out = target.generate(**arguments, return_dict_in_generate=True, assistant_model=head, num_assistant_tokens=4)
    cache = out.get("cache") or out.get("past_key_values")
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    mask = torch.cat([arguments["attention_mask"], torch.ones(len(lengths), 24, dtype=torch.long)], dim=1)
    fresh = target.generate(out.sequences, attention_mask=mask, max_new_tokens=10)
    for assistant in ({}, {"assistant_model": random_head(target)}):
        again = target.generate(out.sequences, attention_mask=mask, max_new_tokens=10, past_key_values=copy.deepcopy(cache), **assistant)
        assert torch.equal(fresh, again)


class Recorder:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.reshape(value.shape[0], -1) if value.dim() > 1 else value[None])

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("door", ["assistant_model", "custom_generate"])
def test_streaming(door):
    target, arguments, head = setting()
    streamer = Recorder()
    if door == "assistant_model":
        with collect_statistics() as calls:
            out = target.generate(**arguments, streamer=streamer, assistant_model=head, num_assistant_tokens=4)
        assert len(streamer.pieces) == 1 + calls[0].target_forwards  # the prompt, then one put per round
    else:
        out = target.generate(**arguments, custom_generate=head.bind(streamer=streamer), num_assistant_tokens=4)
    assert torch.equal(torch.cat(streamer.pieces, dim=1), out)
    assert torch.equal(streamer.pieces[0], arguments["input_ids"])
    assert streamer.ended == 1


def test_custom_generate_needs_no_hook():
    target, arguments, head = setting()
    plain = target.generate(**arguments)
    uninstall()
    assert torch.equal(target.generate(**arguments, custom_generate=head.custom_generate, num_assistant_tokens=4), plain)
    with pytest.raises(RuntimeError, match="custom_generate"):
        target.generate(**arguments, assistant_model=head)


def test_statistics_add_up_and_a_round_is_one_pass_each():
    target, arguments, head = setting(new_tokens=40)
    counted = {"draft": 0, "forward": 0}
    draft, forward = head.draft, target.forward

    def count(name, function):
        def wrapped(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return wrapped

    head.draft, target.forward = count("draft", draft), count("forward", forward)
    try:
        with collect_statistics() as calls:
            target.generate(**arguments, assistant_model=head, num_assistant_tokens=4)
    finally:
        del head.draft, target.forward
    stats = calls[0]
    assert stats.generated_tokens == 40
    assert stats.accepted + stats.target_forwards == 40
    assert counted == {"draft": stats.draft_forwards, "forward": stats.target_forwards}
    assert stats.host_reads == stats.target_forwards
    assert set(stats.seconds) == {"prefill", "draft", "verify", "other"}


def test_nothing_of_a_call_stays():
    target, arguments, head = setting()

    def state():
        return (
            target.config.to_dict(),
            target.generation_config.to_dict(),
            head.config.to_dict(),
            sorted(target.__dict__),
            sorted(head.__dict__),
        )

    target.generate(**arguments, assistant_model=head, num_assistant_tokens=4)
    before = state()
    target.generate(**arguments, assistant_model=head, num_assistant_tokens=3, do_sample=True)

    class Broken(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.pieces) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(**arguments, assistant_model=head, streamer=Broken())
    assert state() == before
    assert torch.equal(target.generate(**arguments), target.generate(**arguments, assistant_model=head))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"use_cache": False}, "use_cache"), ({"cache_implementation": "quantized"}, "quantized|quanto|roll|cache")],
)
def test_what_cannot_be_rolled_back_is_refused_before_the_prefill(options, message, monkeypatch):
    target, arguments, head = setting()
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("the target ran"))
    with pytest.raises((ValueError, ImportError, RuntimeError), match=message):
        target.generate(**arguments, **options, assistant_model=head)


def test_beams_decode_without_drafts(caplog):
    target, arguments, head = setting()
    plain = target.generate(**arguments, num_beams=3)
    assert torch.equal(target.generate(**arguments, num_beams=3, assistant_model=head), plain)


def test_chunked_prefill_and_embeddings():
    target, arguments, head = setting(lengths=(11,))
    plain = target.generate(**arguments, prefill_chunk_size=4)
    assert torch.equal(plain, target.generate(**arguments, prefill_chunk_size=4, assistant_model=head, num_assistant_tokens=3))
    embeds = target.get_input_embeddings()(arguments["input_ids"])
    options = {"inputs_embeds": embeds, "attention_mask": arguments["attention_mask"], "max_new_tokens": 15}
    head = random_head(target)
    assert torch.equal(target.generate(**options), target.generate(**options, assistant_model=head, num_assistant_tokens=3))


def test_a_target_that_records_nothing_is_read_by_hooks(monkeypatch):
    from hf_peagle import features

    target, arguments, head = setting()
    monkeypatch.setattr(features, "records_hidden_states", lambda target: False)
    with collect_statistics() as calls:
        out = target.generate(**arguments, assistant_model=head, num_assistant_tokens=4)
    assert torch.equal(out, target.generate(**arguments))
    assert calls[0].accepted > 0
    assert not any(layer._forward_pre_hooks for layer in target.get_decoder().layers)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_native_loop_drafts_the_same(family, monkeypatch):
    """The same head as a candidate generator of transformers: same tokens, same drafts in every round."""
    from hf_peagle.candidate_generator import PEagleCandidateGenerator

    target, head = tiny_target(family), random_head(tiny_target(family))
    prompt = torch.randint(3, 90, (1, 7))
    generator = PEagleCandidateGenerator(head, target, 4, 7 + 20)
    monkeypatch.setattr(target, "_get_candidate_generator", lambda **kwargs: generator, raising=False)
    native = target.generate(prompt, max_new_tokens=20, prompt_lookup_num_tokens=4)
    drafts = []
    original = head.draft

    def spy(*args, **kwargs):
        out = original(*args, **kwargs)
        drafts.append(out.tokens[0].tolist())
        return out

    monkeypatch.setattr(head, "draft", spy)
    ours = target.generate(prompt, max_new_tokens=20, assistant_model=head, num_assistant_tokens=4)
    assert torch.equal(native, ours)
    assert torch.equal(native, target.generate(prompt, max_new_tokens=20))
    assert drafts == generator.drafts
