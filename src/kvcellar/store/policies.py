"""Which chunk leaves when memory is needed.

The catalogue tells a policy when a chunk may leave (it is complete, no entry has it as parent, no
lease holds it) and when that ends; the policy is asked for one victim at a time. Only leaves are
offered, so the tail of a prefix always leaves before its head, whatever the policy. A policy that
shares the memory among tenants needs no more than this: an offered entry knows its namespace.
"""

from heapq import heapify, heappop, heappush
from typing import Protocol

from kvcellar.errors import ConfigError
from kvcellar.store.entries import Entry

__all__ = ["LRU", "EvictionPolicy", "Noop", "policy_from_name"]


class EvictionPolicy(Protocol):
    """Chooses victims among the chunks that may leave.

    Attributes:
        evicts: False for a policy that never lets anything leave.
    """

    evicts: bool

    def offer(self, entry: Entry) -> None:
        """Take note that `entry` may leave; harmless if it was offered already."""
        ...

    def withdraw(self, entry: Entry) -> None:
        """Take note that `entry` has a child now or is gone; harmless if it was not offered.

        A lease does not withdraw an entry: `take` looks at its `leases`, and the entry is offered
        anew when the last of them ends.
        """
        ...

    def take(self) -> Entry | None:
        """Return the next victim, which the caller evicts; None when nothing may leave."""
        ...


_ABSENT = 0
_QUEUED = 1
_WITHDRAWN = 2
_STALE_MIN = 64


class LRU:
    """The least recently used leaf leaves first.

    A heap of (tick, key, entry) that is put right lazily: a lookup only writes the entry's tick,
    and an item whose tick is no longer its entry's goes back to where it belongs when it comes to
    the top. An entry is in the heap at most once. Items of withdrawn entries are skipped, and
    swept out when they are more than half.
    """

    evicts = True

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes, Entry]] = []
        self._withdrawn = 0

    def offer(self, entry: Entry) -> None:
        """Take note that `entry` may leave. O(log leaves)."""
        if entry.mark == _ABSENT:
            heappush(self._heap, (entry.tick, entry.key, entry))
        elif entry.mark == _WITHDRAWN:
            self._withdrawn -= 1
        entry.mark = _QUEUED

    def withdraw(self, entry: Entry) -> None:
        """Take note that `entry` has a child now or is gone. O(1) amortised."""
        if entry.mark != _QUEUED:
            return
        entry.mark = _WITHDRAWN
        self._withdrawn += 1
        if self._withdrawn > _STALE_MIN and self._withdrawn * 2 > len(self._heap):
            self._sweep()

    def take(self) -> Entry | None:
        """Return the least recently used leaf without a lease. O(log leaves) amortised."""
        while self._heap:
            tick, _, entry = heappop(self._heap)
            if entry.mark == _WITHDRAWN:
                self._withdrawn -= 1
                entry.mark = _ABSENT
            elif entry.leases:
                # The end of its last lease offers it again.
                entry.mark = _ABSENT
            elif entry.tick != tick:
                heappush(self._heap, (entry.tick, entry.key, entry))
            else:
                entry.mark = _ABSENT
                return entry
        return None

    def _sweep(self) -> None:
        kept = []
        for item in self._heap:
            if item[2].mark == _QUEUED:
                kept.append(item)
            else:
                item[2].mark = _ABSENT
        heapify(kept)
        self._heap = kept
        self._withdrawn = 0


class Noop:
    """Nothing ever leaves: a full cache stays as it is."""

    evicts = False

    def offer(self, entry: Entry) -> None:
        """Ignore it."""

    def withdraw(self, entry: Entry) -> None:
        """Ignore it."""

    def take(self) -> Entry | None:
        """Return None."""
        return None


def policy_from_name(name: str) -> EvictionPolicy:
    """Return a new policy for a value of `--eviction-policy`.

    Raises:
        ConfigError: there is no such policy; the message names those that exist.
    """
    if name == "LRU":
        return LRU()
    if name == "noop":
        return Noop()
    raise ConfigError(f"--eviction-policy {name}: there is no such policy; use LRU or noop")
