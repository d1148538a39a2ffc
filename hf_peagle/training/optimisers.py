"""Optimisers and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from .config import TrainingConfig


def build_optimisers(parameters: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig) -> list[Optimizer]:
    """
    AdamW for everything, or Muon for the layers' and fc's matrices and AdamW for tables, norms and vectors.

    Each group keeps its peak rate in `group["peak_lr"]`.
    """
    matrices, tables, vectors = [], [], []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.dim() == 2 and ("lm_head" in name or "embed_tokens" in name):
            tables.append(parameter)
        elif parameter.dim() == 2:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    optimisers: list[Optimizer] = []
    if config.optimizer == "muon" and matrices:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"optimizer='muon' needs torch >= 2.9, this is {torch.__version__}; set optimizer='adamw'")
        optimisers.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"))
        matrices = []
    groups = [
        {"params": matrices + tables, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        optimisers.append(torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2)))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return optimisers


def rate_factor(step: int, progress: float, config: TrainingConfig) -> float:
    """
    Factor on the peak rate: linear warm-up over `warmup_steps`, constant, and a linear fall to 0 over the last
    `decay_fraction` of the budget. `progress` in [0, 1] is the share of the budget spent.
    """
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    left = max(0.0, 1.0 - progress)
    if config.decay_fraction > 0.0 and left < config.decay_fraction:
        return warm * left / config.decay_fraction
    return warm


def set_rates(optimisers: Iterable[Optimizer], factor: float) -> None:
    """Sets every group's rate to `factor` times its peak."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * factor
