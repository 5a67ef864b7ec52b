"""Why a chunk is not there: what the store remembers of those that left or never came.

A miss alone says nothing. With this, a person who asks why a prompt did not hit is told whether
its chunk was evicted, cleared, damaged, deleted, or never stored for lack of memory. Bounded, and
kept by eight bytes of the key: enough to find the reason, no help to anybody else. Written by the
store where it happens, read by the server for `kvcellar why-miss`. Pure.
"""

from typing import NamedTuple

__all__ = ["Departure", "Departures", "Reason"]

_KEY_BYTES = 8
_KEYS_MAX = 32_768
_CLEARS_MAX = 64


class Reason:
    """Why a chunk is not in the catalogue."""

    EVICTED = "evicted"
    """It left to make room."""
    CLEARED = "cleared"
    """The cache was cleared."""
    DAMAGED = "damaged"
    """A reader found a seal that did not match."""
    DELETED = "deleted"
    """Somebody deleted it by its key."""
    FULL = "full"
    """It was never stored: no memory was to be had."""
    DROPPED = "dropped"
    """It was never complete: a rank failed or died, or the cache was cleared meanwhile."""


class Departure(NamedTuple):
    """What is known of one key.

    Attributes:
        reason: see `Reason`.
        when_s: on the clock that the store is told of, at most one reservation before it happened.
    """

    reason: str
    when_s: float


class Departures:
    """The last chunks that left or never came, the newest reason for each.

    Attributes:
        now_s: the time now as the store was told last.
    """

    def __init__(self, keys_max: int = _KEYS_MAX) -> None:
        self.now_s = 0.0
        self._keys_max = keys_max
        self._known: dict[bytes, Departure] = {}
        self._clears: dict[bytes, float] = {}

    def note(self, key: bytes, reason: str) -> None:
        """Remember why `key` is not there. O(1)."""
        known, short = self._known, key[:_KEY_BYTES]
        known.pop(short, None)
        known[short] = Departure(reason, self.now_s)
        if len(known) > self._keys_max:
            del known[next(iter(known))]

    def note_clear(self, namespace: bytes) -> None:
        """Remember a clear of a namespace, or of everything where it is empty.

        Its chunks are not noted one by one: there may be millions, and one line says it all.
        """
        clears = self._clears
        clears.pop(namespace, None)
        clears[namespace] = self.now_s
        if len(clears) > _CLEARS_MAX:
            del clears[next(iter(clears))]

    def find(self, key: bytes) -> Departure | None:
        """Return why `key` left or never came, None where nothing is known."""
        return self._known.get(key[:_KEY_BYTES])

    def last_clear_s(self, namespace: bytes) -> float | None:
        """Return when chunks of a namespace were cleared last, None where they were not."""
        times = [self._clears[name] for name in (namespace, b"") if name in self._clears]
        return max(times, default=None)
