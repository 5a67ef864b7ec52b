#!/usr/bin/env bash
# A command from LMCache's guide, unchanged.
set -euo pipefail

exec lmcache server \
  --port 6555 --http-port 8090 \
  --l1-size-gb 20 --eviction-policy LRU --chunk-size 256 \
  --instance-id node-1
