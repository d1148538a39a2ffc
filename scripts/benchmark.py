#!/usr/bin/env python
"""
Compares plain decoding, prompt lookup, an assistant, an EAGLE-3 head and a P-EAGLE head on this machine, in one process
and in turn, and measures the cost curves from which the best draft length follows.

Example: python scripts/benchmark.py --quick
"""

from __future__ import annotations

import logging
import sys

from hf_peagle.benchmark import main

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main())
