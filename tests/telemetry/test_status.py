"""The status page keeps LMCache's paths and says nothing that is not so."""

import json

import msgspec

from kvcellar.telemetry.status import (
    ArenaFacts,
    InstanceFacts,
    NodeFacts,
    StoreFacts,
    status_page,
)

FACTS = NodeFacts(
    version="0.1.0",
    protocol_version=1,
    boot_id="ab" * 16,
    node="prefiller",
    address="@kvcellar/5555/abababab",
    chunk_tokens=256,
    uptime_s=12.3456,
    clients=3,
    parts={"arena": "", "door": "", "http": "", "socket": "", "store": ""},
    arena=ArenaFacts(
        configured_bytes=1000, ready_bytes=500, step_bytes=250, steps_ready=2, steps=4,
        waits_for_bytes=7,
    ),
    store=StoreFacts(
        eviction_policy="LRU", epoch=2, used_bytes=250, objects=8, chunks=4, leases=1,
        leased_chunks=2, reservations=1, reserved_chunks=3, namespaces=1,
    ),
    instances=(
        InstanceFacts(
            name="engine-1", model="llama", software="vllm", world_size=2, ranks=(0, 1),
            scheduler=True, chunk_tokens=256, namespace="00ff",
        ),
    ),
)  # fmt: skip


def test_the_paths_that_guides_read_are_where_they_read_them():
    page = json.loads(json.dumps(status_page(FACTS)))
    assert page["is_healthy"] is True
    assert page["chunk_size"] == 256
    l1 = page["storage_manager"]["l1_manager"]
    assert l1["total_object_count"] == 8
    assert l1["memory_used_bytes"] == 250
    assert l1["memory_configured_bytes"] == 1000
    assert l1["memory_usage_ratio"] == 0.25
    assert l1["read_locked_count"] == 2
    assert l1["write_locked_count"] == 3
    assert page["storage_manager"]["l1_eviction_controller"]["eviction_policy"] == "LRU"
    assert page["cache_context_meta"] == {"engine-1": {"model_name": "llama", "world_size": 2}}
    assert page["kvcellar"]["arena"]["waits_for_bytes"] == 7
    assert page["kvcellar"]["instances"][0]["ranks"] == [0, 1]


def test_any_broken_part_makes_the_page_unhealthy():
    for part in FACTS.parts:
        parts = dict(FACTS.parts) | {part: "it is dead"}
        page = status_page(msgspec.structs.replace(FACTS, parts=parts))
        assert page["is_healthy"] is False
        l1_lives = part not in {"arena", "store"}
        assert page["storage_manager"]["is_healthy"] is l1_lives
        assert page["kvcellar"]["parts"][part] == "it is dead"
