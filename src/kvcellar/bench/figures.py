"""From many measured durations to the few numbers that a table shows.

A benchmark on a machine that others use measures their work as well; a median is what it cost
most of the time, and a 99th percentile says what a caller has to reckon with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcellar.clock import Clock

__all__ = ["Latency", "latency", "median", "percentile", "sample"]

_WARM_UP = 3
_SAMPLES_MIN = 100
_SAMPLES_MAX = 50_000


@dataclass(frozen=True)
class Latency:
    """Durations of one kind of call, in seconds.

    Attributes:
        count: calls that were measured.
        p50_s: half of them took no longer.
        p99_s: 99 of 100 took no longer; with fewer calls the slowest.
    """

    count: int
    p50_s: float
    p99_s: float


def latency(durations_s: Sequence[float]) -> Latency:
    """Return the figures of at least one measured duration."""
    return Latency(len(durations_s), percentile(durations_s, 0.5), percentile(durations_s, 0.99))


def median(values: Sequence[float]) -> float:
    """Return the middle one of at least one value; of an even number the mean of the two."""
    assert values, "nothing was measured"
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed.

    Args:
        values: at least one, in any order.
        share: above 0 and at most 1.
    """
    assert values, "nothing was measured"
    assert 0 < share <= 1, share
    return sorted(values)[math.ceil(share * len(values)) - 1]


def sample(call: Callable[[], float], *, seconds: float, clock: Clock) -> Latency:
    """Make a call again and again for some seconds, and at least 100 times.

    Args:
        call: does it once and returns how long the part took that is to be measured.
        seconds: how long to go on.
        clock: says when that is over.
    """
    for _ in range(_WARM_UP):
        call()
    took: list[float] = []
    end_s = clock.monotonic_s() + seconds
    while len(took) < _SAMPLES_MIN or (clock.monotonic_s() < end_s and len(took) < _SAMPLES_MAX):
        took.append(call())
    return latency(took)
