"""What the pages show of the tiers: LMCache's shapes in /status, and every metric's value.

Called on the control loop for each scrape; reads numbers that are there already. A tier's part is
what the tier process reported last, so its counters begin again with each of its lives.
"""

from typing import Any

import msgspec

from kvcellar.protocol.tier_messages import TierFacts
from kvcellar.server.tiers import Tiers

__all__ = ["tier_metrics", "tier_status"]


# Any: plain data for the wire.
def tier_status(tiers: Tiers | None) -> dict[str, Any]:
    """Return what goes into the page's `storage_manager`."""
    if tiers is None:
        return {"l2_adapters": [], "num_l2_adapters": 0}
    fetches, writes = tiers.fetches, tiers.writes
    return {
        "l2_adapters": [
            _adapter(index, tier, is_up=tiers.is_up) for index, tier in enumerate(tiers.shown)
        ],
        "num_l2_adapters": tiers.count,
        "prefetch_controller": {
            "is_healthy": not tiers.check(),
            "max_in_flight": fetches.in_flight_max,
            "in_flight_request_count": fetches.in_flight,
            "pending_queue_size": fetches.queued,
            "num_l2_adapters": tiers.count,
            "num_active_adapters": sum(not tier.trouble for tier in tiers.shown),
        },
        "store_controller": {
            "is_healthy": not tiers.check(),
            "pending_chunk_count": writes.chunks,
            "pending_bytes": writes.bytes,
        },
    }


def _adapter(index: int, tier: TierFacts, *, is_up: bool) -> dict[str, Any]:
    own = msgspec.structs.asdict(tier)
    return {
        "index": index,
        "is_healthy": is_up and not tier.trouble,
        "type": tier.kind,
        "total_bytes_used": tier.used_bytes,
        "max_capacity_bytes": tier.cap_bytes,
        "stored_object_count": tier.chunks,
        **{name: value for name, value in own.items() if name not in _SHOWN},
    }


_SHOWN = frozenset({"kind", "used_bytes", "cap_bytes", "chunks", "batch_max"})


# Any: see `telemetry.metrics.render`.
def tier_metrics(tiers: Tiers | None) -> dict[str, Any]:
    """Return the values of the families of `telemetry.tier_metrics`."""
    if tiers is None:
        return {}
    meters = tiers.meters
    by_tier = {tier.name: tier for tier in tiers.shown}
    values: dict[str, Any] = {
        f"tier_{name}": {label: getattr(tier, field) for label, tier in by_tier.items()}
        for name, field in _FIELDS.items()
    }
    values |= {
        "tier_up": {
            label: int(tiers.is_up and not tier.trouble) for label, tier in by_tier.items()
        },
        "tier_fetches_total": meters.fetches,
        "tier_fetches_late_total": meters.fetches_late,
        "tier_fetched_chunks_total": meters.fetched_chunks,
        "tier_fetch_seconds": msgspec.to_builtins(meters.fetch_s.snapshot()),
        "tier_fetches_in_flight": tiers.fetches.in_flight,
        "tier_unwritten_chunks_total": meters.unwritten_chunks,
        "tier_queued_bytes": tiers.writes.bytes,
        "tier_told_chunks_total": meters.told_chunks,
        "tier_untold_lookups_total": meters.untold_lookups,
        "tier_restarts_total": meters.restarts,
    }
    return {f"kvcellar_{name}": value for name, value in values.items()}


_FIELDS = {
    "lookups_total": "lookups",
    "asked_chunks_total": "asked_chunks",
    "found_chunks_total": "found_chunks",
    "read_chunks_total": "read_chunks",
    "read_bytes_total": "read_bytes",
    "read_seconds_total": "read_s",
    "written_chunks_total": "written_chunks",
    "written_bytes_total": "written_bytes",
    "write_seconds_total": "write_s",
    "full_chunks_total": "full_chunks",
    "evicted_chunks_total": "evicted",
    "damaged_chunks_total": "damaged",
    "failures_total": "failures",
    "used_bytes": "used_bytes",
    "cap_bytes": "cap_bytes",
    "chunks": "chunks",
}
