"""One dataclass for a training run; YAML, JSON and the command line give the same."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hf_peagle.files import write_text


def _option(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class TrainingConfig:
    """Everything a training run depends on. Every field is also a command line option; `metadata["help"]` explains it."""

    # What and where
    target: str = _option("", "folder or Hub name of the target model")
    prompts: list[str] = _option([], "prompt files (JSONL), each LOCATION or LOCATION=WEIGHT; empty: answers exist")
    answers: str = _option("", "folder of answer shards; default OUTPUT/answers")
    features: str = _option("", "folder of cached features; default OUTPUT/features")
    eval_answers: str = _option("", "folder of held-out greedy answers; empty: training documents (not held out)")
    output: str = _option("", "folder of the run; the finished head is in OUTPUT/head")
    device: str = _option("auto", "auto, cpu or cuda")
    target_dtype: str = _option("auto", "dtype of the target: auto (bfloat16 where the hardware has it), float32, ...")
    seed: int = _option(0, "seed of data order, sampling and initial weights")
    # The head
    layers: int = _option(2, "layers of the head")
    target_layer_ids: list[int] = _option([], "captured streams; empty: (2, n // 2, n - 3)")
    draft_vocab_size: int = _option(8192, "tokens the head can draft, the most frequent of the answers; 0: all")
    share_embeddings: bool = _option(True, "read the target's embedding table instead of an own one")
    share_lm_head: bool = _option(False, "use the target's output rows instead of an own, trained copy")
    norm_before_residual: bool = _option(False, "start the fusion layer's residual at the normed feature")
    init_layers: str = _option("random", "'target': start the layers as copies of the target's last ones; 'random'")
    init_fc: str = _option("random", "'stream': fc starts by passing on the last captured stream; 'random'")
    init_from: str = _option("", "folder of a head to start from instead")
    # Rows and loss
    num_depths: int = _option(8, "K_train: depths of the rollouts")
    retention: float = _option(0.8, "share of rollouts kept at each further depth")
    warm_depth0_steps: int = _option(0, "first steps with depth 0 only")
    depth_weights: list[float] = _option([], "loss weight per depth; empty: all 1")
    prompt_weight: float = _option(0.0, "loss weight of prompt tokens as labels, answers having 1")
    loss: str = _option("kl", "kl (to the target's distribution over the draft vocabulary) or ce (to the next token)")
    ce_share: float = _option(0.0, "with kl: share of the label's probability moved to the next token")
    weigh_by_coverage: bool = _option(True, "weigh a row by the target's probability of the draft vocabulary")
    loss_chunk: int = _option(1024, "rows expanded to the vocabulary at once")
    # Batches and budget
    max_length: int = _option(2048, "documents are cut here (tokens)")
    pack_tokens: int = _option(2048, "tokens of documents packed into one example")
    accumulate: int = _option(1, "packed examples per optimiser step (and process)")
    partitions: int = _option(1, "segments per example (sequence partition): lowers memory, not the result")
    attention_block: int = _option(256, "query rows per block of attention (CPU)")
    max_steps: int = _option(0, "optimiser steps; 0: until max_minutes")
    max_minutes: float = _option(0.0, "minutes of training (kept over restarts); 0: until max_steps")
    feature_batch_tokens: int = _option(1, "padded tokens per target forward in feature extraction; 1: one document")
    online_features: bool = _option(False, "run the target in the training loop instead of caching its features")
    # Optimiser
    optimizer: str = _option("adamw", "muon (matrices by Muon, the rest by AdamW) or adamw")
    lr: float = _option(2e-3, "peak learning rate of AdamW")
    muon_lr: float = _option(2e-3, "peak learning rate of Muon (scaled to match AdamW's step size)")
    weight_decay: float = _option(0.01, "decoupled weight decay of matrices")
    beta2: float = _option(0.98, "AdamW's second-moment decay")
    warmup_steps: int = _option(20, "linear warm-up")
    decay_fraction: float = _option(0.3, "share of the budget, at its end, over which the rate falls linearly to 0")
    max_grad_norm: float = _option(1.0, "gradient clipping; 0: off")
    ema: float = _option(0.0, "decay of an exponential moving average of the weights that is evaluated and saved")
    bf16: bool = _option(True, "bfloat16 autocast (master weights stay fp32)")
    # Reports
    eval_minutes: float = _option(5.0, "minutes between evaluations")
    eval_documents: int = _option(64, "held-out documents per evaluation")
    save_minutes: float = _option(5.0, "minutes between checkpoints")
    draft_length: int = _option(4, "K of the evaluation and the head's recommended draft length")
    tracker: str = _option("", "accelerate tracker, for example tensorboard")
    best: str = _option("", "folder that is always a copy of the best head so far; default OUTPUT/best")

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, allowed))}")
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in [{low}, {high}]")
        if self.retention <= 0:
            raise ValueError("retention=0: without deeper rows set num_depths=1 instead")
        if self.depth_weights and len(self.depth_weights) != self.num_depths:
            raise ValueError(f"depth_weights has {len(self.depth_weights)} entries; give one per depth (num_depths={self.num_depths})")
        if self.max_length > self.pack_tokens:
            raise ValueError(f"max_length={self.max_length} exceeds pack_tokens={self.pack_tokens}: a document must fit in a pack")

    # -------------------------------------------------------------------------------------------------- files and CLI

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or YAML."""
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes the configuration as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """From plain values; an unknown name or a value of the wrong type is an error."""
        hints = get_type_hints(cls)
        checked = {}
        for name, value in values.items():
            if name not in hints:
                raise ValueError(f"{name}: not an option of TrainingConfig; see `python scripts/train.py --help`")
            checked[name] = _checked(name, value, hints[name])
        return cls(**checked)

    @classmethod
    def load(cls, path: str | Path) -> TrainingConfig:
        """From a `.json`, `.yaml` or `.yml` file."""
        return cls.from_dict(read_values(path))

    @classmethod
    def from_arguments(cls, arguments: Sequence[str] | None = None, **defaults: Any) -> TrainingConfig:
        """From the command line: `--config FILE` first, then `--preset`, then the options given one by one on top."""
        parser = cls.parser()
        given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
        values: dict[str, Any] = dict(defaults)
        if preset := given.pop("preset", None):
            values.update(PRESETS[preset])
        if file := given.pop("config", None):
            values.update(read_values(file))
        return cls.from_dict({**values, **given})

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        """The command line: one option per field."""
        parser = argparse.ArgumentParser(description="Train a draft head for a target.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        parser.add_argument("--config", help="JSON or YAML file with any of the options below", default=None)
        parser.add_argument("--preset", choices=sorted(PRESETS), default=None, help="a set of options to start from")
        hints = get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            flag, kind = "--" + entry.name.replace("_", "-"), hints[entry.name]
            shown = entry.default if entry.default is not dataclasses.MISSING else []
            text = f"{entry.metadata['help']} [{shown!r}]".replace("%", "%%")
            if kind is bool:
                parser.add_argument(flag, dest=entry.name, action=argparse.BooleanOptionalAction, default=None, help=text)
            elif get_origin(kind) is list:
                parser.add_argument(flag, dest=entry.name, nargs="*", type=get_args(kind)[0], default=None, help=text)
            else:
                parser.add_argument(flag, dest=entry.name, type=kind, default=None, help=text)
        return parser


PRESETS: dict[str, dict[str, Any]] = {
    # A smoke run or a laptop: one layer, few depths.
    "small": {"layers": 1, "num_depths": 5, "draft_vocab_size": 4096, "max_minutes": 20.0},
    "standard": {"layers": 2, "num_depths": 5, "max_length": 512, "pack_tokens": 512, "max_minutes": 120.0},
    # Long documents on a GPU: the recipe of the paper.
    "long": {
        "layers": 4,
        "num_depths": 8,
        "max_length": 8192,
        "pack_tokens": 8192,
        "partitions": 4,
        "draft_vocab_size": 32000,
        "max_minutes": 24 * 60.0,
    },
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "loss": ("kl", "ce"),
    "optimizer": ("muon", "adamw"),
    "init_layers": ("target", "random"),
    "init_fc": ("stream", "random"),
}
_POSITIVE = ("layers", "num_depths", "accumulate", "partitions", "max_length", "pack_tokens", "draft_length")
_RANGES: dict[str, tuple[float, float]] = {
    "retention": (0.0, 1.0),
    "prompt_weight": (0.0, 1.0),
    "ce_share": (0.0, 1.0),
    "decay_fraction": (0.0, 1.0),
    "ema": (0.0, 0.99999),
}


def read_values(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        import yaml

        values = yaml.safe_load(text)
    elif path.suffix == ".json":
        values = json.loads(text)
    else:
        raise ValueError(f"config {path}: expected a .json, .yaml or .yml file")
    if not isinstance(values, dict):
        raise ValueError(f"config {path}: expected a mapping of option names to values")
    return values


def _checked(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is list:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name}={value!r}: expected a list")
        return [_checked(name, v, get_args(kind)[0]) for v in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML reads 1e-3 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name}={value!r}: expected {kind.__name__}")
    return value
