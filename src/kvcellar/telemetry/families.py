"""What a metric family is, and short ways to declare one. Used by `metrics` and `tier_metrics`."""

import msgspec

__all__ = ["Family", "counter", "gauge", "histogram"]


class Family(msgspec.Struct, frozen=True):
    """One metric family.

    Attributes:
        name: with unit; counters end in `_total`.
        kind: counter, gauge or histogram.
        help: one line for people.
        label: name of the one label, empty where there is none. The value is then a mapping.
    """

    name: str
    kind: str
    help: str
    label: str = ""


def counter(name: str, text: str, label: str = "") -> Family:
    """Return a family that only rises; `_total` is added to its name."""
    return Family(f"kvcellar_{name}_total", "counter", text, label)


def gauge(name: str, text: str, label: str = "") -> Family:
    """Return a family that says what is so now."""
    return Family(f"kvcellar_{name}", "gauge", text, label)


def histogram(name: str, text: str) -> Family:
    """Return a family of durations; `_seconds` is added to its name."""
    return Family(f"kvcellar_{name}_seconds", "histogram", text)
