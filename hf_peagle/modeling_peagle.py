"""The P-EAGLE drafter network (arXiv 2602.01469): `forward()` for training and tests, `draft()` for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import ModelOutput

from .configuration_peagle import PEagleConfig
from .drafter_cache import DrafterCache
from .integration import PEagleGenerationMixin, install
from .saving import SelfContainedSaving


@dataclass
class PEagleOutput(ModelOutput):
    """
    Args:
        logits (`torch.Tensor`, *optional*): `[batch, rows, draft_vocab_size]`, scores over the draft vocabulary.
        last_hidden_state (`torch.Tensor`): `[batch, rows, hidden_size]`, after the final norm.
    """

    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


@dataclass
class DraftOutput:
    """
    Args:
        tokens (`torch.Tensor`): `[batch, K]` int64, drafted ids in the *target's* vocabulary.
        draft_ids (`torch.Tensor`): `[batch, K]` int64, the same in the draft vocabulary.
        logits (`torch.Tensor`): `[batch, K, draft_vocab_size]`, raw scores of the K rows.
        probabilities (`torch.Tensor`, *optional*): `[batch, K, draft_vocab_size]`, the distribution each token was
            drawn from; `None` for greedy drafts, which count as one-hot.
    """

    tokens: torch.Tensor
    draft_ids: torch.Tensor
    logits: torch.Tensor
    probabilities: torch.Tensor | None = None


@dataclass
class TargetWeights:
    """
    What a head without tables of its own borrows from the target for one call; nothing of it is kept on the head.

    Args:
        embed_tokens (`Callable`, *optional*): ids `[...]` to embeddings `[..., target_hidden_size]`.
        lm_head (`torch.Tensor`, *optional*): `[draft_vocab_size, hidden_size]`.
    """

    embed_tokens: Callable[[torch.Tensor], torch.Tensor] | None = None
    lm_head: torch.Tensor | None = None


_REMEDIES = {
    "mask_hidden": "Without it the mask slots have no input: this is not a P-EAGLE head (an EAGLE-3 head drafts "
    "autoregressively), or the export dropped it.",
    "d2t": "A pruned draft vocabulary needs the map to target ids; export the head again with it.",
    "t2d": "A pruned draft vocabulary needs the map to target ids; export the head again with it.",
    "embed_tokens": "P-EAGLE heads keep their own table unless share_embeddings is true in config.json.",
    "lm_head": "P-EAGLE heads keep their own lm_head unless share_lm_head is true in config.json.",
}


class PEagleAttention(nn.Module):
    """Causal attention with grouped key/value heads; the fusion layer reads twice the width (embedding, feature)."""

    def __init__(self, config: PEagleConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        width = 2 * config.hidden_size if layer_idx == 0 else config.hidden_size
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.attention_bias)
        self.has_head_norms = config.layer_family == "qwen3"
        if self.has_head_norms:
            self.q_norm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        store: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.has_head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if store is not None:
            key, value = store(self.layer_idx, key, value)
        implementation = self.config._attn_implementation
        if implementation == "eager" and isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class PEagleDecoderLayer(nn.Module):
    """Pre-norm decoder layer. Layer 0 fuses: its attention reads (normed embedding, normed feature), in this order."""

    def __init__(self, config: PEagleConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_fusion = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = PEagleAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.is_fusion:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        store: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        residual = hidden_states
        if self.is_fusion:
            normed = self.hidden_norm(hidden_states)
            if self.norm_before_residual:
                residual = normed
            hidden_states = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        else:
            hidden_states = self.input_layernorm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states, position_embeddings, attention_mask, store)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class PEagleDrafterModel(PEagleGenerationMixin, SelfContainedSaving, PreTrainedModel):
    """
    A P-EAGLE head. Pass it to `target.generate(..., assistant_model=head)`.

    Slot `j` is the pair (token `x_{j+1}`, target feature `h_j`) at rotary position `j`; a *mask slot* has the mask
    embedding and the learned `mask_hidden` instead. The row of the last real slot predicts the next token and the mask
    slots behind it the ones after that, all in one causal pass.
    """

    config_class = PEagleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    is_peagle_drafter = True  # the marker generate()'s hook looks for; remote code has another class object
    supports_gradient_checkpointing = False
    _no_split_modules = ["PEagleDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if not config.share_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.algorithm == "peagle":
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.feature_size))
            if config.share_embeddings:
                self.mask_embedding = nn.Parameter(torch.empty(hidden))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(config.feature_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_hidden_states))
        self.fc = nn.Linear(config.feature_size, hidden, bias=False)
        self.layers = nn.ModuleList(PEagleDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        if not config.share_lm_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.has_vocab_map = config.draft_vocab_size < config.vocab_size
        if self.has_vocab_map:
            # Offsets: target id = draft id + d2t[draft id]; t2d marks the target ids that can be drafted.
            # A new head maps to the first ids, until `set_draft_vocabulary` or a checkpoint says otherwise.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.algorithm == "peagle":
            nn.init.normal_(self.mask_hidden)
            if self.config.share_embeddings:
                nn.init.normal_(self.mask_embedding, std=self.config.initializer_range)

    @property
    def device(self) -> torch.device:
        """Where the head lies; a head is always on one device. (transformers' property walks all parameters.)"""
        return self.fc.weight.device

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "lm_head", None)

    # ------------------------------------------------------------------ loading

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        As in transformers, from safetensors only, and strict: a tensor that is missing or misshapen is an error, since
        a head with random parts would load quietly and merely be useless.

        With the package installed, heads of other projects are read too (docs/formats.md). Such checkpoints may need
        `target_config` (config, path or name of the target), `mask_token_id`, `target_layer_ids` or `allow_bin=True`.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: P-EAGLE heads are read from safetensors files only.")
        kwargs["use_safetensors"] = True
        wants_info = kwargs.pop("output_loading_info", False)
        source = pretrained_model_name_or_path
        try:  # remote-code copies of this file may run without the package; they read their own format
            from hf_peagle.formats import load_arguments
        except ImportError:
            pass
        else:
            source, kwargs = load_arguments(source, kwargs)
        head, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        if source is not pretrained_model_name_or_path:
            head.config._name_or_path = head.name_or_path = str(pretrained_model_name_or_path)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path} lacks {', '.join(missing)}. "
                + _REMEDIES.get(missing[0].split(".")[0], "Its config.json promises these tensors; export it again.")
            )
        if unexpected := sorted(info["unexpected_keys"]):
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path} holds tensors its config.json does not explain: "
                f"{', '.join(unexpected)}. Correct the config (layers, norms, vocabulary, sharing) or export it again."
            )
        head.check_vocabulary_map()
        return (head, info) if wants_info else head

    def check_vocabulary_map(self) -> None:
        """Raises `ValueError` unless `d2t` leads to distinct ids inside the vocabulary that `t2d` marks."""
        if not self.has_vocab_map:
            return
        ids = self.draft_token_ids
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size or ids.unique().numel() != ids.numel():
            raise ValueError(
                f"d2t: draft ids must map to {ids.numel()} distinct target ids in [0, {self.config.vocab_size}); found "
                f"{ids.unique().numel()} distinct ones in [{int(ids.min())}, {int(ids.max())}]. d2t holds offsets: "
                "target id = draft id + d2t[draft id]."
            )
        if not torch.equal(self.t2d.nonzero().view(-1), ids.sort().values):
            raise ValueError("t2d: marks other target ids than d2t maps to; the checkpoint's vocabulary map is damaged.")

    # ------------------------------------------------------------------ vocabulary and borrowed weights

    @property
    def draft_token_ids(self) -> torch.Tensor:
        """`[draft_vocab_size]` int64: the target id of every draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if self.has_vocab_map else ids

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Makes `token_ids` (`[draft_vocab_size]` distinct target ids, sorted ascending) the draft vocabulary."""
        token_ids = torch.as_tensor(token_ids, dtype=torch.long, device=self.device)
        size = self.config.draft_vocab_size
        if not self.has_vocab_map:
            raise ValueError("set_draft_vocabulary: this head drafts from the full vocabulary; lower draft_vocab_size.")
        if token_ids.shape != (size,) or not bool((token_ids[1:] > token_ids[:-1]).all()):
            raise ValueError(f"set_draft_vocabulary: token_ids must be {size} distinct ids in ascending order.")
        if int(token_ids[0]) < 0 or int(token_ids[-1]) >= self.config.vocab_size:
            raise ValueError(f"set_draft_vocabulary: token_ids must lie in [0, {self.config.vocab_size}).")
        self.d2t.copy_(token_ids - torch.arange(size, device=self.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    @torch.no_grad()
    def borrow(self, target: PreTrainedModel) -> TargetWeights:
        """The embedding and output rows that this head shares with `target`, on the head's device and dtype."""
        weights = TargetWeights()
        if self.config.share_embeddings:
            weights.embed_tokens = target.get_input_embeddings()
        if self.config.share_lm_head:
            output = target.get_output_embeddings()
            matrix = None if output is None else getattr(output, "weight", None)
            if matrix is None or matrix.dim() != 2 or not matrix.is_floating_point() or matrix.is_meta:
                raise ValueError(
                    f"PEagleConfig.share_lm_head is true, but the output embeddings of {type(target).__name__} are not a "
                    "plain matrix (quantised or offloaded). Use a head that stores its own lm_head."
                )
            rows = matrix[self.draft_token_ids.to(matrix.device)] if self.has_vocab_map else matrix
            weights.lm_head = rows.to(self.device, self.dtype)
        return weights

    # ------------------------------------------------------------------ pieces of the network

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Features `[..., feature_size]` to `[..., hidden_size]`: the optional norms, then `fc`."""
        features = features.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            chunks = features.chunk(self.config.num_aux_hidden_states, dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def embed(self, token_ids: torch.Tensor, borrowed: TargetWeights | None = None) -> torch.Tensor:
        """Ids of any shape to embeddings `[..., hidden_size]`, from the own table or the target's."""
        if not self.config.share_embeddings:
            return self.embed_tokens(token_ids)
        if borrowed is None or borrowed.embed_tokens is None:
            raise ValueError("This head shares the target's embeddings: pass borrowed=head.borrow(target).")
        return borrowed.embed_tokens(token_ids).to(self.device, self.fc.weight.dtype)

    def mask_slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and projected feature of a mask slot, `[hidden_size]` each: the same at every depth."""
        if self.config.algorithm != "peagle":
            raise ValueError("An EAGLE-3 head has no mask slots; it drafts token by token.")
        if self.config.share_embeddings:
            embedding = self.mask_embedding
        else:
            embedding = self.embed_tokens.weight[self.config.mask_token_id]
        return embedding, self.project(self.mask_hidden).view(-1)

    def logits(self, hidden_states: torch.Tensor, borrowed: TargetWeights | None = None) -> torch.Tensor:
        """Normed states `[..., hidden_size]` to draft-vocabulary scores `[..., draft_vocab_size]`."""
        if not self.config.share_lm_head:
            return self.lm_head(hidden_states)
        if borrowed is None or borrowed.lm_head is None:
            raise ValueError("This head shares the target's lm_head: pass borrowed=head.borrow(target).")
        return nn.functional.linear(hidden_states, borrowed.lm_head)

    def run_layers(
        self,
        embeddings: torch.Tensor,
        projected: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        store: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Fusion layer and the layers behind it, before the final norm: `[batch, rows, hidden_size]` in and out."""
        position_embeddings = self.rotary_emb(projected, position_ids)
        hidden_states = projected
        for layer in self.layers:
            hidden_states = layer(hidden_states, embeddings, position_embeddings, attention_mask, store)
        return hidden_states

    # ------------------------------------------------------------------ training and tests

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        row_index: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        borrowed: TargetWeights | None = None,
        compute_logits: bool = True,
    ) -> PEagleOutput:
        """
        All rows of a training example at once.

        Args:
            input_ids (`torch.Tensor`): `[batch, slots]` int64, token `x_{j+1}` of slot `j`.
            features (`torch.Tensor`): `[batch, slots, feature_size]`, target feature `h_j` of slot `j`.
            row_index (`torch.Tensor`, *optional*): `[batch, rows]` int64. Row `r` is slot `row_index[r]`, or a mask
                slot where it is -1. Default: one row per slot.
            position_ids (`torch.Tensor`, *optional*): `[batch, rows]` int64 rotary positions. Default `0, 1, ...`.
            attention_mask (*optional*): `[batch, 1, rows, rows]` bool (True: may attend), or what the configured
                attention takes (a flex `BlockMask`). Default: causal.
            borrowed (`TargetWeights`, *optional*): for heads that share tables with the target.
            compute_logits (`bool`): False leaves `logits` out, for losses that compute them in chunks.
        """
        if features.shape[-1] != self.config.feature_size or features.shape[:2] != input_ids.shape:
            raise ValueError(
                f"features has shape {tuple(features.shape)}, expected {(*input_ids.shape, self.config.feature_size)} "
                "(batch, slots, captured streams x target width)."
            )
        embeddings, projected = self.embed(input_ids, borrowed), self.project(features)
        if row_index is not None:
            mask_embedding, mask_projected = self.mask_slot()
            embeddings = _take_rows(embeddings, row_index, mask_embedding)
            projected = _take_rows(projected, row_index, mask_projected)
        rows = projected.shape[1]
        if position_ids is None:
            position_ids = torch.arange(rows, device=projected.device).expand(projected.shape[0], rows)
        if attention_mask is None:
            attention_mask = torch.ones(rows, rows, dtype=torch.bool, device=projected.device).tril()[None, None]
        hidden_states = self.norm(self.run_layers(embeddings, projected, position_ids, attention_mask))
        logits = self.logits(hidden_states, borrowed) if compute_logits else None
        return PEagleOutput(logits=logits, last_hidden_state=hidden_states)

    # ------------------------------------------------------------------ inference

    def new_cache(self, batch_size: int, static_capacity: int | None = None) -> DrafterCache:
        """Empty key/value buffers for `batch_size` rows; see [`DrafterCache`] for `static_capacity`."""
        return DrafterCache(self.config, batch_size, self.device, self.fc.weight.dtype, static_capacity)

    @torch.no_grad()
    def draft(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        counts: torch.Tensor,
        num_tokens: int,
        cache: DrafterCache,
        borrowed: TargetWeights | None = None,
        sample: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
        longest: int | None = None,
    ) -> DraftOutput:
        """
        One pass: newly committed (token, feature) rows and `num_tokens - 1` mask rows give `num_tokens` drafts.

        Args:
            token_ids (`torch.Tensor`): `[batch, n]` int64, the tokens committed since the last call; row `b` has
                `counts[b]` of them, left-aligned, and what follows is ignored.
            features (`torch.Tensor`): `[batch, n, feature_size]`, the target feature one position *before* each token.
            counts (`torch.Tensor`): `[batch]` int64 in `[0, n]`. A row with 0 gets meaningless drafts.
            num_tokens (`int`): K, at least 1.
            cache (`DrafterCache`): extended by the real rows only.
            borrowed (`TargetWeights`, *optional*): for heads that share tables with the target.
            sample (`Callable`, *optional*): draft logits `[batch, K, draft_vocab]` to (draft ids `[batch, K]`,
                probabilities `[batch, K, draft_vocab]`). Default: the most likely token.
            longest (`int`, *optional*): most slots a row has after this call, if the caller knows it without asking
                the device. Default: an upper bound.
        """
        n = token_ids.shape[1]
        if self.config.algorithm == "eagle3":
            return self._draft_sequentially(token_ids, features, counts, num_tokens, cache, borrowed, sample, longest)
        row = torch.arange(n + num_tokens - 1, device=self.device)
        # Rows at and beyond counts[b] are mask slots. A row with few tokens has more than K-1 of them: the surplus
        # comes last in causal order, so no row that matters sees it.
        row_index = torch.where(row < counts[:, None], row, -1)
        if cache.mask_slot is None:
            cache.mask_slot = self.mask_slot()
        mask_embedding, mask_projected = cache.mask_slot
        embeddings = _take_rows(self.embed(token_ids, borrowed), row_index, mask_embedding)
        projected = _take_rows(self.project(features), row_index, mask_projected)
        hidden_states = self._extend(embeddings, projected, cache)
        cache.commit(counts, cache.longest + n if longest is None else longest)
        last = (counts[:, None] - 1 + torch.arange(num_tokens, device=self.device)).clamp(min=0)
        hidden_states = hidden_states.gather(1, last[:, :, None].expand(-1, -1, hidden_states.shape[-1]))
        logits = self.logits(self.norm(hidden_states), borrowed)
        return self._draw(logits, sample)

    def _draft_sequentially(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        counts: torch.Tensor,
        num_tokens: int,
        cache: DrafterCache,
        borrowed: TargetWeights | None,
        sample: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None,
        longest: int | None,
    ) -> DraftOutput:
        """EAGLE-3: `num_tokens` passes, each reading the token just drafted and the state that drafted it."""
        hidden_states = self._extend(self.embed(token_ids, borrowed), self.project(features), cache)
        cache.commit(counts, cache.longest + token_ids.shape[1] if longest is None else longest)
        last = (counts - 1).clamp(min=0)[:, None, None]
        state = hidden_states.gather(1, last.expand(-1, -1, hidden_states.shape[-1]))
        steps: list[DraftOutput] = []
        for ahead in range(num_tokens):
            if ahead:
                state = self._extend(self.embed(steps[-1].tokens, borrowed), state, cache, ahead - 1)
            normed = self.norm(state)
            steps.append(self._draw(self.logits(normed, borrowed), sample))
            if self.config.norm_output:
                state = normed
        probabilities = None if sample is None else torch.cat([step.probabilities for step in steps], dim=1)
        return DraftOutput(
            torch.cat([step.tokens for step in steps], dim=1),
            torch.cat([step.draft_ids for step in steps], dim=1),
            torch.cat([step.logits for step in steps], dim=1),
            probabilities,
        )

    def _extend(self, embeddings: torch.Tensor, projected: torch.Tensor, cache: DrafterCache, ahead: int = 0) -> torch.Tensor:
        """Runs rows that follow the cached real slots at a distance of `ahead` columns, attending to all before them."""
        rows = projected.shape[1]
        visible = cache.visible_columns(cache.longest + ahead + rows)
        columns = cache.lengths[:, None] + torch.arange(ahead, ahead + rows, device=self.device)
        attention_mask = (torch.arange(visible, device=self.device) <= columns[:, :, None])[:, None]

        def store(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cache.write(layer, key, value, columns, visible)

        return self.run_layers(embeddings, projected, columns, attention_mask, store)

    def _draw(self, logits: torch.Tensor, sample: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None) -> DraftOutput:
        """Draft ids for rows of logits, and the target ids they stand for."""
        draft_ids, probabilities = (logits.argmax(dim=-1), None) if sample is None else sample(logits)
        tokens = draft_ids + self.d2t[draft_ids] if self.has_vocab_map else draft_ids
        return DraftOutput(tokens, draft_ids, logits, probabilities)


def _take_rows(slots: torch.Tensor, row_index: torch.Tensor, mask_vector: torch.Tensor) -> torch.Tensor:
    """`slots` `[batch, n, width]` picked by `row_index` `[batch, rows]`; -1 gives `mask_vector` `[width]`."""
    picked = slots.gather(1, row_index.clamp(min=0)[:, :, None].expand(-1, -1, slots.shape[-1]))
    return torch.where((row_index < 0)[:, :, None], mask_vector.to(slots.dtype), picked)


PEagleConfig.register_for_auto_class()
PEagleDrafterModel.register_for_auto_class("AutoModel")
install()
