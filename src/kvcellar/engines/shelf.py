"""The arenas that a worker has mapped: the present one, and older ones until their loads end.

A load must not fail because the server died, so the arena of a dead server stays mapped until a
new server's arrives. Then the old one is *retired*: loads that were handed out before may end on
it, for at most `RETIRED_S`, and it is unmapped off the step's thread, because the new server can
only use memory that is free. The keeper's thread installs, the step's thread takes holds, the
copy threads use and give them back, the store lane sweeps.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvcellar.clock import Clock
from kvcellar.memory.arena import ArenaView

__all__ = ["RETIRED_S", "ArenaShelf", "Hold"]

RETIRED_S = 5.0
"""Seconds for which loads may go on reading the arena of an earlier life of the server."""


class _Shelved:
    """One mapping and who needs it; guarded by the shelf's lock."""

    __slots__ = ("arena", "boot_id", "holds", "retired_at_s", "users")

    def __init__(self, boot_id: bytes, arena: ArenaView) -> None:
        self.boot_id = boot_id
        self.arena = arena
        self.holds = 0
        self.users = 0
        self.retired_at_s: float | None = None


class Hold:
    """A job's claim to one arena; given back once, with `ArenaShelf.give_back`."""

    __slots__ = ("shelved",)

    def __init__(self, shelved: _Shelved) -> None:
        self.shelved = shelved


class ArenaShelf:
    """Maps boot ids to arenas; thread-safe."""

    def __init__(
        self, clock: Clock, *, before_close: Callable[[ArenaView], None] = lambda _: None
    ) -> None:
        """Begin empty.

        Args:
            clock: for how long an arena has been retired.
            before_close: called with each arena that is about to be unmapped, off the step's
                thread.
        """
        self._clock = clock
        self._before_close = before_close
        self._lock = threading.Lock()
        self._current: _Shelved | None = None
        self._retired: list[_Shelved] = []

    @property
    def boot_id(self) -> bytes | None:
        """The life of the server whose arena is the present one; None before the first."""
        current = self._current
        return None if current is None else current.boot_id

    def install(self, boot_id: bytes, arena: ArenaView) -> None:
        """Take over the arena of the server's present life and retire the one before.

        A second mapping of an arena that is here already is closed at once.
        """
        with self._lock:
            current = self._current
            is_known = current is not None and current.boot_id == boot_id
            if not is_known:
                if current is not None:
                    current.retired_at_s = self._clock.monotonic_s()
                    self._retired.append(current)
                self._current = _Shelved(boot_id, arena)
        if is_known:
            arena.close()

    def take(self, boot_id: bytes) -> Hold | None:
        """Return a hold on the present arena, or None when it is another life's or none."""
        with self._lock:
            shelved = self._current
            if shelved is None or shelved.boot_id != boot_id:
                return None
            shelved.holds += 1
            return Hold(shelved)

    def give_back(self, hold: Hold) -> None:
        """End a hold."""
        with self._lock:
            hold.shelved.holds -= 1

    @contextlib.contextmanager
    def reading(self, hold: Hold) -> Iterator[ArenaView | None]:
        """Give the arena for one chunk's copy, or None when it was retired too long ago."""
        shelved = hold.shelved
        with self._lock:
            is_usable = not self._is_over(shelved)
            shelved.users += is_usable
        try:
            yield shelved.arena if is_usable else None
        finally:
            with self._lock:
                shelved.users -= is_usable

    def sweep(self) -> None:
        """Unmap retired arenas that nobody holds, or whose time is over; may take a while."""
        with self._lock:
            free = [
                shelved
                for shelved in self._retired
                if shelved.users == 0 and (shelved.holds == 0 or self._is_over(shelved))
            ]
            self._retired = [shelved for shelved in self._retired if shelved not in free]
        for shelved in free:
            self._before_close(shelved.arena)
            shelved.arena.close()

    def close(self) -> None:
        """Unmap everything that no copy is using; what is in use goes with the process."""
        with self._lock:
            if self._current is not None:
                self._current.retired_at_s = self._clock.monotonic_s() - RETIRED_S
                self._retired.append(self._current)
                self._current = None
            for shelved in self._retired:
                shelved.retired_at_s = self._clock.monotonic_s() - RETIRED_S
        self.sweep()

    def _is_over(self, shelved: _Shelved) -> bool:
        retired_at_s = shelved.retired_at_s
        return retired_at_s is not None and self._clock.monotonic_s() - retired_at_s >= RETIRED_S
