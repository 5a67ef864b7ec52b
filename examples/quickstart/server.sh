#!/usr/bin/env bash
# One cache server for this node. 20 GB of host memory, taken in the background.
set -euo pipefail
L1_SIZE_GB=${L1_SIZE_GB:-20}

exec kvcellar server --l1-size-gb "$L1_SIZE_GB" --eviction-policy LRU
