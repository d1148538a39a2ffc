"""Training rows: alignment by a hand-worked example, packing, attention, partition, and the chunked loss."""

from __future__ import annotations

import pytest
import torch

from hf_peagle.training.attention import BLOCK_ATTENTION, plan_blocks
from hf_peagle.training.rows import may_attend, partition, sample_rows
from tests.support.heads import random_head
from tests.support.targets import tiny_target


def test_six_tokens_by_hand():
    """
    Tokens x0..x5, of which x3, x4, x5 are the answer. Row (a, 0) reads x_{a+1} and h_a and is taught x_{a+2}: anchors 1, 2, 3
    count. Row (a, d) is taught x_{a+d+2}: (1,1) -> x4, (2,1) -> x5, (1,2) -> x5.
    """
    answer = torch.tensor([0, 0, 0, 1.0, 1.0, 1.0])
    rows = sample_rows([6], answer, num_depths=3, retention=1.0)
    table = sorted(zip(rows.anchor.tolist(), rows.depth.tolist(), rows.position.tolist(), rows.weight.tolist(), strict=True))
    assert table == [(0, 0, 0, 0.0), (1, 0, 1, 1.0), (1, 1, 2, 1.0), (1, 2, 3, 1.0), (2, 0, 2, 1.0), (2, 1, 3, 1.0), (3, 0, 3, 1.0)]
    # The target output at position j predicts x_{j+1}; row (a, d) is taught x_{a+d+2}.
    assert rows.label.tolist() == (rows.anchor + rows.depth + 1).tolist()
    assert [i for i, d in zip(rows.row_index.tolist(), rows.depth.tolist(), strict=True) if d] == [-1, -1, -1]


@pytest.mark.parametrize("seed", range(5))
def test_packed_documents_do_not_leak(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [7, 12, 5]
    rows = sample_rows(lengths, torch.ones(24), 4, 0.8, generator)
    ends = torch.tensor([7, 19, 24])
    assert (rows.anchor + rows.depth + 2 < ends[rows.document]).all()
    allowed = may_attend(rows, rows)
    assert not allowed[rows.document[:, None] != rows.document[None]].any()
    assert allowed.diagonal().all()


def test_retention_thins_every_depth():
    rows = sample_rows([1000], torch.ones(1000), 5, 0.8, torch.Generator().manual_seed(0))
    counts = torch.bincount(rows.depth).tolist()
    assert counts == pytest.approx([998 * 0.8**d for d in range(5)], abs=1)
    kept = set(zip(rows.anchor.tolist(), rows.depth.tolist(), strict=True))
    assert all((a, d - 1) in kept for a, d in kept if d)


def _gradients(head, ids, features, parts, targets):
    head.zero_grad()
    for rows in parts:
        out = head(
            ids[None],
            features[None],
            row_index=rows.row_index[None],
            position_ids=rows.position[None],
            attention_mask=rows.attention_mask(),
        )
        loss = torch.nn.functional.cross_entropy(out.logits[0], targets[rows.label], reduction="none")
        (loss * rows.weight).sum().backward()
    return [p.grad.clone() for p in head.parameters()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("segments", [2, 3, 5])
def test_gradients_of_segments_sum_to_the_whole_gradient(seed, segments):
    torch.manual_seed(seed)
    head = random_head(tiny_target("llama"), seed, share_embeddings=False).double()
    lengths = [11, 17]
    total = sum(lengths)
    ids, features = torch.randint(3, 90, (total,)), torch.randn(total, head.config.feature_size, dtype=torch.float64)
    targets = torch.randint(0, 97, (total + 1,))
    rows = sample_rows(lengths, (torch.rand(total) < 0.8).float(), 4, 0.8, torch.Generator().manual_seed(seed))
    whole = _gradients(head, ids, features, [rows], targets)
    parts = _gradients(head, ids, features, partition(rows, segments), targets)
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("block", [4, 16, 512])
def test_attention_in_blocks_equals_the_dense_mask(block):
    head = random_head(tiny_target("qwen3"), share_embeddings=False)
    ids, features = torch.randint(3, 90, (30,)), torch.randn(30, head.config.feature_size)
    rows = sample_rows([13, 17], torch.ones(30), 4, 0.8, torch.Generator().manual_seed(1))
    arguments = {"row_index": rows.row_index[None], "position_ids": rows.position[None]}
    with torch.no_grad():
        dense = head(ids[None], features[None], attention_mask=rows.attention_mask(), **arguments).logits
        head.config._attn_implementation = BLOCK_ATTENTION
        blocks = head(ids[None], features[None], attention_mask=plan_blocks(rows, block), **arguments).logits
    assert torch.allclose(dense, blocks, atol=1e-4)
