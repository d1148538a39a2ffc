#!/usr/bin/env python
"""Writes a head's README.md from its head_card.json, after adding new measurements to that file; --check only compares.

Example: python scripts/model_card.py runs/mine/head --evaluation runs/mine/log.jsonl --how "80 held-out prompts, greedy" \\
    --benchmark results/mine.json
"""

import sys

from hf_peagle.card_command import main

if __name__ == "__main__":
    sys.exit(main())
