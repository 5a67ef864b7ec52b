#!/usr/bin/env bash
# A command from LMCache's guide, unchanged.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-8B}

exec vllm serve "$MODEL" --port 8001 \
  --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.host":"tcp://localhost","lmcache.mp.port":6555}}'
