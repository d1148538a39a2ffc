"""
Which drafted tokens the target accepts: pure functions over logits, and logits processors over several positions.

Sampling follows speculative sampling (arXiv 2211.17192): a draft `d` drawn from `q` is accepted with probability
`min(1, p(d) / q(d))`; the first rejected position is drawn from `max(p - q, 0)` renormalised. A greedy draft was drawn
from a one-hot `q`, so it is accepted with probability `p(d)` and the rejection draws from `p` without `d`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

# Processors of transformers that look at the scores only. They treat every row alike, so all positions of all rows can
# pass through them at once.
_SCORES_ONLY = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
}
# Processors of transformers that depend on the row's own prefix and keep no state between calls.
_PREFIX_ONLY = {
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
}


def _types(names: set[str]) -> set[type]:
    return {getattr(logits_process, name) for name in names if hasattr(logits_process, name)}


SCORES_ONLY_PROCESSORS = _types(_SCORES_ONLY)
PREFIX_ONLY_PROCESSORS = _types(_PREFIX_ONLY)


def is_position_independent(processors: LogitsProcessorList) -> bool:
    """Whether all positions can be processed ahead. False for processors we do not know: they may keep state."""
    known = SCORES_ONLY_PROCESSORS | PREFIX_ONLY_PROCESSORS
    return all(type(processor) in known for processor in processors)


def score_warpers(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that shape a distribution by its scores alone, to warp the drafter's own the same way."""
    skip = logits_process.SuppressTokensLogitsProcessor  # speaks of target ids, not of draft ids
    return LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY_PROCESSORS and type(p) is not skip)


def process_block(processors: LogitsProcessorList, sequences: torch.Tensor, lengths: list[int], logits: torch.Tensor) -> torch.Tensor:
    """
    Applies position-independent processors at every verified position with that position's own prefix.

    Args:
        sequences (`torch.Tensor`): `[batch, columns]` int64, committed tokens of every row followed by its drafts.
        lengths (`list[int]`): committed tokens per row, so row `b` at position `i` has prefix `[:lengths[b] + i]`.
        logits (`torch.Tensor`): `[batch, q, vocab]` float32.

    Returns:
        `torch.Tensor`: `[batch, q, vocab]` scores.
    """
    batch, q, vocab = logits.shape
    scores = logits
    for processor in processors:
        if type(processor) in SCORES_ONLY_PROCESSORS:
            flat = scores.reshape(batch * q, vocab)
            scores = processor(sequences[:1, :1].expand(batch * q, 1), flat).view(batch, q, vocab)
        else:
            scores = _process_by_prefix(processor, sequences, lengths, scores)
    return scores


def _process_by_prefix(processor: LogitsProcessor, sequences: torch.Tensor, lengths: list[int], scores: torch.Tensor) -> torch.Tensor:
    """
    One call per prefix length, each with the whole batch cut to that length, as in plain decoding: some processors know
    things about every row (its padding, its encoder prompt). Only rows that need this length take the result.
    """
    q = scores.shape[1]
    processed = torch.empty_like(scores)
    for end in range(min(lengths), max(lengths) + q):
        places = [min(max(end - length, 0), q - 1) for length in lengths]
        needed = [b for b, length in enumerate(lengths) if 0 <= end - length < q]
        if not needed:
            continue
        rows = torch.stack([scores[b, i] for b, i in enumerate(places)])
        rows = processor(sequences[:, :end], rows)
        for b in needed:
            processed[b, places[b]] = rows[b]
    return processed


@dataclass
class Drafts:
    """
    Args:
        tokens (`torch.Tensor`): `[batch, K]` int64, ids of the target's vocabulary. K may be 0.
        probabilities (`torch.Tensor`, *optional*): `[batch, K, draft_vocab]` the tokens were drawn from; `None`: greedy.
        columns (`torch.Tensor`, *optional*): `[batch, K]` int64, the drafts' columns in `probabilities`.
        token_ids (`torch.Tensor`, *optional*): `[draft_vocab]` target id of every column of `probabilities`.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """K."""
        return self.tokens.shape[1]

    def at(self, position: int) -> Drafts:
        """The draft at one position alone; none beyond the last."""
        here = slice(position, position + 1)
        if self.probabilities is None or self.columns is None:
            return Drafts(self.tokens[:, here])
        return Drafts(self.tokens[:, here], self.probabilities[:, here], self.columns[:, here], self.token_ids)

    def full_row(self, position: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`q` over the target's vocabulary (`[batch, vocab]`) at `position` (`[batch]`); zero where it equals K."""
        row = torch.zeros_like(like)
        if self.length == 0:
            return row
        inside = (position < self.length)[:, None]
        at = position.clamp(max=self.length - 1)
        if self.probabilities is None:
            return row.scatter_(1, self.tokens.gather(1, at[:, None]), inside.to(row.dtype))
        assert self.token_ids is not None
        picked = self.probabilities.gather(1, at[:, None, None].expand(-1, 1, self.probabilities.shape[2]))[:, 0]
        return row.index_add_(1, self.token_ids, picked.to(row.dtype) * inside)

    def chosen_probabilities(self) -> torch.Tensor | float:
        """`q(d)` of every draft, `[batch, K]`, or 1.0 for greedy drafts."""
        if self.probabilities is None:
            return 1.0
        assert self.columns is not None
        return self.probabilities.gather(2, self.columns[..., None])[..., 0]


def accept_choices(choices: torch.Tensor, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The longest prefix of the drafts that equals what the target chose, by argmax or by its own sampling.

    For a deterministic draft `d` this is rejection sampling against a one-hot `q`: the target's sample is `d` with
    probability `p(d)`, and given that it is not, it is distributed as `p` without `d`.

    Args:
        choices (`torch.Tensor`): `[batch, K + 1]` int64, the target's token at every verified position.

    Returns:
        accepted `[batch]` int64 and tokens `[batch, K + 1]`, of which the first `accepted[b] + 1` are committed.
    """
    return (choices[:, :-1] == drafts.tokens).long().cumprod(dim=1).sum(dim=1), choices


def accept_sampled(scores: torch.Tensor, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Speculative sampling against the distribution the drafts were drawn from.

    Args:
        scores (`torch.Tensor`): `[batch, K + 1, vocab]` processed scores of the target.

    Returns:
        as `accept_choices`, with tokens distributed exactly as the target's own samples.
    """
    probabilities = scores.softmax(dim=-1)
    batch = scores.shape[0]
    target_chosen = probabilities[:, :-1].gather(2, drafts.tokens[..., None])[..., 0]
    draws = torch.rand(target_chosen.shape, device=scores.device, dtype=probabilities.dtype)
    accepted = (draws * drafts.chosen_probabilities() < target_chosen).long().cumprod(dim=1).sum(dim=1)
    row = probabilities.gather(1, accepted[:, None, None].expand(batch, 1, scores.shape[2]))[:, 0]
    residual = (row - drafts.full_row(accepted, row)).clamp(min=0)
    # Where p <= q everywhere but for rounding there is no residual; the rejection then had probability ~0.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, row)
    own = torch.multinomial(residual, num_samples=1)
    padded = torch.cat([drafts.tokens, own], dim=1)
    position = torch.arange(padded.shape[1], device=scores.device)
    return accepted, torch.where(position < accepted[:, None], padded, own)
