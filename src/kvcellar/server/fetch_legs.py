"""What a fetch asks the tiers for, one KV group of the model after the other.

Of groups that need all chunks everything behind what memory has is wanted, as far as there is no
gap. That gives an end, and of the other groups just what this end needs and memory lacks; where
the tiers lack some of it too, the end moves before the gap. A model of one group has one leg.
Nothing in here asks or reads: the fetch does, and the lookup after it decides what came of it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcellar.keys.digest import KEY_BYTES

__all__ = ["Leg", "Legs"]

_ENDS_MAX = 8
"""Ends that are tried for the groups that need only what is before one."""


class Leg(NamedTuple):
    """A part of a fetch.

    Attributes:
        group: the KV group's index.
        keys: of chunks in prefix order.
        start: so many leading ones are not asked for.
    """

    group: int
    keys: bytes
    start: int


class Legs:
    """The legs of one fetch.

    Attributes:
        keys: all keys of the lookup, group after group.
    """

    def __init__(
        self, keys: bytes, spans: Sequence[int], shard_bytes: Sequence[int], *, found: int
    ) -> None:
        """Plan the first leg.

        Args:
            keys: all keys of the lookup, group after group.
            spans: see `Bind.spans`.
            shard_bytes: see `Bind.shard_bytes`.
            found: leading chunks that the lookup found.
        """
        self.keys = keys
        self._spans = spans
        self._shard_bytes = shard_bytes
        self._found = found
        self._count = len(keys) // KEY_BYTES // len(spans)
        self._limit = self._count
        self._whole = [index for index, span in enumerate(spans) if not span]
        self._tails = [index for index, span in enumerate(spans) if span]
        self._left = [*self._whole, *self._tails]
        self._places: list[int] | None = None
        self._ends = 0

    def next(self, is_there: Callable[[bytes], bool]) -> Leg | None:
        """Return the next leg; None when there is nothing more to ask for.

        Args:
            is_there: whether memory has what a key names.
        """
        while self._left and self._limit > self._found:
            group = self._left.pop(0)
            if not self._spans[group]:
                self._places = None
                return Leg(group, self._slice(group, 0, self._limit), self._found)
            self._places = [
                place
                for place in range(self._start(group), self._limit)
                if not is_there(self._slice(group, place, place + 1))
            ]
            if self._places:
                keys = [self._slice(group, place, place + 1) for place in self._places]
                return Leg(group, b"".join(keys), 0)
        return None

    def end(self, reached: int) -> None:
        """Note how many leading keys of the last leg there are now, those before its start too."""
        if self._places is None:
            self._limit = min(self._limit, reached)
        elif reached < len(self._places):
            # The end before the gap may need other chunks, of the groups that were content too.
            self._limit = self._places[reached]
            self._ends += 1
            self._left = [*self._tails] if self._ends < _ENDS_MAX else []

    def parents(self, leg: Leg, place: int) -> bytes:
        """Return what a reserve names as parents of a leg's keys from a place on."""
        if not place or self._spans[leg.group]:
            return b""
        return b"".join([self._slice(group, place - 1, place) for group in self._whole])

    def groups(self, leg: Leg, count: int) -> bytes:
        """Return what a reserve names as groups of so many keys of a leg."""
        return bytes([leg.group]) * count if len(self._spans) > 1 else b""

    def sizes(self, leg: Leg) -> tuple[int, ...]:
        """Return the bytes of each shard of a leg's chunks."""
        count = len(self._shard_bytes) // len(self._spans)
        return tuple(self._shard_bytes[leg.group * count : (leg.group + 1) * count])

    def _slice(self, group: int, start: int, stop: int) -> bytes:
        at = group * self._count
        return self.keys[(at + start) * KEY_BYTES : (at + stop) * KEY_BYTES]

    def _start(self, group: int) -> int:
        span, end = self._spans[group], self._limit
        return max(0, end - span) if span > 0 else end - end % -span
