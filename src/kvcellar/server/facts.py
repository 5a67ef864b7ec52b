"""What the pages show, gathered from the node: status, and every metric's value.

Called on the control loop for each scrape, so it reads numbers that are there already and walks
nothing but the instances. The shapes are in `telemetry`.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

from kvcellar import __version__
from kvcellar.protocol.messages import PROTOCOL_VERSION
from kvcellar.server.gates import gate_metrics
from kvcellar.server.instances import Instance
from kvcellar.server.node import Node
from kvcellar.server.tenant_facts import tenant_metrics, tenant_status
from kvcellar.server.tier_facts import tier_metrics, tier_status
from kvcellar.telemetry.status import (
    ArenaFacts,
    InstanceFacts,
    NodeFacts,
    StoreFacts,
    status_page,
)

__all__ = ["PARTS", "status_with_metrics"]

PARTS = ("arena", "door", "http", "socket", "store")
"""The parts of the server that can break, each a value of the `healthy` metric's label."""

INSTANCES_SHOWN = 100
"""A page lists no more instances than these; the metrics count all."""


# Any: plain data for the wire; its shape is `telemetry.status.status_page`.
def status_with_metrics(node: Node) -> dict[str, Any]:
    """Return the status page, with every metric's value under `metrics`."""
    parts = dict.fromkeys(PARTS, "") | node.parts()
    page = status_page(_facts(node, parts))
    page["storage_manager"] |= tier_status(node.tiers)
    page["kvcellar"]["degraded"] = {name: text for name, text in node.degraded().items() if text}
    page["kvcellar"] |= tenant_status(node.store)
    page["metrics"] = _metrics(node, parts) | tier_metrics(node.tiers) | tenant_metrics(node.store)
    page["metrics"] |= gate_metrics(islice(node.roster.instances.values(), INSTANCES_SHOWN))
    return page


def _facts(node: Node, parts: Mapping[str, str]) -> NodeFacts:
    statistics = node.store.statistics
    return NodeFacts(
        version=__version__,
        protocol_version=PROTOCOL_VERSION,
        boot_id=node.boot_id.hex(),
        node=node.config.instance_id,
        address=node.address,
        chunk_tokens=node.config.chunk_tokens,
        uptime_s=node.clock.monotonic_s() - node.started_s,
        clients=len(node.roster),
        parts=parts,
        arena=ArenaFacts(
            configured_bytes=node.arena.size_bytes,
            ready_bytes=statistics.total_bytes,
            step_bytes=node.arena.step_bytes,
            steps_ready=node.steps_ready,
            steps=node.arena.steps,
            waits_for_bytes=node.waits_for_bytes(),
        ),
        store=StoreFacts(
            eviction_policy=node.config.eviction_policy,
            epoch=node.store.epoch,
            used_bytes=statistics.used_bytes,
            objects=statistics.objects,
            chunks=statistics.chunks,
            leases=statistics.leases,
            leased_chunks=statistics.leased_chunks,
            reservations=statistics.reservations,
            reserved_chunks=statistics.reserved_chunks,
            namespaces=statistics.namespaces,
        ),
        instances=tuple(
            _instance(instance)
            for instance in islice(node.roster.instances.values(), INSTANCES_SHOWN)
        ),
    )


def _instance(instance: Instance) -> InstanceFacts:
    hello = next(instance.members()).hello
    return InstanceFacts(
        name=instance.name,
        model=hello.model,
        software=hello.software,
        world_size=instance.world_size,
        ranks=tuple(sorted(instance.workers)),
        scheduler=instance.scheduler is not None,
        chunk_tokens=instance.chunk_tokens if instance.namespace is not None else 0,
        namespace=instance.namespace.hex() if instance.namespace is not None else "",
        refusal=instance.refusal,
        counts=instance.counts,
    )


# Any: see `telemetry.metrics.render`.
def _metrics(node: Node, parts: Mapping[str, str]) -> dict[str, Any]:
    statistics = node.store.statistics
    meters = node.meters
    values = {
        "lookups_total": statistics.lookups,
        "lookup_chunks_total": statistics.chunks_asked,
        "lookup_hit_chunks_total": statistics.chunks_hit,
        "stored_chunks_total": statistics.stored,
        "evicted_chunks_total": statistics.evicted,
        "full_chunks_total": statistics.refused_full,
        "busy_chunks_total": statistics.busy,
        "dropped_chunks_total": statistics.dropped,
        "damaged_chunks_total": statistics.damaged,
        "second_writers_total": statistics.second_writers,
        "loads_total": {"ok": meters.loads_ok, "failed": meters.loads_failed},
        "loaded_chunks_total": meters.loaded_chunks,
        "loaded_bytes_total": meters.loaded_bytes,
        "error_replies_total": dict(meters.error_replies),
        "connections_total": meters.connections,
        "peers_refused_total": dict(meters.peers_refused),
        "client_deaths_total": meters.client_deaths,
        "engine_chunks_total": meters.engine_chunks,
        "lookup_tokens_total": meters.lookup_tokens,
        "lookup_hit_tokens_total": meters.lookup_hit_tokens,
        "http_restarts_total": meters.http_restarts,
        "healthy": {name: int(not reason) for name, reason in parts.items()},
        "objects": statistics.objects,
        "chunks": statistics.chunks,
        "l1_used_bytes": statistics.used_bytes,
        "l1_ready_bytes": statistics.total_bytes,
        "l1_configured_bytes": node.arena.size_bytes,
        "leases": statistics.leases,
        "leased_chunks": statistics.leased_chunks,
        "reservations": statistics.reservations,
        "namespaces": statistics.namespaces,
        "epoch": node.store.epoch,
        "clients": len(node.roster),
        "instances": len(node.roster.instances),
        "uptime_seconds": node.clock.monotonic_s() - node.started_s,
        "build_info": {__version__: 1},
        "lookup_seconds": msgspec.to_builtins(meters.lookup_s.snapshot()),
        "reserve_seconds": msgspec.to_builtins(meters.reserve_s.snapshot()),
        "commit_seconds": msgspec.to_builtins(meters.commit_s.snapshot()),
        "store_seconds": msgspec.to_builtins(meters.store_s.snapshot()),
        "load_seconds": msgspec.to_builtins(meters.load_s.snapshot()),
    }
    return {f"kvcellar_{name}": value for name, value in values.items()}
