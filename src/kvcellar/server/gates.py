"""What engines tell of their gates, and how the metrics show it, by instance.

An engine's gate decides whether a hit is loaded or computed; the server decides nothing by it and
keeps what was said last, which are sums since the engine's start. Used on the control loop.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvcellar.errors import MalformedError, NotRegisteredError
from kvcellar.protocol.messages import GateReport, Ok, Reply, Role
from kvcellar.server.instances import Client, Instance

__all__ = ["gate_metrics", "gate_table"]

_METRICS = {
    "kvcellar_gate_taken_hits_total": "taken",
    "kvcellar_gate_shortened_hits_total": "shortened",
    "kvcellar_gate_explored_hits_total": "explored",
    "kvcellar_gate_refused_hits_total": "refused",
    "kvcellar_gate_regret_seconds_total": "regret_s",
    "kvcellar_gate_prefill_token_seconds": "prefill_token_s",
    "kvcellar_gate_load_overhead_seconds": "load_overhead_s",
    "kvcellar_gate_load_bytes_per_second": "load_bytes_per_s",
}


# Any: the method takes its own message; the table pairs them.
def gate_table() -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply]]]:
    """Return who may report, and who answers it."""
    return {GateReport: (frozenset({Role.SCHEDULER}), _note)}


# Any: see `telemetry.metrics.render`.
def gate_metrics(instances: Iterable[Instance]) -> dict[str, Any]:
    """Return the values of the gates' metrics."""
    known = {one.name: one.gate for one in instances if one.gate is not None}
    return {
        metric: {name: getattr(figures, field) for name, figures in known.items()}
        for metric, field in _METRICS.items()
    }


def _note(client: Client, request: GateReport) -> Reply:
    for name, value in msgspec.structs.asdict(request.figures).items():
        if not 0 <= value < math.inf:
            raise MalformedError(f"{name} {value} is below 0 or no number")
    if client.instance is None:
        raise NotRegisteredError("this client has no seat in an instance: say hello again")
    client.instance.gate = request.figures
    return Ok(request.id)
