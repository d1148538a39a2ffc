"""What P-EAGLE cannot serve is refused before the target runs, with a remedy; other architectures it can serve work."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer, QuantizedLayer, StaticLayer

from hf_peagle import PEagleConfig, PEagleDrafterModel, collect_statistics, features
from hf_peagle.compatibility import check_cache
from hf_peagle.features import FeatureCapture
from tests.support.heads import oracle_head, random_head
from tests.support.targets import FAMILIES, PAD, VOCAB, ragged_prompts, tiny_target

PROMPT = torch.tensor([[3, 4, 5]])


def any_head(**overrides: Any) -> PEagleDrafterModel:
    values = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "target_layer_ids": [0, 1, 2], "mask_token_id": 96}
    return PEagleDrafterModel(PEagleConfig(**{**values, "num_hidden_layers": 1, "intermediate_size": 32, **overrides})).eval()


@contextmanager
def forbidden(target: PreTrainedModel) -> Iterator[None]:
    """Any forward pass of `target` fails the test. Its signature stays, as generate() reads it."""
    original = type(target).forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the target ran")

    type(target).forward = forward
    try:
        yield
    finally:
        type(target).forward = original


def doors(head: PEagleDrafterModel) -> list[dict[str, Any]]:
    return [{"assistant_model": head}, {"custom_generate": head.custom_generate}]


@functools.cache
def unsupported(name: str) -> PreTrainedModel:
    if name == "t5":
        config = T5Config(vocab_size=VOCAB, d_model=32, d_ff=40, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
        return T5ForConditionalGeneration(config).eval()
    if name == "mamba":
        return AutoModelForCausalLM.from_config(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, state_size=8)).eval()
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts_per_tok=1,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("name", "message"), [("t5", "encoder-decoder"), ("mamba", "stateful|recurrent"), ("qwen3_next", "stateful|recurrent")])
@pytest.mark.parametrize("door", [0, 1])
def test_targets_that_cannot_be_rolled_back(name: str, message: str, door: int) -> None:
    target = unsupported(name)
    with forbidden(target), pytest.raises(ValueError, match=message):
        target.generate(PROMPT, max_new_tokens=4, **doors(any_head())[door])


@pytest.mark.parametrize("door", [0, 1])
def test_no_cache(door: int) -> None:
    target = tiny_target()
    with forbidden(target), pytest.raises(ValueError, match="use_cache=True"):
        target.generate(PROMPT, max_new_tokens=4, use_cache=False, **doors(random_head(target))[door])


class StuckLayer(DynamicLayer):
    is_croppable = False


class AnyQuantizedLayer(QuantizedLayer):
    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("layer", [StuckLayer, AnyQuantizedLayer])
def test_layers_that_cannot_be_cropped(layer: type[DynamicLayer]) -> None:
    target, cache = tiny_target(), DynamicCache(config=tiny_target().config)
    cache.layers = [layer() for _ in range(5)]
    with forbidden(target), pytest.raises(ValueError, match=rf"{layer.__name__}.*dynamic cache"):
        target.generate(PROMPT, max_new_tokens=4, past_key_values=cache, assistant_model=random_head(target))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_static_caches_that_cannot_be_cropped(family: str) -> None:
    if family == "llama" and "crop" in vars(StaticLayer):
        pytest.skip("this transformers rolls static layers back")
    target = tiny_target(family)
    with forbidden(target), pytest.raises(ValueError, match=r"Static\w*Layer.*dynamic cache"):
        target.generate(PROMPT.repeat(1, 5), max_new_tokens=9, cache_implementation="static", assistant_model=random_head(target))


def test_a_cache_that_turns_out_recurrent_is_refused_after_the_prefill() -> None:
    """A target that keeps recurrent states without saying so is found out by its first pass."""

    class Layer:
        is_recurrent_states_initialized = {0: False}  # noqa: RUF012
        is_croppable = False

    cache = DynamicCache(config=tiny_target().config)
    cache.layers = [Layer()]
    check_cache(tiny_target(), cache)
    Layer.is_recurrent_states_initialized = {0: True}
    with pytest.raises(ValueError, match="rolled back"):
        check_cache(tiny_target(), cache)


def test_something_else_than_a_cache() -> None:
    with pytest.raises(ValueError, match="tuple"):
        check_cache(tiny_target(), ())


def test_a_target_whose_states_nobody_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(features, "records_hidden_states", lambda target: False)
    monkeypatch.setattr(features, "find_decoder_layers", lambda target: None)
    with forbidden(target), pytest.raises(ValueError, match="neither records hidden states"):
        target.generate(PROMPT, max_new_tokens=4, assistant_model=random_head(target))


def test_a_target_that_swallows_the_request_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = tiny_target(), random_head(tiny_target())
    capture = FeatureCapture(target, head.config.target_layer_ids)
    with torch.no_grad():
        outputs = target(PROMPT)
    with pytest.raises(ValueError, match="returned no hidden state"):
        capture.take(outputs, target.device)


@pytest.mark.parametrize(
    ("overrides", "message", "door"),
    [
        ({"target_hidden_size": 48}, "width 48", 0),
        ({"target_hidden_size": 48}, "width 48", 1),
        ({"target_layer_ids": [0, 9]}, r"target_layer_ids=\[0, 9\]", 0),
        ({"target_layer_ids": [0, 9]}, r"target_layer_ids=\[0, 9\]", 1),
        ({"vocab_size": 98}, "vocabulary of 98", 1),  # by the other door generate() itself compares the vocabularies first
    ],
)
def test_heads_of_another_target(overrides: dict[str, Any], message: str, door: int) -> None:
    target = tiny_target()
    with forbidden(target), pytest.raises(ValueError, match=message):
        target.generate(PROMPT, max_new_tokens=4, **doors(any_head(**overrides))[door])


# ---------------------------------------------------------------------- architectures that work


def sized(names: str, **values: Any) -> dict[str, Any]:
    """`vocab_size` and the four sizes under the names that a configuration has for them."""
    return dict(zip(names.split(), (32, 5, 4), strict=True), vocab_size=VOCAB, **values)


USUAL = "hidden_size num_hidden_layers num_attention_heads"
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**sized("n_embd n_layer n_head", n_positions=128)),
    "opt": OPTConfig(**sized(USUAL, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=32)),
    "bloom": BloomConfig(**sized("hidden_size n_layer n_head")),
    "falcon": FalconConfig(**sized(USUAL)),
    "falcon_alibi": FalconConfig(**sized(USUAL, alibi=True)),
    "gpt_neox": GPTNeoXConfig(**sized(USUAL, intermediate_size=48)),
    "mpt": MptConfig(**sized("d_model n_layers n_heads", max_seq_len=128, use_cache=True)),
    "gemma2": Gemma2Config(**sized(USUAL, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=8)),
    "deepseek_v3": DeepseekV3Config(
        **sized(
            USUAL,
            intermediate_size=40,
            moe_intermediate_size=16,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    ),
}


def varied(target: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.25)
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, PAD
    return target.eval()


def check(target: PreTrainedModel, lengths: list[int], **inputs: Any) -> None:
    arguments = {**ragged_prompts(lengths, torch.Generator().manual_seed(1)), **inputs, "max_new_tokens": 20, "repetition_penalty": 1.3}
    width = arguments["input_ids"].shape[1]
    plain = target.generate(**arguments)
    head = oracle_head(target).script_with(plain[:, width:].tolist(), lengths, lambda r, b: (5 * r + b) % 7)
    with collect_statistics() as calls:
        drafted = target.generate(**arguments, assistant_model=head, num_assistant_tokens=5)
    assert drafted.tolist() == plain.tolist()
    assert calls[0].accepted > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name: str) -> None:
    target = varied(AutoModelForCausalLM.from_config(ARCHITECTURES[name]))
    check(target, [5])
    check(target, [9, 3])


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_positions_of_three_axes() -> None:
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
        image_token_id=0,
        video_token_id=1,
        vision_start_token_id=2,
        vision_end_token_id=1,
    )
    target = varied(Qwen2VLForConditionalGeneration(config))
    check(target, [6])
    check(target, [6, 3], input_ids=torch.randint(3, VOCAB, (2, 6)))


def test_a_picture_in_the_prompt() -> None:
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=90,
    )
    target = varied(Gemma3ForConditionalGeneration(config))
    ids = torch.tensor([[3, 4, 90, 90, 90, 90, 5, 6, 7]])
    check(target, [9], input_ids=ids, pixel_values=torch.randn(1, 3, 28, 28), token_type_ids=(ids == 90).long())


# ---------------------------------------------------------------------- reading by hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_streams_of_their_numbers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream i enters layer i; the last one is behind the final norm."""
    target, ids = tiny_target(family), [0, 2, 5]
    with torch.no_grad():
        states = target(PROMPT, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i] for i in ids], dim=-1)
    for records in (True, False):
        monkeypatch.setattr(features, "records_hidden_states", lambda target, records=records: records)
        capture = FeatureCapture(target, ids)
        assert capture.native == (records and features.SELECTS_STREAMS)
        with torch.no_grad(), capture.active():
            with capture.listening():
                outputs = target(PROMPT, **capture.forward_kwargs)
            assert torch.equal(capture.take(outputs, target.device), expected)
            assert not capture._seen


