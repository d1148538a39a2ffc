"""A P-EAGLE head as a `CandidateGenerator` of transformers' own assisted decoding loop (batch 1)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .compatibility import check_fit
from .features import states_request
from .modeling_peagle import PEagleDrafterModel


class PEagleCandidateGenerator(CandidateGenerator):
    """
    Drafts greedily from the target's outputs that the native loop hands over. The native loop's limits stay (batch 1, no
    exact stopping inside a draft); [`peagle_decode`] has none of them. This one is its cross-check.

    ```python
    generator = PEagleCandidateGenerator(head, target, num_tokens=4, max_length=200)
    target._get_candidate_generator = lambda **kwargs: generator
    ```
    """

    requires_model_outputs = True

    def __init__(self, head: PEagleDrafterModel, target: PreTrainedModel, num_tokens: int, max_length: int) -> None:
        """`max_length`: total length at which generation ends; drafts are cut so that they fit."""
        check_fit(target, head)
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: give the number of tokens to draft per round.")
        self.head = head
        self.num_tokens = num_tokens
        self.max_length = max_length
        self.model_kwargs_overrides = {"output_hidden_states": states_request(head.config.target_layer_ids)}
        self._borrowed = head.borrow(target)
        self._cache = head.new_cache(1)
        self.drafts: list[list[int]] = []

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`input_ids` `[1, n]` followed by drafts. No logits are returned: greedy drafts are verified by equality."""
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        states = [model_outputs.hidden_states[i] for i in self.head.config.target_layer_ids]
        features = torch.cat([state.to(self.head.device) for state in states], dim=-1)
        first = int(self._cache.lengths[0]) == 0
        features = features if first else features[:, : n_last_matches + 1]
        n = features.shape[1]
        length = min(self.num_tokens, self.max_length - input_ids.shape[1] - 1)
        tokens = input_ids[:, -n:].to(self.head.device)
        out = self.head.draft(tokens, features, torch.tensor([n], device=self.head.device), max(1, length), self._cache, self._borrowed)
        if length < 1:
            return input_ids, None
        self.drafts.append(out.tokens[0].tolist())
        return torch.cat([input_ids, out.tokens.to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The draft length is constant."""
