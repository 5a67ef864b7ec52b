"""`kvcellar status`: what a server holds, who uses it, and whether all of it works."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvcellar.cli.asking import connect, read_asking
from kvcellar.protocol.messages import Status, StatusReply
from kvcellar.units import format_bytes

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Print a server's status; return 0 if it is healthy and 1 if not.

    Raises:
        KVCellarError: nobody answers.
    """
    asking = read_asking(arguments, program="kvcellar status")
    with connect(asking) as session:
        reply = session.call(Status, timeout_s=asking.timeout_s)
    assert isinstance(reply, StatusReply), reply
    page = reply.status
    metrics = page.pop("metrics")
    if asking.as_json:
        print(json.dumps(page, indent=2))
    else:
        print("\n".join(_lines(page, metrics)))
    return 0 if page["is_healthy"] else 1


# Any: the page's shape is documented in telemetry.status.
def _lines(page: dict[str, Any], metrics: dict[str, Any]) -> Iterator[str]:
    own = page["kvcellar"]
    l1 = page["storage_manager"]["l1_manager"]
    broken = {name: reason for name, reason in own["parts"].items() if reason}
    state = "healthy" if page["is_healthy"] else "UNHEALTHY"
    yield f"node {own['node']}: {state}, kvcellar {own['version']}, up {own['uptime_s']:.0f} s"
    for name, reason in broken.items():
        yield f"  {name}: {reason}"
    yield _memory(l1, own["arena"])
    yield f"chunks   {own['chunks']} complete ({l1['total_object_count']} objects)"
    yield (
        f"in use   {own['leases']} leases, {own['reservations']} reservations, "
        f"{own['clients']} clients"
    )
    yield _hits(metrics)
    for instance in own["instances"]:
        yield (
            f"instance {instance['name']}: {instance['model'] or 'model unknown'}, "
            f"{len(instance['ranks'])} of {instance['world_size']} ranks, "
            f"{instance['chunk_tokens'] or '?'} tokens a chunk"
        )


def _memory(l1: dict[str, Any], arena: dict[str, Any]) -> str:
    used = format_bytes(l1["memory_used_bytes"])
    configured = format_bytes(l1["memory_configured_bytes"])
    text = f"memory   {used} used of {configured}"
    if arena["steps_ready"] < arena["steps"]:
        text += f", {format_bytes(arena['ready_bytes'])} ready so far"
    if arena["waits_for_bytes"]:
        text += f", waits until {format_bytes(arena['waits_for_bytes'])} more are free"
    return text


def _hits(metrics: dict[str, Any]) -> str:
    asked = metrics["kvcellar_lookup_chunks_total"]
    hit = metrics["kvcellar_lookup_hit_chunks_total"]
    share = f" ({100 * hit / asked:.0f} %)" if asked else ""
    return (
        f"lookups  {metrics['kvcellar_lookups_total']}, found {hit} of {asked} chunks{share}; "
        f"stored {metrics['kvcellar_stored_chunks_total']}, "
        f"evicted {metrics['kvcellar_evicted_chunks_total']}"
    )
