"""Eviction in the background, for those who set `--eviction-trigger-watermark`.

The store evicts when memory is asked for, so nobody needs this for speed; who sets the flag wants
L1 to stay below a level. Looked at a few times a second, in pieces, so that no lookup waits for it.
"""

import asyncio

from kvcellar.store.machine import Store
from kvcellar.telemetry.logs import EventLog

__all__ = ["Watermark"]

_INTERVAL_S = 0.25
_VICTIMS_A_TURN = 128

_log = EventLog("kvcellar.server")


class Watermark:
    """Keeps one store below a level, on the running loop."""

    def __init__(self, store: Store, *, size_bytes: int, watermark: float, ratio: float) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            store: where to evict.
            size_bytes: of L1.
            watermark: the fraction of it from which on chunks leave.
            ratio: the fraction of it that is made free then.
        """
        self._store = store
        self._high_bytes = int(size_bytes * watermark)
        self._low_bytes = max(0, int(size_bytes * (watermark - ratio)))
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._store.statistics.used_bytes >= self._high_bytes:
            self._evict()
        else:
            self.start()

    def _evict(self) -> None:
        gone = self._store.room.evict_down_to(self._low_bytes, victims_max=_VICTIMS_A_TURN)
        if gone < _VICTIMS_A_TURN:
            _log.debug("evicted below the watermark", used_bytes=self._store.statistics.used_bytes)
            self.start()
        else:
            self._timer = asyncio.get_running_loop().call_later(0, self._evict)
