"""Every foreign format drafts exactly as the same weights in this library's own format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_peagle import PEagleDrafterModel, formats
from hf_peagle.formats import FormatError

from .support import foreign_heads as fixture
from .support.golden import golden_files, load_golden

TARGET = LlamaConfig(vocab_size=fixture.VOCAB, hidden_size=fixture.WIDTH, num_hidden_layers=fixture.TARGET_LAYERS, num_attention_heads=4)

PEAGLE_CASES: dict[str, tuple[Callable, dict[str, Any], dict[str, Any]]] = {
    "vllm": (fixture.amazon, {"num_hidden_layers": 4}, {"target_config": TARGET}),
    "vllm-full-vocabulary": (fixture.amazon, {"draft_vocab_size": fixture.VOCAB}, {"target_config": TARGET}),
    "specforge": (fixture.specforge, {"num_hidden_layers": 4}, {"target_config": TARGET, "mask_token_id": fixture.MASK}),
    "nemo": (fixture.nemo, {}, {"target_config": TARGET}),
    "speculators": (fixture.speculators, {}, {}),
    "speculators-full-vocabulary": (fixture.speculators, {"draft_vocab_size": fixture.VOCAB}, {}),
    "speculators-qwen3-fc_norm": (fixture.speculators, {"layer_family": "qwen3", "fc_norm": True}, {}),
    "speculators-norm_before_fc": (fixture.speculators, {"norm_before_fc": True, "norm_before_residual": True}, {}),
    "speculators-bias": (fixture.speculators, {"attention_bias": True}, {}),
    "speculators-five-streams": (fixture.speculators, {"target_layer_ids": [2, 4, 6, 8, 9]}, {}),
}
EAGLE3_CASES: dict[str, tuple[Callable, dict[str, Any], dict[str, Any]]] = {
    "eagle3-safeailab": (fixture.safeailab, {}, {"target_config": TARGET}),
    "eagle3-specforge": (fixture.specforge_eagle3, {"fc_norm": True, "norm_output": True}, {}),
    "eagle3-specforge-borrowed-head": (
        fixture.specforge_eagle3,
        {"share_lm_head": True, "target_layer_ids": [3, 5, 10]},
        {},
    ),
    "eagle3-angelslim": (fixture.angelslim, {"share_embeddings": False}, {"target_config": TARGET}),
    "eagle3-speculators": (fixture.speculators, {"share_embeddings": False, "norm_before_residual": True}, {}),
}


@pytest.mark.parametrize("name", [*PEAGLE_CASES, *EAGLE3_CASES])
def test_foreign_checkpoint_drafts_as_the_same_weights_in_our_format(name: str, tmp_path: Path) -> None:
    build, overrides, options = (PEAGLE_CASES | EAGLE3_CASES)[name]
    head = fixture.tiny_head(**overrides) if name in PEAGLE_CASES else fixture.tiny_eagle3(**overrides)
    folder = fixture.save(tmp_path / "foreign", *build(head))
    kind = formats.read_foreign(folder, formats.ReadOptions(**options)).checkpoint_format
    assert name == kind or name.startswith(kind + "-")

    head.save_pretrained(tmp_path / "own")
    own = PEagleDrafterModel.from_pretrained(tmp_path / "own")
    foreign = PEagleDrafterModel.from_pretrained(folder, **options)
    assert foreign.dtype == own.dtype == torch.bfloat16
    for key, tensor in own.state_dict().items():
        assert torch.equal(tensor, foreign.state_dict()[key]), key
    assert foreign.state_dict().keys() == own.state_dict().keys()
    assert foreign.config.target_layer_ids == own.config.target_layer_ids
    assert foreign.config.algorithm == own.config.algorithm
    for theirs, ours in zip(fixture.drafts(foreign), fixture.drafts(own), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("path", golden_files(), ids=lambda path: path.stem)
def test_golden_weights_as_a_speculators_folder_give_the_golden_logits(path: Path, tmp_path: Path) -> None:
    head, tensors, meta = load_golden(path)
    config, _ = fixture.speculators(head)
    weights = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}
    folder = fixture.save(tmp_path, config, weights)
    loaded = PEagleDrafterModel.from_pretrained(folder).eval()
    slots = tensors["in.tokens"].shape[1]
    out = loaded.draft(tensors["in.tokens"], tensors["in.features"], torch.tensor([slots]), int(meta["K"]), loaded.new_cache(1))
    torch.testing.assert_close(out.logits[0], tensors["out.logits"], atol=1e-5, rtol=1e-5)


def test_dtype_argument_converts_and_default_keeps_the_files(tmp_path: Path) -> None:
    folder = fixture.save(tmp_path, *fixture.speculators(fixture.tiny_head()))
    assert PEagleDrafterModel.from_pretrained(folder).dtype == torch.bfloat16
    head = PEagleDrafterModel.from_pretrained(folder, dtype=torch.float32)
    assert head.dtype == torch.float32
    assert head.d2t.dtype == torch.int64
    assert PEagleDrafterModel.from_pretrained(folder, device_map="cpu").device.type == "cpu"
    assert head.config._name_or_path == str(folder)


def test_mixed_dtypes_are_held_in_the_widest(tmp_path: Path) -> None:
    config, tensors = fixture.speculators(fixture.tiny_head())
    tensors["norm.weight"] = tensors["norm.weight"].float() + 1e-6
    head = PEagleDrafterModel.from_pretrained(fixture.save(tmp_path, config, tensors))
    assert head.dtype == torch.float32
    assert torch.equal(head.norm.weight, tensors["norm.weight"])


def test_wrong_layer_count_in_the_config_is_overruled_by_the_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors = fixture.safeailab(fixture.tiny_eagle3())
    folder = fixture.save(tmp_path, config | {"num_hidden_layers": 36}, tensors)
    head = PEagleDrafterModel.from_pretrained(folder, target_config=TARGET)
    assert head.config.num_hidden_layers == 1
    assert "num_hidden_layers 36" in caplog.text


def test_layer_ids_top_level_is_entering_and_nested_is_outputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors = fixture.amazon(fixture.tiny_head())
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 10]}}
    cases = [
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 11]}, [2, 3, 11]),
        (nested, [2, 3, 11]),
        (nested | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, [2, 4, 9]),
    ]
    for i, (extra, expected) in enumerate(cases):
        folder = fixture.save(tmp_path / str(i), config | extra, tensors)
        assert formats.read_foreign(folder).config.target_layer_ids == expected
    assert "name different streams" in caplog.text
    given = formats.ReadOptions(target_layer_ids=[1, 3, 5])
    assert formats.read_foreign(folder, given).config.target_layer_ids == [1, 3, 5]


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"ptd_token_id": 50}, 50),
        ({"ptd_token_id": "50"}, 50),
        ({"ptd_token_id": 50, "pard_token": 51}, 51),
        ({"pard_token": 51, "dspark_noise_token_id": 52}, 52),
        ({"dspark_noise_token_id": 52, "mask_token_id": 53}, 53),
        ({"mask_token_id": 53, "dflash_config": {"mask_token_id": 54}}, 54),
    ],
)
def test_mask_id_is_looked_up_in_vllms_order(keys: dict[str, Any], expected: int, tmp_path: Path) -> None:
    config, tensors = fixture.amazon(fixture.tiny_head())
    config.pop("ptd_token_id")
    folder = fixture.save(tmp_path, config | keys, tensors)
    read = formats.read_foreign(folder, formats.ReadOptions(target_config=TARGET))
    assert read.config.mask_token_id == expected
    over = formats.ReadOptions(target_config=TARGET, mask_token_id=7)
    assert formats.read_foreign(folder, over).config.mask_token_id == 7


def test_rope_notations_agree_and_specforge_uses_theta_only(tmp_path: Path) -> None:
    config, tensors = fixture.amazon(fixture.tiny_head())
    expected = fixture.LLAMA3 | {"rope_theta": 50000.0}
    old = config | {"rope_scaling": fixture.LLAMA3, "rope_theta": 50000.0}
    legacy = {key: value for key, value in fixture.LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    new = {key: value for key, value in config.items() if not key.startswith("rope")} | {"rope_parameters": expected}
    options = formats.ReadOptions(target_config=TARGET, mask_token_id=fixture.MASK)
    for i, given in enumerate((old, old | {"rope_scaling": legacy}, new)):
        read = formats.read_foreign(fixture.save(tmp_path / str(i), given, tensors), options)
        assert read.config.rope_parameters == expected
    config, tensors = fixture.specforge(fixture.tiny_head())
    folder = fixture.save(tmp_path / "specforge", config | {"rope_scaling": fixture.LLAMA3}, tensors)
    assert formats.read_foreign(folder, options).config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}


def test_d2t_of_absolute_ids_is_converted_where_t2d_proves_it(tmp_path: Path) -> None:
    head = fixture.tiny_head()
    config, tensors = fixture.speculators(head)
    tensors["d2t"] = head.draft_token_ids.clone()
    read = formats.read_foreign(fixture.save(tmp_path, config, tensors))
    assert torch.equal(read.tensors["d2t"], head.d2t)


def test_t2d_is_derived_where_it_is_absent(tmp_path: Path) -> None:
    head = fixture.tiny_head()
    config, tensors = fixture.speculators(head)
    tensors.pop("t2d")
    read = formats.read_foreign(fixture.save(tmp_path, config, tensors))
    assert torch.equal(read.tensors["t2d"], head.t2d)


def test_target_is_looked_up_where_the_checkpoint_names_it(tmp_path: Path) -> None:
    TARGET.save_pretrained(tmp_path / "target")
    config, tensors = fixture.amazon(fixture.tiny_head())
    folder = fixture.save(tmp_path / "head", config, tensors)
    (folder / "README.md").write_text(f"---\nlicense: mit\nbase_model: {tmp_path / 'target'}\n---\n# A head\n")
    assert formats.read_foreign(folder).config.target_layer_ids == fixture.ENTERING
    config, tensors = fixture.speculators(fixture.tiny_head())
    config["eagle_aux_hidden_state_layer_ids"] = None
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
    folder = fixture.save(tmp_path / "speculators", config, tensors)
    read = formats.read_foreign(folder).config
    assert read.target_layer_ids == fixture.ENTERING
    assert read.draft_length == 5
    assert read.target_num_hidden_layers == fixture.TARGET_LAYERS


def test_bin_files_are_refused_unless_asked_for_and_never_run_code(tmp_path: Path) -> None:
    head = fixture.tiny_eagle3()
    config, tensors = fixture.safeailab(head)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="allow_bin=True"):
        PEagleDrafterModel.from_pretrained(tmp_path, target_config=TARGET)
    loaded = PEagleDrafterModel.from_pretrained(tmp_path, target_config=TARGET, allow_bin=True)
    assert torch.equal(loaded.fc.weight, head.fc.weight)
    torch.save({"fc.weight": Path("code")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="refused"):
        PEagleDrafterModel.from_pretrained(tmp_path, target_config=TARGET, allow_bin=True)


def test_sharded_files_are_read_through_their_index(tmp_path: Path) -> None:
    head = fixture.tiny_head()
    config, tensors = fixture.speculators(head)
    fixture.save(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        fixture.save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(PEagleDrafterModel.from_pretrained(tmp_path).fc.weight, head.fc.weight)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        PEagleDrafterModel.from_pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}}))
    with pytest.raises(FormatError, match="file names of this folder"):
        PEagleDrafterModel.from_pretrained(tmp_path)


def test_hub_repository_is_downloaded_with_only_the_needed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fixture.save(tmp_path, *fixture.speculators(fixture.tiny_head()))
    seen: dict[str, Any] = {}

    def download(repo_id: str, filename: str, **kwargs: Any) -> str:
        seen["file"] = (repo_id, filename, kwargs)
        return str(folder / filename)

    def snapshot(repo_id: str, allow_patterns: list[str], **kwargs: Any) -> str:
        seen["snapshot"] = (repo_id, allow_patterns, kwargs)
        return str(folder)

    monkeypatch.setattr(formats, "hf_hub_download", download)
    monkeypatch.setattr(formats, "snapshot_download", snapshot)
    head = PEagleDrafterModel.from_pretrained("org/foreign-head", revision="abc")
    assert head.config._name_or_path == "org/foreign-head"
    assert seen["file"][0] == "org/foreign-head"
    assert seen["snapshot"][2] == {"revision": "abc"}
    assert not any("bin" in pattern or pattern.endswith(".py") for pattern in seen["snapshot"][1])
