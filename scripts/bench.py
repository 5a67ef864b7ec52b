#!/usr/bin/env python3
"""Measure copies, lookups, time to first token, the server's cost and the disk: `make bench`.

Everything is in `kvcellar.bench`; this only says where the checkout is. `--help` lists the
options, and docs/performance.md says what was found.
"""

import sys
from pathlib import Path

from kvcellar.bench.main import run

if __name__ == "__main__":
    sys.exit(run(Path(__file__).resolve().parent.parent, sys.argv[1:]))
