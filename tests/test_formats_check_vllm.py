"""The checker passes what vLLM reads and names what it could not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_peagle.formats import check_vllm

from .support import foreign_heads as fixture
from .test_formats_errors import add, decoder, drop, key, store, without

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def prefix(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if not name.startswith(("lm_head", "mask_hidden", "d2t", "t2d")):
            tensors[f"model.{name}"] = tensors.pop(name)


FLAT: dict[str, tuple[Edit, str]] = {
    "model prefix": (prefix, r"model\.norm\.weight: vLLM puts `model\.` before every name"),
    "no mask_hidden": (drop("mask_hidden"), r"mask_hidden is missing \(shape \(96,\)\)"),
    "no embedding": (drop("embed_tokens.weight"), r"embed_tokens\.weight is missing"),
    "no d2t": (drop("d2t"), r"d2t is missing"),
    "no layer": (drop("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is missing"),
    "shape": (store("fc.weight", lambda t: t[:, :-1]), r"fc\.weight has shape \(32, 95\), expected \(32, 96\)"),
    "dtype": (store("norm.weight", lambda t: t.double()), r"norm\.weight has dtype F64"),
    "d2t dtype": (store("d2t", lambda t: t.int()), r"d2t has dtype I32"),
    "d2t absolute": (store("d2t", lambda t: torch.arange(40) + t), r"d2t must hold offsets"),
    "q_norm in llama": (add("midlayer.self_attn.q_norm.weight", 8), r"q_norm\.weight has no parameter in vLLM's llama"),
    "bias without flag": (add("layers.1.self_attn.q_proj.bias", 32), r"q_proj\.bias has no parameter"),
    "stray": (add("mask_embedding", 32), r"mask_embedding has no parameter"),
    "twice": (add("layers.0.hidden_norm.weight", 32), r"are the same parameter in vLLM"),
    "no mask id": (without("ptd_token_id"), r"mask token's id is missing"),
    "mask ids differ": (key(pard_token=3), r"mask token's id differs between keys"),
    "mask id outside": (key(ptd_token_id=64), r"ptd_token_id is 64, outside the vocabulary of 64"),
    "architecture": (key(architectures=["PEagleDraftModel"]), r"vLLM would look for Eagle3PEagleDraftModel"),
    "no architecture": (key(architectures=None), r"architectures is None"),
    "model_type": (key(model_type="peagle"), r"model_type is 'peagle'; expected 'llama'"),
    "layer count": (key(num_hidden_layers=3), r"layers\.2\.self_attn\.q_proj\.weight is missing"),
    "too few layers": (key(num_hidden_layers=1), r"layers\.1\.self_attn\.q_proj\.weight has no parameter"),
    "nested ids only": (
        key(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}),
        r"write a top-level eagle_aux_hidden_state_layer_ids \[2, 6, 9\]",
    ),
    "id count": (
        key(eagle_aux_hidden_state_layer_ids=[1, 5], num_aux_hidden_states=3),
        r"\[1, 5\] has not num_aux_hidden_states 3",
    ),
    "rope differs": (
        key(rope_scaling=fixture.LLAMA3, rope_parameters={"rope_type": "default", "rope_theta": 50000.0}),
        r"rope_scaling and rope_parameters differ",
    ),
    "rope unknown": (key(rope_scaling={"rope_type": "spiral"}), r"rope_type 'spiral'"),
    "no width": (without("hidden_size"), r"hidden_size is missing"),
    "aux off": (key(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state is false"),
}
NESTED: dict[str, tuple[Edit, str]] = {
    "eagle3": (key(speculators_model_type="eagle3"), r"speculators_model_type is 'eagle3'"),
    "fc_norm": (key(fc_norm=True), r"fc_norm is true, but vLLM does not pass it on"),
    "no mask id": (without("mask_token_id"), r"mask_token_id is missing"),
    "no decoder": (without("transformer_layer_config"), r"transformer_layer_config is missing"),
    "no proposal": (key(speculators_config={"verifier": {"name_or_path": "x"}}), r"speculative_tokens is missing"),
    "no verifier": (
        key(speculators_config={"proposal_methods": [{"speculative_tokens": 4}], "verifier": {}}),
        r"verifier\.name_or_path is missing",
    ),
    "family": (decoder(model_type="gpt_oss"), r"model_type is 'gpt_oss'"),
    "no mask_hidden": (drop("mask_hidden"), r"mask_hidden is missing"),
}


def test_documented_layouts_pass(tmp_path: Path) -> None:
    for i, (build, head) in enumerate(
        [
            (fixture.amazon, fixture.tiny_head(num_hidden_layers=4)),
            (fixture.amazon, fixture.tiny_head(draft_vocab_size=fixture.VOCAB)),
            (fixture.speculators, fixture.tiny_head(layer_family="qwen3", norm_before_fc=True)),
        ]
    ):
        folder = fixture.save(tmp_path / str(i), *build(head))
        assert check_vllm.check(folder).errors == []


@pytest.mark.parametrize("name", FLAT)
def test_error_in_a_flat_folder_is_named(name: str, tmp_path: Path) -> None:
    config, tensors = fixture.amazon(fixture.tiny_head())
    edit, message = FLAT[name]
    edit(config, tensors)
    errors = check_vllm.check(fixture.save(tmp_path, config, tensors)).errors
    assert any(_matches(message, error) for error in errors), errors


@pytest.mark.parametrize("name", NESTED)
def test_error_in_a_speculators_folder_is_named(name: str, tmp_path: Path) -> None:
    config, tensors = fixture.speculators(fixture.tiny_head())
    edit, message = NESTED[name]
    edit(config, tensors)
    errors = check_vllm.check(fixture.save(tmp_path, config, tensors)).errors
    assert any(_matches(message, error) for error in errors), errors


def test_warnings_do_not_fail_and_missing_files_do(tmp_path: Path) -> None:
    head = fixture.tiny_head(fc_norm=True)
    config, tensors = fixture.amazon(head)
    report = check_vllm.check(fixture.save(tmp_path / "norm", config | {"fc_norm": True}, tensors))
    assert report.passed
    assert any("per-stream norms" in warning for warning in report.warnings)
    assert any("eagle_aux_hidden_state_layer_ids is missing" in warning for warning in report.warnings)
    assert not check_vllm.check(tmp_path / "nowhere").passed
    (tmp_path / "norm" / "model.safetensors").unlink()
    assert "no *.safetensors file" in check_vllm.check(tmp_path / "norm").errors[0]


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None
