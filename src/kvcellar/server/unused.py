"""Stops a server that nobody uses: no engine has been connected for a while.

An engine that starts its server (`kvcellar.autostart`) must not own it, or the cache would go with
the first engine that ends; and nobody else would stop it. So such a server watches its own roster
and leaves some time after its last engine did. Runs on the control loop.
"""

import asyncio
from collections.abc import Callable

from kvcellar.clock import Clock
from kvcellar.telemetry.logs import EventLog

__all__ = ["UnusedWatch"]

_LOOKS = 4
_LOOK_INTERVAL_S_MAX = 1.0

_log = EventLog("kvcellar.server")


class UnusedWatch:
    """Calls once, when no engine has been there for a time."""

    def __init__(
        self,
        after_s: float,
        is_used: Callable[[], bool],
        on_unused: Callable[[], None],
        *,
        clock: Clock,
    ) -> None:
        """Look nowhere yet.

        Args:
            after_s: seconds without an engine, counted from `start` as well; 0: never.
            is_used: whether an engine is there now.
            on_unused: called once, on the loop.
            clock: tells the time.
        """
        self._after_s = after_s
        self._is_used = is_used
        self._on_unused = on_unused
        self._clock = clock
        self._used_s = clock.monotonic_s()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, on the running loop."""
        if self._after_s > 0:
            self._used_s = self._clock.monotonic_s()
            self._wait()

    def stop(self) -> None:
        """Look no more; may be called at any time."""
        if self._next is not None:
            self._next.cancel()

    def _wait(self) -> None:
        interval_s = min(_LOOK_INTERVAL_S_MAX, self._after_s / _LOOKS)
        self._next = asyncio.get_running_loop().call_later(interval_s, self._look)

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._is_used():
            self._used_s = now_s
        elif now_s - self._used_s >= self._after_s:
            _log.info("no engine uses this server", unused_s=round(now_s - self._used_s, 1))
            self._on_unused()
            return
        self._wait()
