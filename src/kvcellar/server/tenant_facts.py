"""What the pages show of tenants: the largest by themselves, all others in one sum.

A page may be read by anybody, so a tenant appears there by the digest of its salt (`label_of`);
the quota commands print both. Called on the control loop for each scrape: linear in the tenants,
some 10 ms for 100,000 of them.
"""

from typing import Any

from kvcellar.store.machine import Store
from kvcellar.tenancy.names import label_of

__all__ = ["TENANTS_SHOWN", "tenant_metrics", "tenant_status"]

TENANTS_SHOWN = 50
_OTHERS = "_others"


# Any: plain data for the wire.
def tenant_status(store: Store) -> dict[str, Any]:
    """Return the page's part on tenants.

    `tenants` counts those that hold something or have a quota; `share_bytes` is what one without
    a quota counts as having; `largest` lists `TENANTS_SHOWN` of them, `others_used_bytes` is what
    the rest holds.
    """
    shares = store.catalog.shares
    largest = shares.largest(TENANTS_SHOWN)
    return {
        "tenants": len(shares),
        "share_bytes": shares.share_bytes,
        "largest": [
            {
                "tenant": label_of(tenant.name),
                "used_bytes": tenant.used_bytes,
                "limit_bytes": tenant.limit_bytes,
                "evicted_chunks": tenant.evicted,
            }
            for tenant in largest
        ],
        "others_used_bytes": shares.used_bytes - sum(tenant.used_bytes for tenant in largest),
    }


# Any: see `telemetry.metrics.render`.
def tenant_metrics(store: Store) -> dict[str, Any]:
    """Return the values of the tenants' metrics."""
    shares, statistics = store.catalog.shares, store.statistics
    largest = shares.largest(TENANTS_SHOWN)
    used = {label_of(tenant.name): tenant.used_bytes for tenant in largest}
    used[_OTHERS] = shares.used_bytes - sum(used.values())
    return {
        "kvcellar_tenants": len(shares),
        "kvcellar_tenant_used_bytes": used,
        "kvcellar_tenant_quota_bytes": {
            label_of(tenant.name): tenant.limit_bytes
            for tenant in largest
            if tenant.limit_bytes is not None
        },
        "kvcellar_quota_evicted_chunks_total": statistics.evicted_quota,
        "kvcellar_quota_refusals_total": statistics.refused_quota,
    }
