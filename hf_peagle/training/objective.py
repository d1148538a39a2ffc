"""The training objective as a module, so that one forward call is what DDP or FSDP wraps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_peagle.modeling_peagle import PEagleDrafterModel, TargetWeights

from .attention import BLOCK_ATTENTION, flex_mask, plan_blocks
from .batches import Example
from .config import TrainingConfig
from .loss import Teacher, draft_loss
from .rows import Rows


def use_row_attention(head: PEagleDrafterModel, device: torch.device) -> None:
    """Makes the head's attention take rows: flex attention on GPUs, blocks elsewhere."""
    head.config._attn_implementation = "flex_attention" if device.type == "cuda" else BLOCK_ATTENTION


def attention_plan(head: PEagleDrafterModel, rows: Rows, block_size: int) -> Any:
    """What the head's configured attention takes as its mask for `rows`."""
    implementation = head.config._attn_implementation
    if implementation == BLOCK_ATTENTION:
        return plan_blocks(rows, block_size)
    if implementation == "flex_attention":
        return flex_mask(rows)
    return rows.attention_mask()


class DraftObjective(nn.Module):
    """
    Weighted sum of the row losses of a packed example.

    Args:
        head (`PEagleDrafterModel`): the head in training.
        borrowed (`TargetWeights`): what it shares with the target; gets no gradient.
        teacher_weight (`torch.Tensor`): `[draft_vocab, target_hidden]`, the target's output rows.
        config (`TrainingConfig`): loss options.
    """

    def __init__(
        self,
        head: PEagleDrafterModel,
        borrowed: TargetWeights,
        teacher_weight: torch.Tensor,
        config: TrainingConfig,
        teacher_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.config = config
        # Not registered: neither trained nor saved nor sharded with the head.
        self._target = (borrowed, teacher_weight, teacher_bias)

    @property
    def borrowed(self) -> TargetWeights:
        """What the head shares with the target."""
        return self._target[0]

    def states(self, example: Example, rows: Rows) -> torch.Tensor:
        """`[R, hidden]` drafter states of the rows, after the final norm."""
        output = self.head(
            example.input_ids[None],
            example.outputs.streams[None],
            row_index=rows.row_index[None],
            position_ids=rows.position[None],
            attention_mask=attention_plan(self.head, rows, self.config.attention_block),
            borrowed=self.borrowed,
            compute_logits=False,
        )
        return output.last_hidden_state[0]

    def output_weight(self) -> torch.Tensor:
        """`[draft_vocab, hidden]`: the matrix that makes logits of states."""
        if self.borrowed.lm_head is not None:
            return self.borrowed.lm_head
        return self.head.lm_head.weight

    def forward(self, example: Example, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (scalar) over `rows`, all or a segment of the example's, and `[R]` row losses."""
        _, weight, bias = self._target
        teacher = Teacher(
            example.outputs.last_hidden,
            weight,
            example.next_tokens,
            example.outputs.log_normaliser if self.config.weigh_by_coverage else None,
            bias,
        )
        config = self.config
        return draft_loss(
            self.states(example, rows),
            self.output_weight(),
            teacher,
            rows.label,
            rows.weight,
            config.loss,
            config.loss_chunk,
            config.ce_share,
        )