def test_all_states_are_asked_for_where_single_ones_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(features, "SELECTS_STREAMS", False)
    monkeypatch.setattr(features, "find_decoder_layers", lambda target: None)
    check(target, [5])
    assert FeatureCapture(target, [0, 2]).forward_kwargs == {"output_hidden_states": True}


def test_hooks_do_not_hear_what_a_processor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guidance runs the same target between the passes of the loop."""
    target = tiny_target()
    arguments = {"input_ids": PROMPT, "max_new_tokens": 15, "guidance_scale": 1.5}
    plain = target.generate(**arguments)
    seen: list[list[torch.Tensor]] = []
    for records in (True, False):
        monkeypatch.setattr(features, "records_hidden_states", lambda target, records=records: records)
        head = oracle_head(target).script_with(plain[:, 3:].tolist(), [3], lambda r, b: r % 4)
        read: list[torch.Tensor] = []
        draft = head.draft
        monkeypatch.setattr(head, "draft", lambda ids, fed, *a, read=read, draft=draft, **k: read.append(fed.clone()) or draft(ids, fed, *a, **k))
        assert torch.equal(target.generate(**arguments, assistant_model=head, num_assistant_tokens=3), plain)
        seen.append(read)
    for x, y in zip(*seen, strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def test_states_for_the_user_from_a_target_read_by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(features, "records_hidden_states", lambda target: False)
    options = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(PROMPT, **options)
    drafted = target.generate(PROMPT, **options, assistant_model=random_head(target))
    assert torch.equal(plain.sequences, drafted.sequences)
    assert len(plain.hidden_states) == len(drafted.hidden_states) == 9
    assert torch.allclose(plain.hidden_states[-1][-1], drafted.hidden_states[-1][-1], atol=1e-5)
