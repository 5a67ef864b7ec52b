"""One point in time that several waits in a row share.

A wait that is made of steps (dial, send, receive) must not grant each step the whole time. The
client library makes one `Deadline` for each call and hands it down; every step asks what is left.
"""

from kvcellar.clock import Clock

__all__ = ["Deadline"]


class Deadline:
    """A moment `timeout_s` seconds after it was made."""

    __slots__ = ("_clock", "_end_s")

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._end_s = clock.monotonic_s() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds that are left, 0.0 when none are."""
        return max(0.0, self._end_s - self._clock.monotonic_s())

    def remaining_ms(self) -> int:
        """Return the milliseconds that are left, rounded up, for `poll`; 0 only at the end."""
        return int(-(-self.remaining_s() * 1000.0 // 1.0))
