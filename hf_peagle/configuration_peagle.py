"""Configuration of a P-EAGLE drafter: everything a checkpoint says about itself."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

LAYER_FAMILIES = ("llama", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
ALGORITHMS = ("peagle", "eagle3")
DRAFT_SAMPLING = ("greedy", "probabilistic")
DRAFT_SCHEDULES = ("adaptive", "constant")


def default_target_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The stream indices `(2, n // 2, n - 3)` for a target of `n` layers, kept distinct and in range for tiny targets."""
    n = num_target_layers
    wanted = (2, n // 2, n - 3)
    if 0 <= wanted[0] < wanted[1] < wanted[2]:
        return wanted
    spread = sorted({max(0, min(n - 1, round(i * (n - 1) / 2))) for i in range(3)})
    return tuple(spread)


class PEagleConfig(PreTrainedConfig):
    r"""
    Configuration of [`PEagleDrafterModel`], a P-EAGLE head (arXiv 2602.01469): a small decoder that reads hidden states
    of a target model and drafts several tokens in one forward pass.

    Args:
        vocab_size (`int`): Vocabulary of the *target* (its padded size), as `generate()` compares the two.
        draft_vocab_size (`int`, *optional*): Number of tokens the head can draft. Defaults to `vocab_size`. When it is
            smaller, the checkpoint must hold `d2t` and `t2d`.
        hidden_size (`int`): Width H of the head.
        target_hidden_size (`int`, *optional*): Width H_t of the target's hidden states. Defaults to `hidden_size`.
        target_layer_ids (`list[int]`, *optional*): The captured streams of the target. Index `i` is the residual stream
            that *enters* layer `i`, which is `hidden_states[i]` of a transformers model and the output of layer `i - 1`.
            Any number is possible; the default is `(2, n // 2, n - 3)` for a target of `n` layers.
        target_num_hidden_layers (`int`, *optional*): Number of layers of the target, to check the ids against.
        target_model_type (`str`, *optional*), target_name_or_path (`str`, *optional*): What the head was made for.
        mask_token_id (`int`, *optional*): Vocabulary id that stands at mask slots. Needed with own embeddings; with
            shared embeddings the head stores one learned row and the id is only used on export.
        num_hidden_layers (`int`): Layers of the head; the first is the fusion layer.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act, rms_norm_eps,
            attention_bias, mlp_bias, max_position_embeddings, rope_parameters, initializer_range: As in Llama.
        algorithm (`str`): `"peagle"` drafts all tokens in one pass through mask slots. `"eagle3"` is the sequential
            baseline (arXiv 2503.01840): one pass per token, each fed with the state of the one before, no mask slots.
        norm_output (`bool`): With `"eagle3"`, the state fed back is the one after the final norm (EAGLE-3.1).
        layer_family (`str`): `"llama"`, or `"qwen3"` for an RMSNorm on each query and key head.
        norm_before_residual (`bool`): The fusion layer's residual starts at the normed projected feature.
        norm_before_fc (`bool`): One RMSNorm over all captured streams before `fc`.
        fc_norm (`bool`): One RMSNorm per captured stream before `fc`.
        share_embeddings (`bool`): The head has no token table and reads the target's. Its mask-slot embedding is a
            vector of its own. Needs `hidden_size == target_hidden_size`.
        share_lm_head (`bool`): The head has no output matrix and uses the target's rows of its draft vocabulary.
            Needs `hidden_size == target_hidden_size`.
        num_depths (`int`): Depths the head was trained for (K_train).
        num_assistant_tokens (`int`, *optional*): Recommended number of drafted tokens K at inference. Defaults to
            `min(4, num_depths)`. (Kept as `draft_length` in the file, since transformers reserves the other name.)
        draft_schedule (`str`): `"adaptive"` lets measured costs and acceptance choose the length of every round, up to
            `num_depths`, when the call does not give a number; `"constant"` drafts `draft_length` tokens.
        draft_sampling (`str`): How drafts are drawn when the target samples: `"greedy"` (most likely token, treated
            as a one-hot distribution) or `"probabilistic"` (from the head's own warped distribution).
    """

    model_type = "peagle"
    keys_to_ignore_at_inference = ("cache",)
    has_no_defaults_at_init = True  # a head is made for a target; there is no configuration without one

    def __init__(
        self,
        vocab_size: int = 32000,
        draft_vocab_size: int | None = None,
        hidden_size: int = 1024,
        target_hidden_size: int | None = None,
        target_layer_ids: list[int] | tuple[int, ...] | None = None,
        target_num_hidden_layers: int | None = None,
        target_model_type: str | None = None,
        target_name_or_path: str | None = None,
        mask_token_id: int | None = None,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        max_position_embeddings: int = 8192,
        rope_parameters: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        algorithm: str = "peagle",
        norm_output: bool = False,
        layer_family: str = "llama",
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        share_embeddings: bool = False,
        share_lm_head: bool = False,
        num_depths: int = 8,
        draft_length: int | None = None,
        draft_schedule: str = "adaptive",
        draft_sampling: str = "greedy",
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.hidden_size = hidden_size
        self.target_hidden_size = hidden_size if target_hidden_size is None else target_hidden_size
        if target_layer_ids is None and target_num_hidden_layers is not None:
            target_layer_ids = default_target_layer_ids(target_num_hidden_layers)
        self.target_layer_ids = None if target_layer_ids is None else [int(i) for i in target_layer_ids]
        self.target_num_hidden_layers = target_num_hidden_layers
        self.target_model_type = target_model_type
        self.target_name_or_path = target_name_or_path
        self.mask_token_id = mask_token_id
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // max(1, num_attention_heads) if head_dim is None else head_dim
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.attention_dropout = 0.0
        self.mlp_bias = mlp_bias
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = dict(rope_parameters) if rope_parameters else {"rope_type": "default", "rope_theta": 10000.0}
        self.initializer_range = initializer_range
        self.algorithm = algorithm
        self.norm_output = norm_output
        self.layer_family = layer_family
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.share_embeddings = share_embeddings
        self.share_lm_head = share_lm_head
        self.num_depths = num_depths
        if draft_length is None:
            draft_length = kwargs.pop("num_assistant_tokens", None)
        self.draft_length = min(4, num_depths) if draft_length is None else draft_length
        self.draft_schedule = draft_schedule
        self.draft_sampling = draft_sampling
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        # Input and output tables of a head are never one matrix: they cover different vocabularies.
        kwargs["tie_word_embeddings"] = False
        self.check()
        super().__init__(**kwargs)

    @property
    def num_aux_hidden_states(self) -> int:
        """Number of captured target streams."""
        return len(self.target_layer_ids or ())

    @property
    def feature_size(self) -> int:
        """Width of one feature row: captured streams times the target's width."""
        return self.num_aux_hidden_states * self.target_hidden_size

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> PEagleConfig:
        """
        A head configuration that fits a decoder-only target: its vocabulary, special ids, width, attention shape and
        rope. Any argument of the class can be given to override a choice.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration (a composite one is asked for its text part).
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(f"target_config: {type(target_config).__name__} is an encoder-decoder model; P-EAGLE drafts for decoder-only targets.")
        text = target_config.get_text_config()
        hidden = overrides.get("hidden_size", text.hidden_size)
        heads = overrides.get("num_attention_heads", _first(text, "num_attention_heads", "n_head"))
        same_width = hidden == text.hidden_size and "num_attention_heads" not in overrides
        values: dict[str, Any] = {
            "vocab_size": text.vocab_size,
            "hidden_size": hidden,
            "target_hidden_size": text.hidden_size,
            "target_num_hidden_layers": _first(text, "num_hidden_layers", "n_layer"),
            "target_model_type": text.model_type,
            "target_name_or_path": getattr(target_config, "_name_or_path", "") or None,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) if same_width else None,
            "head_dim": getattr(text, "head_dim", None) if same_width else None,
            "intermediate_size": _intermediate_size(text, hidden),
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 8192,
            "layer_family": "qwen3" if text.model_type.startswith("qwen3") else "llama",
            # Streams of different depths differ in scale by orders of magnitude (massive activations): norm each.
            "fc_norm": True,
            "pad_token_id": _first(text, "pad_token_id", fallback=target_config),
            "bos_token_id": _first(text, "bos_token_id", fallback=target_config),
            "eos_token_id": _first(text, "eos_token_id", fallback=target_config),
        }
        head_dim = overrides.get("head_dim") or values["head_dim"] or hidden // heads
        values["rope_parameters"] = _full_rotary_rope(text, head_dim)
        has_mask_row = not overrides.get("share_embeddings") and overrides.get("algorithm", "peagle") == "peagle"
        if has_mask_row and "mask_token_id" not in overrides:
            # The last row of a table is padding or a reserved token in nearly every model; its row is trained here.
            values["mask_token_id"] = text.vocab_size - 1
        values.update(overrides)
        return cls(**values)

    def check(self) -> None:
        """Raises `ValueError` naming the field for every combination that cannot work."""

        def positive(*names: str) -> None:
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ValueError(f"PEagleConfig.{name} must be a positive integer, got {value!r}.")

        positive("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "num_hidden_layers")
        positive("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "num_depths")
        positive("draft_length", "max_position_embeddings")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"PEagleConfig.draft_vocab_size is {self.draft_vocab_size}, larger than vocab_size {self.vocab_size}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"PEagleConfig.num_key_value_heads is {self.num_key_value_heads}, which does not divide "
                f"num_attention_heads {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"PEagleConfig.head_dim must be even for rotary positions, got {self.head_dim}.")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"PEagleConfig.algorithm is {self.algorithm!r}, expected one of {ALGORITHMS}.")
        if self.layer_family not in LAYER_FAMILIES:
            raise ValueError(f"PEagleConfig.layer_family is {self.layer_family!r}, expected one of {LAYER_FAMILIES}.")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise ValueError(f"PEagleConfig.draft_sampling is {self.draft_sampling!r}, expected one of {DRAFT_SAMPLING}.")
        if self.draft_schedule not in DRAFT_SCHEDULES:
            raise ValueError(f"PEagleConfig.draft_schedule is {self.draft_schedule!r}, expected one of {DRAFT_SCHEDULES}.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("PEagleConfig.norm_before_fc and fc_norm are both true; a head has one of them or none.")
        for name in ("share_embeddings", "share_lm_head"):
            if getattr(self, name) and self.hidden_size != self.target_hidden_size:
                raise ValueError(f"PEagleConfig.{name} needs hidden_size {self.hidden_size} to equal target_hidden_size {self.target_hidden_size}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"PEagleConfig.mask_token_id is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}.")
        if self.mask_token_id is None and not self.share_embeddings and self.algorithm == "peagle":
            raise ValueError(
                "PEagleConfig.mask_token_id is missing: with own embeddings the row of an unused token id stands at "
                "mask slots. Pass mask_token_id, or share_embeddings=True."
            )
        self._check_layer_ids()
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"PEagleConfig.rope_parameters has rope_type {rope_type!r}, expected one of {ROPE_TYPES}.")

    def _check_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not ids:
            raise ValueError(
                "PEagleConfig.target_layer_ids is empty; give the captured stream indices, or "
                "target_num_hidden_layers for the default (2, n // 2, n - 3)."
            )
        if len(set(ids)) != len(ids):
            raise ValueError(f"PEagleConfig.target_layer_ids has a repeated entry: {ids}.")
        top = self.target_num_hidden_layers
        for i in ids:
            if i < 0 or (top is not None and i > top):
                raise ValueError(
                    f"PEagleConfig.target_layer_ids has {i}; streams of this target are numbered 0 (embeddings) to "
                    f"{'its layer count' if top is None else top} (after the final norm)."
                )


def _first(config: PreTrainedConfig, *names: str, fallback: PreTrainedConfig | None = None) -> Any:
    for source in (config, fallback):
        for name in names:
            if source is not None and (value := getattr(source, name, None)) is not None:
                return value
    return None


def _intermediate_size(text: PreTrainedConfig, hidden: int) -> int:
    """The target's dense MLP width where it is plausible; experts are far narrower than a dense layer, so not theirs."""
    size = getattr(text, "intermediate_size", None)
    is_moe = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if is_moe or not isinstance(size, int) or hidden != text.hidden_size:
        return 3 * hidden
    return size


def _full_rotary_rope(text: PreTrainedConfig, head_dim: int) -> dict[str, Any]:
    """The target's rope for full rotation of the head's `head_dim`; what only fits the target is left out."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested:  # one entry per layer type: the global layers' is the one meant for long positions
        rope = dict(rope.get("full_attention") or nested[0])
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    rope_type = rope.get("rope_type", "default")
    partial = rope.pop("partial_rotary_factor", 1.0) or 1.0
    rope.pop("mrope_section", None)
    factors = rope.get("long_factor") or rope.get("short_factor") or []
    fits = rope_type in ROPE_TYPES and partial == 1.0 and (not factors or len(factors) == head_dim // 2)
    if not fits or rope_type == "proportional":
        return {"rope_type": "default", "rope_theta": theta}
    return {**rope, "rope_type": rope_type, "rope_theta": theta}
