"""Where releases of vLLM differ in how they describe the KV cache to a worker.

vLLM 0.25.1 gives each layer a tensor in its attention backend's shape; by 0.32 every layer is a
[blocks, heads, tokens, content] view of one allocation, and groups say whether they may be
transferred. Features are looked for, never version numbers. Only the worker half's `regions` asks.
"""

import dataclasses
from collections.abc import Mapping

import vllm
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

__all__ = [
    "backend_name",
    "engine_version",
    "is_keepable",
    "is_transferable",
    "layer_specs",
    "layout_generation",
    "token_shards",
]


def engine_version() -> str:
    """Return vLLM's release without its build: "0.32.0"."""
    return str(vllm.__version__).split("+")[0]


def layout_generation(kv_cache_config: KVCacheConfig) -> str:
    """Return how this release shapes layers, with the physical order where it has a name."""
    if "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}:
        return f"views {kv_cache_config.kv_cache_layout}"
    return "backend shapes"


def is_transferable(group: KVCacheGroupSpec) -> bool:
    """Whether vLLM lets connectors keep this group; releases that do not say so let them."""
    return bool(getattr(group, "enable_kv_transfer", True))


def is_keepable(group: KVCacheGroupSpec, spec: KVCacheSpec) -> bool:
    """Whether a layer's KV lies on the device and is a function of a prefix of the tokens."""
    return (
        isinstance(spec, AttentionSpec)
        and not isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec)
        and not getattr(group, "host_resident", False)
    )


def layer_specs(group: KVCacheGroupSpec) -> Mapping[str, KVCacheSpec]:
    """Return each layer's own specification; layers of one group may have pages of other sizes."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
    return {name: each.get(name, group.kv_cache_spec) for name in group.layer_names}


def backend_name(vllm_config: VllmConfig, layer_name: str) -> str:
    """Return the attention backend that reads and writes a layer's pages."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    return str(layer.get_attn_backend().get_name())


def token_shards(parallel_config: ParallelConfig) -> int:
    """Return over how many ranks the tokens of one block are spread (context parallelism)."""
    decode = getattr(parallel_config, "decode_context_parallel_size", 1)
    prefill = getattr(parallel_config, "prefill_context_parallel_size", 1)
    return int(decode) * int(prefill)
