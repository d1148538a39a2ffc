"""Attention over the rows of a training example without a `[rows, rows]` mask.

Two implementations of the same rule (see `rows.py`): blocks of queries with only the keys that they can reach, for any
device, and flex attention's compiled mask for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rows import Rows, may_attend

BLOCK_ATTENTION = "peagle_blocks"


@dataclass
class QueryBlock:
    """
    Consecutive rows `[start, stop)` of one document. They attend to the first `context` depth-0 rows of the document and
    to rows of the block itself; `mask` is `[stop - start, context + stop - start]` bool.
    """

    start: int
    stop: int
    context: int
    mask: torch.Tensor


@dataclass
class BlockPlan:
    """
    What `block_attention` takes as its mask.

    Attributes:
        depth0 (`torch.Tensor`): int64 row numbers of the depth-0 rows.
        documents (`list`): per document, (number of its depth-0 rows, its query blocks).
    """

    depth0: torch.Tensor
    documents: list[tuple[int, list[QueryBlock]]]


def plan_blocks(rows: Rows, block_size: int = 256) -> BlockPlan:
    """Cuts the rows of each document into blocks of about `block_size` rows that never split a rollout."""
    depth0 = torch.nonzero(rows.depth == 0).view(-1)
    _, sizes = torch.unique_consecutive(rows.document, return_counts=True)
    documents = []
    begin = 0
    for size in sizes.tolist():
        stop = begin + size
        starts = depth0[(depth0 >= begin) & (depth0 < stop)]
        blocks: list[QueryBlock] = []
        start = begin
        while start < stop:
            later = int(torch.searchsorted(starts, start + block_size))
            end = int(starts[later]) if later < starts.numel() else stop
            context = later
            # Depth-0 rows of the block are in the context already: among the block's own rows only mask slots count.
            own = rows.select(torch.arange(start, end, device=depth0.device))
            before = rows.select(starts[:context])
            own_mask = may_attend(own, own) & (own.depth > 0)[None]
            blocks.append(QueryBlock(start, end, context, torch.cat([may_attend(own, before), own_mask], dim=1)))
            start = end
        documents.append((starts.numel(), blocks))
        begin = stop
    return BlockPlan(depth0, documents)


def block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    transformers' attention interface: `query` `[1, heads, rows, head_dim]`, `key` and `value` with their own number of
    heads, `attention_mask` a `BlockPlan`. Returns `[1, rows, heads, head_dim]`. Memory grows with rows x block size.
    """
    if not isinstance(attention_mask, BlockPlan) or query.shape[0] != 1:
        raise ValueError(
            f"{BLOCK_ATTENTION} takes one packed example and a BlockPlan (plan_blocks(rows)), got batch "
            f"{query.shape[0]} and {type(attention_mask).__name__}."
        )
    _, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    value = value.to(query.dtype)
    key = key.to(query.dtype)
    counts = [count for count, _ in attention_mask.documents]
    context_keys = key.index_select(2, attention_mask.depth0).split(counts, dim=2)
    context_values = value.index_select(2, attention_mask.depth0).split(counts, dim=2)
    blocks = [block for _, of_document in attention_mask.documents for block in of_document]
    sizes = [block.stop - block.start for block in blocks]
    queries, keys, values = (part.split(sizes, dim=2) for part in (query, key, value))
    outputs, number = [], 0
    for (_, of_document), before_k, before_v in zip(attention_mask.documents, context_keys, context_values, strict=True):
        for block in of_document:
            k = torch.cat([before_k[:, :, : block.context], keys[number]], dim=2)
            v = torch.cat([before_v[:, :, : block.context], values[number]], dim=2)
            # Query heads that share a key head are stacked as further rows: keys are not copied per query head.
            q = queries[number].reshape(1, kv_heads, groups * sizes[number], head_dim)
            mask = block.mask.repeat(groups, 1)[None, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
            outputs.append(out.reshape(1, heads, sizes[number], head_dim))
            number += 1
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def flex_mask(rows: Rows) -> Any:
    """The rule as a flex-attention `BlockMask`, for GPUs (`_attn_implementation="flex_attention"`)."""
    from torch.nn.attention.flex_attention import create_block_mask

    anchor, depth, document = rows.anchor, rows.depth, rows.document

    def rule(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        context = (depth[k] == 0) & (anchor[k] <= anchor[q])
        rollout = (anchor[k] == anchor[q]) & (depth[k] <= depth[q])
        return (document[q] == document[k]) & (context | rollout)

    return create_block_mask(rule, 1, 1, len(rows), len(rows), device=str(anchor.device))


ALL_ATTENTION_FUNCTIONS.register(BLOCK_ATTENTION, block_attention)
