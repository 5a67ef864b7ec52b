"""Every metric of the node, declared once, and their Prometheus text.

A family exists from the first scrape on, also while nothing happened: a dashboard that shows 'no
data' until the first failure is a trap. Values are read from the status page's plain data, so
that a counter has one source; labels have few values, all known here. The HTTP process renders.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvcellar.telemetry.families import Family
from kvcellar.telemetry.families import counter as _counter
from kvcellar.telemetry.families import gauge as _gauge
from kvcellar.telemetry.families import histogram as _histogram
from kvcellar.telemetry.histogram import HistogramSnapshot
from kvcellar.telemetry.tier_metrics import TIER_FAMILIES

__all__ = ["CONTENT_TYPE", "FAMILIES", "Family", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


FAMILIES = (
    _counter("lookups", "Lookups answered."),
    _counter("lookup_chunks", "Chunks that lookups asked for."),
    _counter("lookup_hit_chunks", "Chunks that lookups found."),
    _counter("lookup_tokens", "Tokens of prompts that were looked up."),
    _counter("lookup_hit_tokens", "Tokens of prompts that lookups found."),
    _counter("stored_chunks", "Chunks that became visible."),
    _counter("evicted_chunks", "Chunks evicted to make room."),
    _counter("quota_evicted_chunks", "Chunks evicted because their tenant reached its quota."),
    _counter("quota_refusals", "Reservations cut short because a quota had no room."),
    _counter("full_chunks", "Chunks not stored because no memory could be had."),
    _counter("busy_chunks", "Chunks not stored because another writer was storing them."),
    _counter("dropped_chunks", "Reserved chunks that never became visible."),
    _counter("damaged_chunks", "Chunks removed because a seal did not match."),
    _counter("second_writers", "Reservations admitted beside one that was older than 2 s."),
    _counter("loads", "Loads that ranks reported.", "result"),
    _counter("loaded_chunks", "Chunks that ranks read from slots."),
    _counter("loaded_bytes", "Bytes that ranks read from slots."),
    _counter("gate_taken_hits", "Hits that an engine's gate let load.", "instance"),
    _counter("gate_shortened_hits", "Hits of which it let the first part load.", "instance"),
    _counter("gate_explored_hits", "Hits that it let load only to learn.", "instance"),
    _counter("gate_refused_hits", "Hits that it had computed, as the quicker way.", "instance"),
    _counter("gate_regret_seconds", "Time lost against the way it did not choose.", "instance"),
    _counter("error_replies", "Requests answered with an error, by its code.", "code"),
    _counter("connections", "Connections accepted on the Unix socket."),
    _counter("peers_refused", "Connections that never got a welcome, by reason.", "reason"),
    _counter("client_deaths", "Client processes that ended without a goodbye."),
    _counter("engine_chunks", "Chunks that engines offered, by what became of them.", "outcome"),
    _counter("http_restarts", "Times that the HTTP process had to be started again."),
    _gauge("healthy", "1 while every part works.", "part"),
    _gauge("objects", "Complete objects: chunks times shards."),
    _gauge("chunks", "Complete chunks."),
    _gauge("l1_used_bytes", "Bytes of slots in use."),
    _gauge("l1_ready_bytes", "Bytes of the arena that hold memory."),
    _gauge("l1_configured_bytes", "Bytes that --l1-size-gb asks for."),
    _gauge("tenants", "Tenants that hold something or have a quota."),
    _gauge("tenant_used_bytes", "Bytes of slots by tenant, the largest by themselves.", "tenant"),
    _gauge("tenant_quota_bytes", "Quotas of those tenants.", "tenant"),
    _gauge("gate_prefill_token_seconds", "What computing a token takes an engine.", "instance"),
    _gauge("gate_load_overhead_seconds", "What a load costs beside its bytes.", "instance"),
    _gauge("gate_load_bytes_per_second", "Rate of an engine's long loads.", "instance"),
    _gauge("leases", "Read leases now."),
    _gauge("leased_chunks", "Chunks under a lease now."),
    _gauge("reservations", "Reservations now."),
    _gauge("namespaces", "Namespaces bound."),
    _gauge("epoch", "Rises with every clear."),
    _gauge("clients", "Client processes known now."),
    _gauge("instances", "Engine instances known now."),
    _gauge("uptime_seconds", "Seconds since the server started."),
    _gauge("build_info", "1; the label says which release runs.", "version"),
    _histogram("lookup", "Time that the server took for a lookup."),
    _histogram("reserve", "Time that the server took for a reservation."),
    _histogram("commit", "Time that the server took for a commit."),
    _histogram("store", "Time of a rank's copy out of the engine, as it reported."),
    _histogram("load", "Time of a rank's copy into the engine, as it reported."),
    *TIER_FAMILIES,
)


# Any: a value is a number, a mapping of label to number, or a histogram, as its family says.
def render(values: Mapping[str, Any]) -> str:
    """Return the Prometheus text of all families.

    Args:
        values: by family name; a histogram as the plain data of `HistogramSnapshot`. A family
            without a value shows 0 (or nothing, if it has a label).
    """
    lines: list[str] = []
    for family in FAMILIES:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines.extend(_samples(family, values.get(family.name)))
    return "\n".join(lines) + "\n"


def _samples(family: Family, value: Any) -> Iterator[str]:  # noqa: ANN401 - see `render`.
    if family.kind == "histogram":
        snapshot = (
            msgspec.convert(value, HistogramSnapshot)
            if value is not None
            else HistogramSnapshot((), (0,), 0.0)
        )
        yield from _histogram_samples(family.name, snapshot)
    elif family.label:
        for label, number in (value or {}).items():
            yield f'{family.name}{{{family.label}="{_escaped(label)}"}} {_number(number)}'
    else:
        yield f"{family.name} {_number(value or 0)}"


def _histogram_samples(name: str, snapshot: HistogramSnapshot) -> Iterator[str]:
    total = 0
    for bound, count in zip((*snapshot.bounds, float("inf")), snapshot.counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{_number(bound)}"}} {total}'
    yield f"{name}_sum {_number(snapshot.sum_s)}"
    yield f"{name}_count {total}"


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
