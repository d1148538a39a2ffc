#!/usr/bin/env python
"""Checks a head's folder and publishes it on the Hub, private unless --public is given.

Example: python scripts/publish.py runs/mine/head org/peagle-mine --dry-run
"""

import logging
import sys

from hf_peagle.publish import main

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main())
