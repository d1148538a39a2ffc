"""The network: numbers of an independent implementation, training against inference, saving and loading."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_peagle import PEagleConfig, PEagleDrafterModel
from tests.support.golden import golden_files, load_golden
from tests.support.heads import random_head
from tests.support.targets import tiny_target


@pytest.mark.skipif(not golden_files(), reason="no golden files here (HF_PEAGLE_GOLDEN names their folder)")
@pytest.mark.parametrize("path", golden_files(), ids=lambda p: p.stem)
def test_logits_of_an_independent_implementation(path):
    head, tensors, meta = load_golden(path)
    k, slots = int(meta["K"]), int(meta["P"])
    out = head.draft(tensors["in.tokens"], tensors["in.features"], torch.tensor([slots]), k, head.new_cache(1))
    assert torch.allclose(out.logits[0], tensors["out.logits"], atol=1e-5)


@pytest.mark.parametrize("overrides", [{}, {"layer_family": "qwen3"}, {"fc_norm": False, "norm_before_fc": True}, {"norm_before_residual": True}])
def test_drafting_equals_the_training_forward_on_the_same_anchor(overrides):
    """In one pass, and in pieces whose mask slots must not survive."""
    head = random_head(tiny_target("llama"), share_embeddings=False, **overrides)
    slots, k = 9, 6
    tokens, features = torch.randint(3, 90, (1, slots)), torch.randn(1, slots, head.config.feature_size)
    rows = torch.cat([torch.arange(slots), torch.full((k - 1,), -1)])[None]
    with torch.no_grad():
        expected = head(tokens, features, row_index=rows).logits[:, -k:]
    cache = head.new_cache(1)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        out = head.draft(tokens[:, begin:end], features[:, begin:end], torch.tensor([end - begin]), k, cache)
    assert torch.allclose(out.logits, expected, atol=1e-5)


def test_rows_of_a_batch_draft_as_alone():
    head = random_head(tiny_target("llama"), share_embeddings=False)
    tokens, features = torch.randint(3, 90, (3, 7)), torch.randn(3, 7, head.config.feature_size)
    counts = torch.tensor([7, 2, 5])
    together = head.draft(tokens, features, counts, 4, head.new_cache(3))
    for b, n in enumerate(counts.tolist()):
        alone = head.draft(tokens[b : b + 1, :n], features[b : b + 1, :n], counts[b : b + 1], 4, head.new_cache(1))
        assert torch.allclose(together.logits[b], alone.logits[0], atol=1e-5)


@pytest.mark.parametrize("overrides", [{}, {"share_embeddings": True, "share_lm_head": True, "draft_vocab_size": 40}, {"algorithm": "eagle3"}])
def test_saving_and_loading(tmp_path, overrides):
    head = random_head(tiny_target("qwen3"), **overrides)
    head.save_pretrained(tmp_path)
    again = PEagleDrafterModel.from_pretrained(tmp_path)
    assert again.config.to_dict()["target_layer_ids"] == head.config.target_layer_ids
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert ("embed_tokens.weight" in load_file(tmp_path / "model.safetensors")) is not head.config.share_embeddings


@pytest.mark.parametrize("name", ["mask_hidden", "d2t", "t2d", "fc.weight", "layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    head = random_head(tiny_target("llama"), draft_vocab_size=40)
    head.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        PEagleDrafterModel.from_pretrained(tmp_path)


def test_a_damaged_vocabulary_map_is_refused(tmp_path):
    head = random_head(tiny_target("llama"), draft_vocab_size=40)
    head.d2t[3] += 500
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="d2t"):
        PEagleDrafterModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("draft_vocab_size", 2000),
        ("num_key_value_heads", 3),
        ("layer_family", "mamba"),
        ("draft_sampling", "beam"),
        ("draft_schedule", "sometimes"),
        ("algorithm", "medusa"),
        ("target_layer_ids", [1, 1, 2]),
        ("target_layer_ids", [1, 99]),
        ("mask_token_id", 5000),
        ("head_dim", 7),
        ("rope_parameters", {"rope_type": "spiral"}),
    ],
)
def test_bad_configurations_name_the_field(field, value):
    good = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "target_num_hidden_layers": 8, "mask_token_id": 9}
    PEagleConfig(**good)
    with pytest.raises(ValueError, match=field):
        PEagleConfig(**{**good, field: value})


def test_a_head_of_another_target_is_refused_before_the_prefill(monkeypatch):
    target = tiny_target("llama")
    head = random_head(tiny_target("llama"), target_hidden_size=48, share_embeddings=False)
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="width"):
        target.generate(torch.tensor([[3, 4]]), max_new_tokens=3, assistant_model=head)
