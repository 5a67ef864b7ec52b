#!/usr/bin/env bash
# One vLLM that stores to and loads from the server on this node.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-8B}
PORT=${PORT:-8000}

exec vllm serve "$MODEL" --port "$PORT" --served-model-name model \
  --kv-transfer-config '{"kv_connector":"KVCellarConnector","kv_role":"kv_both"}'
