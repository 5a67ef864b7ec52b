"""The only door to the time.

Everything that needs a time takes a `Clock`, so that a test can stand still or jump; only this
module calls `time`. The server, the client library and the connector make one `SystemClock` each.
"""

import time
from typing import Protocol

__all__ = ["Clock", "FakeClock", "SystemClock"]


class Clock(Protocol):
    """Where the time comes from."""

    def monotonic_s(self) -> float:
        """Return seconds that never go back; the zero means nothing."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970, for people to read and never to measure with."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return the wall clock in seconds since 1970."""
        return time.time()


class FakeClock:
    """A clock that a test moves by hand."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """Return the time that the test set."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the same time as `monotonic_s`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now_s += seconds
