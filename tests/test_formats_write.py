"""What is written is read back bit for bit, drafts the same, and is complete or absent."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_peagle import PEagleConfig, PEagleDrafterModel
from hf_peagle.formats import FormatError, check_vllm, speculators, vllm, writing

from .support import foreign_heads as fixture

WRITERS = {"vllm": vllm, "speculators": speculators}
HEADS: dict[str, dict[str, Any]] = {
    "pruned": {"num_hidden_layers": 3},
    "full vocabulary": {"draft_vocab_size": fixture.VOCAB},
    "qwen3": {"layer_family": "qwen3"},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "biases": {"attention_bias": True},
    "five streams": {"target_layer_ids": [1, 3, 5, 7, 9], "num_depths": 11, "draft_length": 7},
    "llama3 rope": {"rope_parameters": fixture.LLAMA3 | {"rope_theta": 500000.0}},
}


class Tokenizer:
    """Knows all ids but the given ones."""

    def __init__(self, *unused: int) -> None:
        self.unused = unused

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(fixture.VOCAB) if i not in self.unused}

    def convert_ids_to_tokens(self, i: int) -> str:
        return f"t{i}"


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=fixture.VOCAB,
        hidden_size=fixture.WIDTH,
        intermediate_size=48,
        num_hidden_layers=fixture.TARGET_LAYERS,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def same_facts(read: PEagleConfig, written: PEagleConfig) -> None:
    skipped = ("dtype", "_name_or_path", "transformers_version", "architectures", "auto_map", "target_model_type")
    a, b = read.to_dict(), written.to_dict()
    assert {k: v for k, v in a.items() if k not in skipped} == {k: v for k, v in b.items() if k not in skipped}


@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("format_name", WRITERS)
def test_round_trip_is_bit_equal_and_keeps_every_fact(format_name: str, head_name: str, tmp_path: Path) -> None:
    head = fixture.tiny_head(**HEADS[head_name])
    folder = WRITERS[format_name].write(head, tmp_path / "out")
    read = PEagleDrafterModel.from_pretrained(folder)
    assert read.dtype == torch.bfloat16
    assert read.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name
    same_facts(read.config, head.config)
    if format_name == "vllm" or head_name != "fc_norm":
        assert check_vllm.check(folder).errors == []
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("format_name", WRITERS)
def test_eagle3_heads_are_written_without_what_they_borrow_and_come_back(format_name: str, tmp_path: Path) -> None:
    head = fixture.tiny_eagle3(norm_output=True)
    read = PEagleDrafterModel.from_pretrained(WRITERS[format_name].write(head, tmp_path / "out"))
    assert read.config.algorithm == "eagle3"
    assert read.config.share_embeddings
    assert read.config.norm_output
    for a, b in zip(fixture.drafts(head), fixture.drafts(read), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format_name", WRITERS)
@pytest.mark.parametrize("draft_vocab", [fixture.DRAFT_VOCAB, fixture.VOCAB])
def test_borrowed_tables_are_written_out_and_draft_the_same(format_name: str, draft_vocab: int, tmp_path: Path, target: LlamaForCausalLM) -> None:
    head = fixture.tiny_head(share_embeddings=True, share_lm_head=True, mask_token_id=None, draft_vocab_size=draft_vocab, fc_norm=True)
    folder = WRITERS[format_name].write(head, tmp_path / "out", target, Tokenizer(50, 63))
    read = PEagleDrafterModel.from_pretrained(folder)
    assert read.config.mask_token_id == 63
    assert torch.equal(read.embed_tokens.weight[63], head.mask_embedding)
    assert torch.equal(read.embed_tokens.weight[:63], target.get_input_embeddings().weight[:63])
    assert torch.equal(read.lm_head.weight, target.lm_head.weight[head.draft_token_ids])
    tokens = torch.randint(0, 63, (1, 6))
    features = torch.randn(1, 6, head.config.feature_size).to(torch.bfloat16)
    outs = [h.draft(tokens, features, torch.tensor([6]), 5, h.new_cache(1), borrowed=h.borrow(target)) for h in (head, read)]
    assert torch.equal(outs[0].logits, outs[1].logits)


def test_borrowing_head_needs_target_and_an_unused_mask_id(tmp_path: Path, target: LlamaForCausalLM, caplog: Any) -> None:
    head = fixture.tiny_head(share_embeddings=True, mask_token_id=None, bos_token_id=1, eos_token_id=[2, 3])
    cases = [
        ((None, None, None), "share_embeddings is true.*--target"),
        ((target, None, None), "mask_token_id is unknown.*--mask-token-id"),
        ((target, Tokenizer(), None), "tokenizer uses all 64 rows.*--mask-token-id"),
        ((target, None, 64), "mask_token_id=64 is outside the vocabulary of 64"),
        ((target, None, 3), "mask_token_id=3 is the eos_token_id"),
        ((target, None, 1), "mask_token_id=1 is the bos_token_id"),
    ]
    for arguments, message in cases:
        with pytest.raises(FormatError, match=message):
            vllm.write(head, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()
    vllm.write(head, tmp_path / "out", target, Tokenizer(), 17)
    assert "mask_token_id=17 is the tokenizer's 't17'" in caplog.text
    with pytest.raises(FormatError, match="mask_token_id=5: this head has its own table, whose mask row is 61"):
        vllm.write(fixture.tiny_head(), tmp_path / "other", mask_token_id=5)


def test_what_the_formats_cannot_express_is_refused_or_warned_about(tmp_path: Path, caplog: Any) -> None:
    last = fixture.tiny_head(target_layer_ids=[2, 6, fixture.TARGET_LAYERS])
    narrow = fixture.tiny_head(target_hidden_size=48)
    for head, writer, message in (
        (last, vllm, "target_layer_ids has 12, the state after the final norm"),
        (last, speculators, "target_layer_ids has 12"),
        (narrow, speculators, "hidden_size 32 differs from target_hidden_size 48"),
    ):
        with pytest.raises(FormatError, match=message):
            writer.write(head, tmp_path / "out")
    vllm.write(fixture.tiny_head(fc_norm=True), tmp_path / "vllm")
    assert "only vLLM releases" in caplog.text
    speculators.write(fixture.tiny_head(fc_norm=True), tmp_path / "speculators")
    assert "would not serve it right" in caplog.text
    read = PEagleDrafterModel.from_pretrained(vllm.write(narrow, tmp_path / "narrow"))
    same_facts(read.config, narrow.config)


def test_destination_with_content_is_kept_and_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="not an empty folder"):
        vllm.write(fixture.tiny_head(), tmp_path / "full")
    (tmp_path / "empty").mkdir()
    vllm.write(fixture.tiny_head(), tmp_path / "empty")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(writing, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        vllm.write(fixture.tiny_head(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_large_heads_are_sharded(tmp_path: Path) -> None:
    head = fixture.tiny_head()
    folder = vllm.write(head, tmp_path / "out", max_shard_size=8000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["mask_hidden"].endswith(".safetensors")
    assert check_vllm.check(folder).errors == []
    assert torch.equal(PEagleDrafterModel.from_pretrained(folder).fc.weight, head.fc.weight)


def test_both_rope_notations_give_transformers_the_same_angles(tmp_path: Path) -> None:
    head = fixture.tiny_head(rope_parameters=fixture.LLAMA3 | {"rope_theta": 500000.0})
    config = json.loads((vllm.write(head, tmp_path / "out") / "config.json").read_text())
    expected = LlamaConfig(**{k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")})
    old = LlamaConfig(**{k: v for k, v in config.items() if k != "rope_parameters"})
    assert old.rope_parameters == expected.rope_parameters == head.config.rope_parameters


def convert() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "convert.py"
    spec = importlib.util.spec_from_file_location("convert", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_convert_goes_round_all_formats_and_prints_the_serve_line(
    tmp_path: Path, target: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    main = convert().main
    target.save_pretrained(tmp_path / "target")
    head = fixture.tiny_head(share_embeddings=True, share_lm_head=True, mask_token_id=None, draft_length=3)
    head.save_pretrained(tmp_path / "own")
    own, there = str(tmp_path / "own"), str(tmp_path / "target")
    assert main([own, str(tmp_path / "v"), "--to", "vllm", "--target", there]) == 1
    assert "--mask-token-id" in capsys.readouterr().err
    assert main([own, str(tmp_path / "v"), "--to", "vllm", "--target", there, "--mask-token-id", "60"]) == 0
    printed = capsys.readouterr().out
    expected = {"method": "eagle3", "model": str(tmp_path / "v"), "num_speculative_tokens": 3, "parallel_drafting": True}
    line = next(line for line in printed.splitlines() if line.startswith("vllm serve"))
    assert line.startswith(f"vllm serve {there} --speculative-config '")
    assert json.loads(line.split("'")[1]) == expected
    assert main([str(tmp_path / "v"), str(tmp_path / "s"), "--to", "speculators"]) == 0
    assert main([str(tmp_path / "s"), str(tmp_path / "p"), "--to", "peagle"]) == 0
    assert main(["--check", "vllm", str(tmp_path / "v")]) == 0
    assert main(["--check", "vllm", str(tmp_path / "p")]) == 1
    loaded_target = AutoModelForCausalLM.from_pretrained(there, dtype="auto").eval()
    tokens, features = torch.randint(0, 60, (1, 6)), torch.randn(1, 6, head.config.feature_size).to(torch.bfloat16)
    logits = []
    for folder in ("own", "v", "s", "p"):
        read = PEagleDrafterModel.from_pretrained(tmp_path / folder).eval()
        borrowed = read.borrow(loaded_target)
        logits.append(read.draft(tokens, features, torch.tensor([6]), 5, read.new_cache(1), borrowed=borrowed).logits)
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    prompt = torch.tensor([[1, 5, 9, 12]])
    plain = loaded_target.generate(prompt, max_new_tokens=12, do_sample=False)
    read = PEagleDrafterModel.from_pretrained(tmp_path / "v").eval()
    assert torch.equal(loaded_target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=read), plain)
