"""What differs between vLLM 0.25.1 and 0.33, found by looking and never by comparing versions.

A release may be a nightly, a fork or patched, so each difference is detected where it shows: a
name that can be imported, an attribute that exists. Every other module of the connector reads
vLLM's objects as if there were one version; only this one probes.
"""

import sys
from collections.abc import Iterator
from typing import Any

import vllm

from kvcellar import __version__

__all__ = [
    "cache_hit_source",
    "can_fail_whole_loads",
    "group_flags",
    "has_measured_kv_scales",
    "is_inside_multi_connector",
    "mixed_prompt_mask",
    "optional",
    "scheduled_tables",
    "software",
    "transfer_results",
]

# Any: vLLM's objects are only duck-typed here; its releases disagree about their classes.


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Return an attribute that not every supported release has."""
    return getattr(owner, name, default)


def software() -> str:
    """Return what runs here, for the server's status page."""
    return f"kvcellar {__version__}, vllm {optional(vllm, '__version__', 'unknown')}"


def cache_hit_source() -> Any:
    """Return vLLM's word for tokens that came from host memory; None before it had words."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def transfer_results(*, received: set[str], failed: set[str]) -> Any:
    """Return what a worker says of loads that ended, to a vLLM that asks for it in this form."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def can_fail_whole_loads() -> bool:
    """Return whether vLLM can be told that a load failed as a whole (it cannot be in 0.25.1)."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base
    except ImportError:
        return False
    return hasattr(base, "KVConnectorTransferResults")


def group_flags(group: Any) -> list[str]:
    """Return what is special about a KV cache group, in words for people; [] for a plain one."""
    flags = {
        "drafts tokens (EAGLE or MTP)": optional(group, "is_eagle_group", False),
        "lies in host memory": optional(group, "host_resident", False),
        "is closed to connectors": not optional(group, "enable_kv_transfer", True),
    }
    return [words for words, is_set in flags.items() if is_set]


def has_measured_kv_scales(cache_config: Any) -> bool:
    """Return whether FP8 scales are computed from the first batch (removed after 0.25.1)."""
    return bool(optional(cache_config, "calculate_kv_scales", False))


def mixed_prompt_mask(request: Any) -> bytes:
    """Return which positions of a prompt with embeddings are tokens, a byte each; b"" for none."""
    mask = optional(request, "prompt_is_token_ids")
    return bytes(bytearray(map(bool, mask))) if mask is not None else b""


def scheduled_tables(
    scheduler_output: Any,
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool, int]]:
    """Yield what a step schedules: request id, block ids, whether they replace, computed tokens.

    A request that is new or comes back from preemption brings its whole block table of each KV
    group; a running one only what it was given in this step, or None. One runner of vLLM reports
    those that come back among the new ones, the other among the running ones.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield request_id, block_ids, request_id in cached.resumed_req_ids, computed


def is_inside_multi_connector() -> bool:
    """Return whether the caller is being constructed by vLLM's MultiConnector.

    A child is handed a copy of the configuration that looks like that of a connector which is
    alone, and is not told otherwise; who calls is the only trace there is.
    """
    frame = sys._getframe(1)
    for _ in range(16):
        if type(frame.f_locals.get("self")).__name__ == "MultiConnector":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
