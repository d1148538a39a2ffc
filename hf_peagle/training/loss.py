"""The drafting loss in chunks: `[rows, vocabulary]` never exists as a whole, forward or backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOSS_KINDS = ("kl", "ce")


@dataclass
class Teacher:
    """
    What the target says at each position of a pack of `T` tokens.

    Attributes:
        hidden (`torch.Tensor`): `[T, target_hidden]`, the target's last hidden state (after the final norm).
        weight (`torch.Tensor`): `[draft_vocab, target_hidden]`, the target's output rows of the draft vocabulary.
        log_normaliser (`torch.Tensor`, *optional*): `[T]` fp32, log-sum-exp over the target's *full* vocabulary. With
            it, a row counts by the target's probability of the draft vocabulary: what lies outside cannot be drafted.
            Without it the distribution is renormalised over the draft vocabulary.
        tokens (`torch.Tensor`): `[T]` int64, the draft id of the token that follows each position; -1 outside.
        bias (`torch.Tensor`, *optional*): `[draft_vocab]`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    tokens: torch.Tensor
    log_normaliser: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def draft_loss(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    teacher: Teacher,
    label: torch.Tensor,
    weight: torch.Tensor,
    kind: str = "kl",
    chunk_rows: int = 1024,
    ce_share: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted sum of the row losses.

    Args:
        hidden (`torch.Tensor`): `[R, hidden]`, drafter states after its final norm.
        lm_head (`torch.Tensor`): `[draft_vocab, hidden]`; gets a gradient if it requires one.
        teacher (`Teacher`): the target's side.
        label (`torch.Tensor`): `[R]` int64, position in the pack whose target output the row should give.
        weight (`torch.Tensor`): `[R]` fp32. Rows at 0 cost nothing.
        kind (`str`): `"kl"`: KL(target || draft) over the draft vocabulary. `"ce"`: cross-entropy with the next token;
            tokens outside the draft vocabulary are skipped.
        chunk_rows (`int`): about how many rows are expanded to the vocabulary at once.
        ce_share (`float`): with `"kl"`, the share in [0, 1] of the label's probability that is moved to the next token.

    Returns:
        `tuple`: the weighted sum (scalar, differentiable), and `[R]` fp32 unweighted losses without a gradient.
    """
    if kind not in LOSS_KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {LOSS_KINDS}")
    return _ChunkedLoss.apply(hidden, lm_head, teacher, label, weight, 1.0 if kind == "ce" else ce_share, chunk_rows)


def _chunks(label: torch.Tensor, chunk_rows: int) -> list[tuple[int, int]]:
    """Bounds of runs of about `chunk_rows` of the sorted labels; equal labels stay together while they fit."""
    bounds, begin, total = [], 0, label.numel()
    values = label.tolist()
    while begin < total:
        stop = min(begin + chunk_rows, total)
        if stop < total:
            shorter = stop
            while shorter > begin + chunk_rows // 2 and values[shorter - 1] == values[stop]:
                shorter -= 1
            stop = shorter
        bounds.append((begin, stop))
        begin = stop
    return bounds


def _targets(teacher: Teacher, positions: torch.Tensor, ce_share: float, dtype: torch.dtype) -> Any:
    """Label distribution `[positions, draft_vocab]`, its log-normalised entropy term and row factor, per position."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = teacher.tokens[positions]
    if ce_share == 1.0:
        probabilities = torch.zeros(positions.numel(), teacher.weight.shape[0], dtype=wide, device=positions.device)
        probabilities.scatter_(1, tokens.clamp(min=0)[:, None], 1.0)
        return probabilities, torch.zeros_like(tokens, dtype=wide), (tokens >= 0).to(wide)
    scores = F.linear(teacher.hidden[positions].to(dtype), teacher.weight.to(dtype), teacher.bias).to(wide)
    inside = torch.logsumexp(scores, dim=-1)
    scores -= inside[:, None]
    probabilities = scores.exp()
    entropy = (probabilities * scores).sum(-1)
    factor = torch.ones_like(inside)
    if teacher.log_normaliser is not None:
        factor = (inside - teacher.log_normaliser[positions].to(wide)).exp().clamp(max=1.0)
    if ce_share > 0.0:
        known = (tokens >= 0).to(wide)[:, None] * ce_share
        probabilities = probabilities * (1.0 - known)
        probabilities.scatter_add_(1, tokens.clamp(min=0)[:, None], known)
    return probabilities, entropy, factor


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients along with the loss, so that no logits are kept or made twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        lm_head: torch.Tensor,
        teacher: Teacher,
        label: torch.Tensor,
        weight: torch.Tensor,
        ce_share: float,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        counted = torch.nonzero(weight > 0).view(-1)
        counted = counted[torch.argsort(label[counted], stable=True)]
        losses = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        grad_head = torch.zeros_like(lm_head, dtype=wide) if needs_head else None
        matrix = lm_head.to(dtype)
        with torch.autocast(device, enabled=False):
            for begin, stop in _chunks(label[counted], chunk_rows):
                index = counted[begin:stop]
                positions, inverse = torch.unique_consecutive(label[index], return_inverse=True)
                probabilities, entropy, factor = _targets(teacher, positions, ce_share, dtype)
                states = hidden[index].to(dtype)
                scores = F.linear(states, matrix).to(wide)
                log_q = torch.log_softmax(scores, dim=-1)
                wanted = probabilities[inverse]
                row_loss = entropy[inverse] - (wanted * log_q).sum(-1)
                scale = weight[index].to(wide) * factor[inverse]
                losses[index] = row_loss
                total += (row_loss * scale).sum()
                if grad_hidden is None and grad_head is None:
                    continue
                grad = log_q.exp_().sub_(wanted).mul_(scale[:, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[index] = (grad @ matrix).to(wide)
                if grad_head is not None:
                    grad_head += grad.t() @ states
        ctx.save_for_backward(*(g for g in (grad_hidden, grad_head) if g is not None))
        ctx.needs = (needs_hidden, needs_head)
        ctx.dtypes = (hidden.dtype, lm_head.dtype)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, grad_losses: torch.Tensor) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        grads = [(saved.pop(0) * grad_total).to(dtype) if needed else None for needed, dtype in zip(ctx.needs, ctx.dtypes, strict=True)]
        return grads[0], grads[1], None, None, None, None, None
