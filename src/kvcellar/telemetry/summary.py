"""The status page in lines for people: what is there, what is wrong, who uses it.

Made from the page's plain data, so that it is the same through the engines' port and over HTTP.
Shown by `kvcellar status`, `describe kvcache` and `doctor`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvcellar.units import format_bytes

__all__ = ["status_lines"]


# Any: the page's shape is documented in `telemetry.status`.
def status_lines(
    page: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the lines.

    Args:
        page: the status page.
        metrics: every metric's value; without it the line about hits is left out.
    """
    own = page["kvcellar"]
    l1 = page["storage_manager"]["l1_manager"]
    broken = {name: reason for name, reason in own["parts"].items() if reason}
    state = "healthy" if page["is_healthy"] else "UNHEALTHY"
    yield f"node {own['node']}: {state}, kvcellar {own['version']}, up {own['uptime_s']:.0f} s"
    for name, reason in broken.items():
        yield f"  {name}: {reason}"
    for name, reason in own.get("degraded", {}).items():
        yield f"  {name}: {reason} (misses, nothing else)"
    yield _memory(l1, own["arena"])
    yield f"chunks   {own['chunks']} complete ({l1['total_object_count']} objects)"
    yield (
        f"in use   {own['leases']} leases, {own['reservations']} reservations, "
        f"{own['clients']} clients"
    )
    if metrics is not None:
        yield _hits(metrics)
    for tier in page["storage_manager"].get("l2_adapters", ()):
        trouble = f", {tier['trouble']}" if tier.get("trouble") else ""
        used = format_bytes(tier["total_bytes_used"])
        yield f"tier     {tier['name']}: {tier['stored_object_count']} chunks, {used}{trouble}"
    for instance in own["instances"]:
        yield from _instance(instance)


def _instance(instance: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"instance {instance['name']}: {instance['model'] or 'model unknown'}, "
        f"{len(instance['ranks'])} of {instance['world_size']} ranks, "
        f"{instance['chunk_tokens'] or '?'} tokens a chunk"
    )
    if instance.get("refusal"):
        yield f"  nothing is cached for it: {instance['refusal']}"
    counts = {name: count for name, count in instance.get("counts", {}).items() if count}
    if counts:
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        yield f"  its chunks: {shown}"


def _memory(l1: Mapping[str, Any], arena: Mapping[str, Any]) -> str:
    used = format_bytes(l1["memory_used_bytes"])
    configured = format_bytes(l1["memory_configured_bytes"])
    text = f"memory   {used} used of {configured}"
    if arena["steps_ready"] < arena["steps"]:
        text += f", {format_bytes(arena['ready_bytes'])} ready so far"
    if arena["waits_for_bytes"]:
        text += f", waits until {format_bytes(arena['waits_for_bytes'])} more are free"
    return text


def _hits(metrics: Mapping[str, Any]) -> str:
    asked = metrics["kvcellar_lookup_chunks_total"]
    hit = metrics["kvcellar_lookup_hit_chunks_total"]
    share = f" ({100 * hit / asked:.0f} %)" if asked else ""
    return (
        f"lookups  {metrics['kvcellar_lookups_total']}, found {hit} of {asked} chunks{share}; "
        f"stored {metrics['kvcellar_stored_chunks_total']}, "
        f"evicted {metrics['kvcellar_evicted_chunks_total']}"
    )
