"""Where a hit may end: the largest end at which every KV group has what it needs.

A group that needs all chunks is walked from the front to its first gap. The others are walked
backwards from there, each only as far as it reaches; a gap in one moves the end before the gap and
the others are asked again, no place twice. Of one group that needs all this is the longest leading
run, and costs what that costs. Called by the store's lookup; it changes nothing.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcellar.keys.digest import KEY_BYTES
from kvcellar.store.entries import Entry, Group

__all__ = ["Reach", "find_reach"]


_KEYS = struct.Struct(f"{KEY_BYTES}s")


class Reach(NamedTuple):
    """How far a hit goes and on what it stands.

    Attributes:
        end: leading chunks of the hit.
        entries: what each group needs of them, group after group, in prefix order.
    """

    end: int
    entries: list[Entry]


def find_reach(
    entries: Mapping[bytes, Entry], groups: Sequence[Group], keys: bytes, *, count: int
) -> Reach:
    """Return the longest prefix that can be hit.

    Args:
        entries: the catalogue's.
        groups: of one namespace.
        keys: `KEY_BYTES` for each of `count` chunks, in prefix order, group after group.
        count: chunks.
    """
    end, run = count, list[Entry]()
    tails: list[_Tail] = []
    runs: list[list[Entry] | _Tail] = []
    find = entries.get
    for index, group in enumerate(groups):
        at = index * count * KEY_BYTES
        if group.span:
            tail = _Tail(entries, group, keys[at : at + count * KEY_BYTES])
            tails.append(tail)
            runs.append(tail)
            continue
        run = []
        keep = run.append
        for (key,) in _KEYS.iter_unpack(keys[at : at + end * KEY_BYTES]):
            entry = find(key)
            if entry is None or not entry.refs or entry.group is not group:
                break
            keep(entry)
        end = len(run)
        runs.append(run)
    if tails:
        end = _settle(tails, end)
    elif len(groups) == 1:
        return Reach(end, run)
    return Reach(end, [entry for run in runs for entry in run[:end]])


def _settle(tails: Sequence["_Tail"], end: int) -> int:
    """Return the largest end, at most the given one, that suits all of them."""
    while True:
        lower = end
        for tail in tails:
            lower = tail.settle(lower)
        if lower == end:
            return end
        end = lower


class _Tail:
    """A group that needs only the chunks before an end."""

    def __init__(self, entries: Mapping[bytes, Entry], group: Group, keys: bytes) -> None:
        self._entries = entries
        self._group = group
        self._keys = keys
        self._found: dict[int, Entry] = {}
        self._low = len(keys) // KEY_BYTES

    def settle(self, end: int) -> int:
        """Return the largest end, at most the given one, before which nothing is missing."""
        while end:
            # Everything from `_low` up to any end that is asked about from now on is there.
            self._low = min(self._low, end)
            start = self._group.start(end)
            while self._low > start and self._has(self._low - 1):
                self._low -= 1
            if self._low <= start:
                return end
            # What is missing would be needed by every end behind it that reaches back so far, and
            # those between here and there do.
            end = self._low = self._low - 1
        return 0

    def __getitem__(self, leading: slice) -> list[Entry]:
        """Return what is needed of some leading chunks, once `settle` gave that end."""
        end = leading.stop
        return [self._found[place] for place in range(self._group.start(end), end)]

    def _has(self, place: int) -> bool:
        entry = self._entries.get(self._keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])
        if entry is None or not entry.refs or entry.group is not self._group:
            return False
        self._found[place] = entry
        return True
