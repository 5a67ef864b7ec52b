"""Whether the HTTP process answers: it says so every second, and one that is silent is frozen.

Its end is the kernel's to report (`child`); that it stands still is not. Silence makes its part of
the health check fail, and after a while it is killed, so that a new one takes its place.
"""

import asyncio

from kvcellar.clock import Clock
from kvcellar.server.child import ChildProcess
from kvcellar.server.instances import Client
from kvcellar.telemetry.logs import EventLog

__all__ = ["HttpWatch"]

_SILENT_S = 5.0
_START_S = 30.0
"""How long a new process may take to its first sign: a busy machine imports slowly."""
_KILL_S = 20.0
_INTERVAL_S = 1.0

_log = EventLog("kvcellar.server")


class HttpWatch:
    """Watches one HTTP process on the running loop."""

    def __init__(self, child: ChildProcess, clock: Clock) -> None:
        """Look nowhere yet.

        Args:
            child: that process.
            clock: by which its pings are stamped; `AwakeClock`, so that nobody is blamed for a
                time in which this process stood still itself.
        """
        self._child = child
        self._clock = clock
        self._client: Client | None = None
        self._attached_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def attached(self, client: Client) -> None:
        """Take note of the client that a new process is."""
        self._client = client
        self._attached_s = self._clock.monotonic_s()

    def check(self) -> str:
        """Return what is wrong with it, empty text where nothing is."""
        silent_s = self._silent_s()
        frozen = f"the HTTP process has been silent for {silent_s:.0f} s" if silent_s else ""
        return self._child.check() or frozen

    def start(self) -> None:
        """Begin to look."""
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        silent_s = self._silent_s()
        if silent_s > _KILL_S:
            _log.warning("http process is frozen and is replaced", silent_s=silent_s)
            self._client = None
            self._child.kill()
        self.start()

    def _silent_s(self) -> float:
        """Return for how long it has been silent, 0 where that is not long."""
        if self._client is None:
            return 0.0
        heard_s = self._client.heard_s
        silent_s = self._clock.monotonic_s() - (heard_s or self._attached_s)
        return silent_s if silent_s > (_SILENT_S if heard_s else _START_S) else 0.0
