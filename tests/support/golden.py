"""Reads the golden files: numbers of an independent P-EAGLE implementation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open

from hf_peagle.configuration_peagle import PEagleConfig
from hf_peagle.modeling_peagle import PEagleDrafterModel


def golden_files() -> list[Path]:
    """Golden files beside the checkout, or in the folder named by HF_PEAGLE_GOLDEN."""
    default = Path(__file__).parents[3] / "shared" / "data" / "golden"
    return sorted(Path(os.environ.get("HF_PEAGLE_GOLDEN", default)).glob("*.safetensors"))


def load_golden(path: Path) -> tuple[PEagleDrafterModel, dict[str, torch.Tensor], dict[str, str]]:
    """The golden weights in our drafter, the inputs and outputs, and the file's metadata."""
    with safe_open(str(path), framework="pt") as f:
        meta, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    shape = json.loads(meta["config"])
    theta = shape.pop("rope_theta")
    config = PEagleConfig(
        **shape,
        target_hidden_size=int(meta["hidden_size"]),
        target_layer_ids=[2, 4, 5],
        mask_token_id=int(meta["mask_token_id"]),
        layer_family=meta["family"],
        norm_before_residual=meta["norm_before_residual"] in ("1", "True"),
        fc_norm=meta["fc_norm"] in ("1", "True"),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    head = PEagleDrafterModel(config).float().eval()
    weights = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}
    missing, unexpected = head.load_state_dict(weights, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    return head, tensors, meta
