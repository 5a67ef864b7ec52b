"""LMCache's metric names that mean the same here; `lmcache server` shows them beside ours.

Names as Prometheus has them: dots are underscores, counters end in `_total`. What LMCache counts
and kvcellar does not (its queues, its event bus, its threads) has no alias: a name that is always
0 would be worse than one that is missing.
"""

from kvcellar.telemetry.aliases import Alias

__all__ = ["LMCACHE_METRICS"]


def _counter(name: str, text: str, source: str, labels: str = "") -> Alias:
    return Alias(f"lmcache_mp_{name}_total", "counter", text, f"kvcellar_{source}", "", labels)


def _gauge(name: str, text: str, source: str, divisor: str = "") -> Alias:
    by = f"kvcellar_{divisor}" if divisor else ""
    return Alias(f"lmcache_mp_{name}", "gauge", text, f"kvcellar_{source}", by)


LMCACHE_METRICS = (
    _counter("lookups", "Lookups answered.", "lookups_total"),
    _counter("lookup_requested", "Tokens of prompts that were looked up.", "lookup_tokens_total"),
    _counter("lookup_hit", "Tokens of prompts that lookups found.", "lookup_hit_tokens_total"),
    _counter("l1_read", "Chunks that ranks read from L1.", "loaded_chunks_total"),
    _counter("l1_write", "Chunks that became visible in L1.", "stored_chunks_total"),
    _counter("l1_evicted", "Chunks evicted from L1.", "evicted_chunks_total"),
    _counter(
        "l1_allocation_failure",
        "Chunks not stored because no memory could be had.",
        "full_chunks_total",
        'during="l1_store"',
    ),
    _counter("num_finished_retrieves", "Loads that ranks finished.", "loads_total:ok"),
    _counter("num_chunks_loaded", "Chunks that ranks loaded.", "loaded_chunks_total"),
    _gauge("l1_memory_usage_bytes", "Bytes of L1 in use.", "l1_used_bytes"),
    _gauge("l1_usage_ratio", "L1 in use, from 0 to 1.", "l1_used_bytes", "l1_configured_bytes"),
)
"""What `/metrics` of `lmcache server` shows beside kvcellar's own families."""
