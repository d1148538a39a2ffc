#!/usr/bin/env python
"""Trains a P-EAGLE head for a target: answers, features, training, evaluation. Run it again to go on after a stop.

Example: python scripts/train.py --preset standard --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl \\
    --output runs/smollm2
"""

from __future__ import annotations

import json
import logging
import sys

from hf_peagle.training.config import TrainingConfig
from hf_peagle.training.pipeline import train


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = TrainingConfig.from_arguments()
    for name in ("target", "output"):
        if not getattr(config, name):
            sys.exit(f"--{name} is missing: {TrainingConfig.__dataclass_fields__[name].metadata['help']}")
    result = train(config)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
