"""A clock that stands still while this process does.

Who judges another's silence by the wall would blame it for one's own absence: after the whole node
was suspended (a paused virtual machine, SIGSTOP, a laptop's lid), everyone has been silent for as
long, and a watchdog would kill its neighbour for it. This clock counts what its own ticks saw.
"""

import asyncio

from kvcellar.clock import Clock

__all__ = ["AwakeClock"]

_TICK_S = 0.25
_STEP_MAX_S = 1.0
"""What one tick counts at most: more means that the process stood still, or starved."""


class AwakeClock:
    """Seconds in which the control loop ran; a `Clock` for those who watch others.

    Attributes:
        clock: the one that leaves nothing out.
    """

    def __init__(self, clock: Clock) -> None:
        """Count nothing before `start`.

        Args:
            clock: tells the time.
        """
        self.clock = clock
        self._seen_s = self._ticked_s = clock.monotonic_s()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to tick, on the running loop."""
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self.start)

    def stop(self) -> None:
        """Tick no more; may be called at any time."""
        if self._timer is not None:
            self._timer.cancel()

    def tick(self) -> None:
        """Count what has passed since the last tick, as far as it can have been lived through."""
        self._seen_s = self.monotonic_s()
        self._ticked_s = self.clock.monotonic_s()

    def monotonic_s(self) -> float:
        """Return seconds that never go back and leave out those in which nothing here ran."""
        return self._seen_s + min(self.clock.monotonic_s() - self._ticked_s, _STEP_MAX_S)

    def wall_s(self) -> float:
        """Return the wall clock in seconds since 1970."""
        return self.clock.wall_s()
