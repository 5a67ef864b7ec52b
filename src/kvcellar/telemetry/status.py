"""The shape of the status page: LMCache's outer shape, with only what is true here.

Guides and scripts read `storage_manager.l1_manager.total_object_count` and `is_healthy`; those
paths are kept. What LMCache has and this server lacks is left out rather than shown as zero, and
what only this server has is under `kvcellar`. Building it is O(instances): it never walks chunks,
because it runs on the control loop. The server makes a `NodeFacts`; the HTTP process and
`kvcellar status` show the page.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["ArenaFacts", "InstanceFacts", "NodeFacts", "StoreFacts", "status_page"]


class ArenaFacts(msgspec.Struct, frozen=True):
    """The arena now.

    Attributes:
        configured_bytes: what `--l1-size-gb` asks for.
        ready_bytes: what holds memory.
        step_bytes: a growth step.
        steps_ready: steps that hold memory.
        steps: steps in all.
        waits_for_bytes: memory that must become free before growth goes on; 0 while it does.
    """

    configured_bytes: int
    ready_bytes: int
    step_bytes: int
    steps_ready: int
    steps: int
    waits_for_bytes: int


class StoreFacts(msgspec.Struct, frozen=True):
    """The store now; see `kvcellar.store.statistics` for the words."""

    eviction_policy: str
    epoch: int
    used_bytes: int
    objects: int
    chunks: int
    leases: int
    leased_chunks: int
    reservations: int
    reserved_chunks: int
    namespaces: int


class InstanceFacts(msgspec.Struct, frozen=True):
    """One engine process group.

    Attributes:
        name: its instance id.
        model: as its processes named it.
        software: of its processes.
        world_size: ranks.
        ranks: those that are registered.
        scheduler: whether the scheduler half is registered.
        chunk_tokens: tokens a chunk in its namespace; 0 before it is bound.
        namespace: hex; equal in instances that share chunks; empty before it is bound.
        refusal: why the server refused its namespace; then nothing is cached for it.
        counts: chunks that its scheduler half offered, by what became of them.
    """

    name: str
    model: str
    software: str
    world_size: int
    ranks: tuple[int, ...]
    scheduler: bool
    chunk_tokens: int
    namespace: str
    refusal: str = ""
    counts: Mapping[str, int] = msgspec.field(default_factory=dict)


class NodeFacts(msgspec.Struct, frozen=True):
    """Everything that a page shows.

    Attributes:
        version: of kvcellar.
        protocol_version: of the node's protocol.
        boot_id: hex.
        node: the server's `--instance-id`.
        address: of the Unix socket.
        chunk_tokens: `--chunk-size`.
        uptime_s: since the start.
        clients: client processes known.
        parts: by part of the server, what is wrong with it; empty text where nothing is.
        arena: see there.
        store: see there.
        instances: see there.
    """

    version: str
    protocol_version: int
    boot_id: str
    node: str
    address: str
    chunk_tokens: int
    uptime_s: float
    clients: int
    parts: Mapping[str, str]
    arena: ArenaFacts
    store: StoreFacts
    instances: tuple[InstanceFacts, ...]


# Any: it becomes JSON.
def status_page(facts: NodeFacts) -> dict[str, Any]:
    """Return the status page as plain data."""
    healthy = not any(facts.parts.values())
    l1_healthy = not facts.parts.get("arena") and not facts.parts.get("store")
    return {
        "is_healthy": healthy,
        "engine_type": "kvcellar",
        "chunk_size": facts.chunk_tokens,
        "hash_algorithm": "blake3",
        "active_sessions": facts.store.leases,
        "storage_manager": {
            "is_healthy": l1_healthy,
            "l1_manager": _l1_manager(facts, l1_healthy),
            "l1_eviction_controller": {
                "is_healthy": l1_healthy,
                "eviction_policy": facts.store.eviction_policy,
            },
        },
        "p2p_enabled": False,
        "cache_context_meta": {
            instance.name: {"model_name": instance.model, "world_size": instance.world_size}
            for instance in facts.instances
        },
        "kvcellar": _own(facts),
    }


def _l1_manager(facts: NodeFacts, l1_healthy: bool) -> dict[str, Any]:
    configured_bytes = facts.arena.configured_bytes
    return {
        "is_healthy": l1_healthy,
        "total_object_count": facts.store.objects,
        "read_locked_count": facts.store.leased_chunks,
        "write_locked_count": facts.store.reserved_chunks,
        "memory_used_bytes": facts.store.used_bytes,
        "memory_total_bytes": facts.arena.ready_bytes,
        "memory_configured_bytes": configured_bytes,
        "memory_usage_ratio": facts.store.used_bytes / configured_bytes,
    }


def _own(facts: NodeFacts) -> dict[str, Any]:
    return {
        "version": facts.version,
        "protocol_version": facts.protocol_version,
        "boot_id": facts.boot_id,
        "node": facts.node,
        "address": facts.address,
        "uptime_s": round(facts.uptime_s, 3),
        "parts": dict(facts.parts),
        "arena": msgspec.to_builtins(facts.arena),
        "epoch": facts.store.epoch,
        "chunks": facts.store.chunks,
        "leases": facts.store.leases,
        "leased_chunks": facts.store.leased_chunks,
        "reservations": facts.store.reservations,
        "reserved_chunks": facts.store.reserved_chunks,
        "namespaces": facts.store.namespaces,
        "clients": facts.clients,
        "instances": msgspec.to_builtins(facts.instances),
    }
