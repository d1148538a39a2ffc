"""A missing, misshapen or contradictory piece is an error that names the tensor or key, and the remedy if there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_peagle import PEagleDrafterModel, formats
from hf_peagle.formats import FormatError

from .support import foreign_heads as fixture

TARGET = LlamaConfig(vocab_size=fixture.VOCAB, hidden_size=fixture.WIDTH, num_hidden_layers=fixture.TARGET_LAYERS, num_attention_heads=4)
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def drop(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return edit


def store(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


def add(name: str, *shape: int) -> Edit:
    return lambda config, tensors: tensors.update({name: torch.zeros(*shape, dtype=torch.bfloat16)})


def key(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def without(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config[name]

    return edit


def both(first: Edit, second: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        first(config, tensors)
        second(config, tensors)

    return edit


def decoder(**values: Any) -> Edit:
    return lambda config, tensors: config["transformer_layer_config"].update(values)


AMAZON: dict[str, tuple[Edit, str]] = {
    "no mask_hidden": (drop("mask_hidden"), r"mask_hidden is missing.*ptd_token_id"),
    "no fc": (drop("fc.weight"), r"fc\.weight.* is missing"),
    "no fusion norm": (drop("midlayer.hidden_norm.weight"), r"midlayer\.hidden_norm\.weight"),
    "no embedding": (drop("embed_tokens.weight"), r"embed_tokens\.weight is missing; a P-EAGLE head trains its own"),
    "no final norm": (drop("norm.weight"), r"norm\.weight is missing"),
    "no projection": (drop("layers.1.self_attn.v_proj.weight"), r"layers\.1\.self_attn\.v_proj\.weight is missing"),
    "no mlp": (drop("midlayer.mlp.gate_proj.weight"), r"layers\.0\.mlp\.gate_proj\.weight is missing"),
    "no d2t": (drop("d2t"), r"d2t is missing"),
    "mask_hidden too short": (store("mask_hidden", lambda t: t[..., :-1]), r"mask_hidden has shape \(1, 1, 95\)"),
    "norm misshapen": (store("norm.weight", lambda t: t[:-1]), r"norm\.weight has shape \(31,\), expected \(32,\)"),
    "fc not a matrix": (store("fc.weight", lambda t: t.flatten()), r"fc\.weight has shape \(3072,\)"),
    "fc of another width": (store("fc.weight", lambda t: t[:, :-3]), r"fc\.weight takes 93 inputs"),
    "lm_head too small": (store("lm_head.weight", lambda t: t[:-1]), r"lm_head\.weight has 39, d2t 40"),
    "embedding too small": (store("embed_tokens.weight", lambda t: t[:-1]), r"embed_tokens\.weight has 63, t2d 64"),
    "d2t float": (store("d2t", lambda t: t.float()), r"d2t has dtype torch\.float32"),
    "d2t out of range": (store("d2t", lambda t: t + 60), r"d2t must lead to 40 distinct ids"),
    "d2t repeated": (store("d2t", lambda t: -torch.arange(40)), r"d2t must lead to 40 distinct ids.*found 1"),
    "t2d other ids": (store("t2d", lambda t: t.roll(1)), r"t2d marks other target ids"),
    "int8 weights": (store("norm.weight", lambda t: t.to(torch.int8)), r"norm\.weight has dtype torch\.int8"),
    "layer gap": (
        lambda c, t: [t.update({n.replace("layers.1", "layers.2"): t.pop(n)}) for n in list(t) if "layers.1" in n] and None,
        r"layers\.1 are missing",
    ),
    "stray tensor": (add("fc.bias", 32), r"fc\.bias .*has no place"),
    "stray norm": (
        add("midlayer.self_attn.q_norm.weight", 8),
        r"layers\.1\.self_attn\.[qk]_norm\.weight is missing|k_norm",
    ),
    "twice": (add("layers.0.hidden_norm.weight", 32), r"second tensor for layers\.0\.hidden_norm\.weight"),
    "bias in part": (add("midlayer.self_attn.q_proj.bias", 32), r"self_attn\.k_proj\.bias is missing"),
    "no mask id": (without("ptd_token_id"), r"mask token's id is missing.*ptd_token_id.*mask_token_id="),
    "mask id outside": (key(ptd_token_id=64), r"ptd_token_id is 64, outside the vocabulary of 64"),
    "mask id no number": (key(ptd_token_id="mask"), r"ptd_token_id is 'mask'; expected an integer"),
    "heads contradict": (key(num_attention_heads=8), r"q_proj\.weight has 32 rows, but num_attention_heads 8"),
    "kv heads contradict": (key(num_key_value_heads=4), r"k_proj\.weight has 16 rows, but num_key_value_heads 4"),
    "head_dim does not divide": (key(head_dim=7), r"q_proj\.weight has 32 rows, not a multiple of head_dim 7"),
    "negative size": (key(num_attention_heads=-4), r"num_attention_heads is -4; expected an integer of at least 1"),
    "eps as text": (key(rms_norm_eps="small"), r"rms_norm_eps is 'small'; expected a positive number"),
    "flag as text": (key(norm_before_residual="yes"), r"norm_before_residual is 'yes'; expected true or false"),
    "fc_norm promised": (key(fc_norm=True), r"fc_norm\.0\.weight is missing, but fc_norm is true"),
    "fc_norm denied": (
        both(key(fc_norm=False), add("fc_norm.0.weight", 32)),
        r"holds fc_norm\.0\.weight, but .*fc_norm is false",
    ),
    "vocabulary contradicts": (key(vocab_size=100), r"vocab_size in config\.json 100"),
    "unknown rope": (key(rope_scaling={"rope_type": "spiral"}), r"rope_type is 'spiral'"),
    "rope incomplete": (key(rope_scaling={"type": "llama3", "factor": 8.0}), r"low_freq_factor is missing"),
    "rope negative": (key(rope_theta=-1.0), r"rope_theta is -1\.0; expected a positive number"),
    "partial rope": (key(partial_rotary_factor=0.5), r"partial_rotary_factor is 0\.5"),
    "unknown activation": (key(hidden_act="__import__"), r"hidden_act is '__import__'"),
    "quantised": (key(quantization_config={"bits": 4}), r"quantization_config .*quantised heads are not read"),
    "sliding layers": (key(layer_types=["sliding_attention"] * 2), r"layer_types.*sliding-window"),
    "last state only": (key(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state is false"),
    "ids no list": (key(eagle_aux_hidden_state_layer_ids="2,6,9"), r"eagle_aux_hidden_state_layer_ids is '2,6,9'"),
    "ids repeated": (key(eagle_aux_hidden_state_layer_ids=[2, 2, 9]), r"distinct non-negative integers"),
    "ids of another count": (key(eagle_aux_hidden_state_layer_ids=[2, 6]), r"not 2 captured streams x target width 32"),
    "ids beyond the target": (key(eagle_aux_hidden_state_layer_ids=[2, 6, 13]), r"target_layer_ids has 13"),
    "another target's width": (
        key(target_hidden_size=48),
        r"target_hidden_size is 48; but target_config has hidden_size 32",
    ),
}
SPECULATORS: dict[str, tuple[Edit, str]] = {
    "unknown kind": (key(speculators_model_type="dflash"), r"speculators_model_type is 'dflash'"),
    "no decoder": (without("transformer_layer_config"), r"transformer_layer_config is missing"),
    "no mask_hidden": (drop("mask_hidden"), r"mask_hidden is missing"),
    "no mask id": (key(mask_token_id=None), r"mask token's id is missing"),
    "no layer ids": (
        key(eagle_aux_hidden_state_layer_ids=None),
        r"eagle_aux_hidden_state_layer_ids is missing.*target_config=",
    ),
    "no shape": (decoder(head_dim=None, num_attention_heads=None), r"head_dim and num_attention_heads are both missing"),
    "decoder contradicts": (decoder(num_attention_heads=2), r"num_attention_heads 2"),
    "two norms": (key(norm_before_fc=True), r"input_norm\.weight is missing, but norm_before_fc is true"),
    "proposal no list": (key(speculators_config={"proposal_methods": "greedy"}), r"proposal_methods is 'greedy'"),
    "proposal no number": (
        key(speculators_config={"proposal_methods": [{"speculative_tokens": 0}]}),
        r"speculative_tokens is 0; expected an integer of at least 1",
    ),
}


@pytest.mark.parametrize("name", AMAZON)
def test_error_in_an_amazon_head_names_the_culprit(name: str, tmp_path: Path) -> None:
    config, tensors = fixture.amazon(fixture.tiny_head())
    edit, message = AMAZON[name]
    edit(config, tensors)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        formats.read_foreign(fixture.save(tmp_path, config, tensors), formats.ReadOptions(target_config=TARGET))


@pytest.mark.parametrize("name", SPECULATORS)
def test_error_in_a_speculators_head_names_the_culprit(name: str, tmp_path: Path) -> None:
    config, tensors = fixture.speculators(fixture.tiny_head())
    edit, message = SPECULATORS[name]
    edit(config, tensors)
    with pytest.raises(FormatError, match=f"(?s){message}"):
        PEagleDrafterModel.from_pretrained(fixture.save(tmp_path, config, tensors))


def test_speculators_eagle3_without_norm_before_residual_is_refused(tmp_path: Path) -> None:
    config, tensors = fixture.speculators(fixture.tiny_eagle3())
    config.pop("norm_before_residual")
    with pytest.raises(FormatError, match="norm_before_residual is missing"):
        formats.read_foreign(fixture.save(tmp_path, config, tensors))


def test_specforge_needs_the_mask_id_it_does_not_save(tmp_path: Path) -> None:
    folder = fixture.save(tmp_path, *fixture.specforge(fixture.tiny_head()))
    with pytest.raises(FormatError, match="mask_token_id="):
        PEagleDrafterModel.from_pretrained(folder, target_config=TARGET)


def test_missing_target_facts_name_the_keyword(tmp_path: Path) -> None:
    head = fixture.tiny_head(target_layer_ids=[1, 2, 3, 4, 5])
    config, tensors = fixture.amazon(head)
    folder = fixture.save(tmp_path / "five", config, tensors)
    with pytest.raises(FormatError, match=r"target_hidden_size is unknown: fc\.weight takes 160.*target_config="):
        formats.read_foreign(folder)
    with pytest.raises(FormatError, match=r"fc\.weight reads 5 streams.*target_layer_ids="):
        formats.read_foreign(folder, formats.ReadOptions(target_config=TARGET))
    folder = fixture.save(tmp_path / "three", *fixture.amazon(fixture.tiny_head()))
    with pytest.raises(FormatError, match=r"needs the target's number of layers.*target_config="):
        formats.read_foreign(folder)
    with pytest.raises(TypeError, match="target_config="):
        formats.read_foreign(folder, formats.ReadOptions(target_config=12))


def test_narrow_eagle3_head_cannot_borrow_the_targets_table(tmp_path: Path) -> None:
    head = fixture.tiny_eagle3(share_embeddings=False, target_hidden_size=48)
    config, tensors = fixture.safeailab(head)
    tensors.pop("embed_tokens.weight")
    options = formats.ReadOptions(target_layer_ids=[2, 6, 9])
    with pytest.raises(FormatError, match=r"embed_tokens\.weight is missing.*32 wide.*target 48"):
        formats.read_foreign(fixture.save(tmp_path, config, tensors), options)


def test_other_models_and_damaged_folders_are_no_heads(tmp_path: Path) -> None:
    folder = fixture.save(tmp_path / "llama", {"model_type": "llama"}, {"model.norm.weight": torch.ones(4)})
    with pytest.raises(FormatError, match=r"fc\.weight is missing, so this is neither"):
        PEagleDrafterModel.from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(FormatError, match="cannot be read as safetensors"):
        formats.read_foreign(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"no model\.safetensors"):
        formats.read_foreign(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(FormatError, match="expected an object"):
        formats.read_foreign(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json does not exist"):
        formats.read_foreign(folder)
    folder = fixture.save(tmp_path / "head", *fixture.amazon(fixture.tiny_head()))
    with pytest.raises(FormatError, match="checkpoint_format 'gguf'"):
        formats.read_foreign(folder, formats.ReadOptions(checkpoint_format="gguf"))


def test_remote_code_copy_without_the_package_reads_its_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fixture.tiny_head().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "hf_peagle.formats", None)  # importing it raises ImportError
    assert PEagleDrafterModel.from_pretrained(tmp_path).config.mask_token_id == fixture.MASK
