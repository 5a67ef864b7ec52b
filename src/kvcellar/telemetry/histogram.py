"""A latency histogram: fixed buckets, plain integers, no lock.

It is observed on the control loop some thousand times a second, so it is a bisection and two
additions, and nothing else; the HTTP process renders what `snapshot` gave.
"""

from bisect import bisect_left

import msgspec

__all__ = ["LATENCY_BOUNDS_S", "Histogram", "HistogramSnapshot"]

LATENCY_BOUNDS_S = (
    0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds in seconds: from a lookup of one key to a copy that stalled."""


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds in seconds, ascending; the last bucket has none.
        counts: observations in each bucket, not accumulated; one more than `bounds`.
        sum_s: all observed seconds together.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


class Histogram:
    """Counts durations in buckets."""

    __slots__ = ("_bounds", "_counts", "_sum_s")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        assert list(bounds) == sorted(bounds), bounds
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a bound belongs to the bucket that it ends."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts as they are now."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum_s)
