"""Metrics under the names of another product, where those mean the same.

A dashboard that somebody has goes on working. Each alias is a value of ours, divided by another
where theirs is a ratio; nothing is counted for it. The tables are in `compat`; the HTTP process
renders them after our own families.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Alias", "render_aliases"]


class Alias(NamedTuple):
    """One family under another's name.

    Attributes:
        name: theirs, as Prometheus shows it.
        kind: counter or gauge.
        help: one line for people.
        source: our family whose value it is; `family:label` picks one labelled value.
        divisor: our family to divide by; empty for none.
        labels: what stands between the braces; empty for none.
    """

    name: str
    kind: str
    help: str
    source: str
    divisor: str = ""
    labels: str = ""


# Any: see `metrics.render`.
def render_aliases(values: Mapping[str, Any], aliases: Iterable[Alias]) -> str:
    """Return the Prometheus text of the aliases, empty for none."""
    lines = []
    for alias in aliases:
        value = _value(values, alias.source)
        if alias.divisor:
            value /= _value(values, alias.divisor) or 1
        lines.append(f"# HELP {alias.name} {alias.help}")
        lines.append(f"# TYPE {alias.name} {alias.kind}")
        labels = f"{{{alias.labels}}}" if alias.labels else ""
        lines.append(f"{alias.name}{labels} {value!r}")
    return "\n".join([*lines, ""]) if lines else ""


def _value(values: Mapping[str, Any], source: str) -> float:
    family, _, label = source.partition(":")
    value = values.get(family) or 0
    found: float = value.get(label, 0) if isinstance(value, Mapping) else value
    return found
