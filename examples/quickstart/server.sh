#!/usr/bin/env bash
# One cache server for this node. 20 GB of host memory, taken in the background.
set -euo pipefail

exec kvcellar server --l1-size-gb 20 --eviction-policy LRU
