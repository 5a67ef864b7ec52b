"""Which chunk leaves when memory is needed.

The catalogue tells a policy when a chunk may leave (it is complete, no entry has it as parent, no
lease holds it) and when that ends; the policy is asked for one victim at a time. Only leaves are
offered, so the tail of a prefix always leaves before its head, whatever the policy.
"""

from heapq import heapify, heappop, heappush
from typing import Protocol

from kvcellar.errors import ConfigError
from kvcellar.store.entries import Entry
from kvcellar.tenancy.ranking import Tenant
from kvcellar.tenancy.shares import Shares

__all__ = ["LRU", "EvictionPolicy", "IsolatedLRU", "Noop", "policy_from_name"]


class EvictionPolicy(Protocol):
    """Chooses victims among the chunks that may leave.

    Attributes:
        shares: what each tenant holds; the catalogue keeps it up to date.
    """

    shares: Shares

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

    def take_from(self, tenant: Tenant) -> Entry | None:
        """Return the next victim among what `tenant` holds; asked where quotas are kept."""
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

    __slots__ = ("_heap", "_withdrawn", "shares")

    def __init__(self, shares: Shares | None = None) -> None:
        self.shares = shares if shares is not None else Shares()
        self._heap: list[tuple[int, bytes, Entry]] = []
        self._withdrawn = 0

    def __len__(self) -> int:
        """Return how many entries may leave, those included that got a lease meanwhile."""
        return len(self._heap) - self._withdrawn

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
            self.sweep()

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

    def take_from(self, tenant: Tenant) -> Entry | None:
        """Raise: one list knows no tenants, and nobody may have set a quota."""
        raise AssertionError(f"LRU keeps no quotas, {tenant.limit_bytes} was set")

    def sweep(self) -> None:
        """Drop what is remembered of withdrawn entries."""
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

    def __init__(self) -> None:
        self.shares = Shares()

    def offer(self, entry: Entry) -> None:
        """Ignore it."""

    def withdraw(self, entry: Entry) -> None:
        """Ignore it."""

    def take(self) -> Entry | None:
        """Return None."""
        return None

    def take_from(self, _tenant: Tenant) -> Entry | None:
        """Return None."""
        return None


class IsolatedLRU:
    """A list for each tenant; the tenant that gives way is named by `Shares`, LRU within it."""

    def __init__(self) -> None:
        self.shares = Shares()
        self._lists: dict[str, LRU] = {}

    def offer(self, entry: Entry) -> None:
        """Take note that `entry` may leave. O(log of its tenant's leaves + log tenants)."""
        tenant = entry.tenant
        leaves = self._lists.get(tenant.name)
        if leaves is None:
            leaves = self._lists[tenant.name] = LRU(self.shares)
        leaves.offer(entry)
        self.shares.offer(tenant)

    def withdraw(self, entry: Entry) -> None:
        """Take note that `entry` has a child now or is gone. O(1) amortised."""
        leaves = self._lists.get(entry.tenant.name)
        if leaves is not None:
            leaves.withdraw(entry)
            self._drop_if_empty(entry.tenant, leaves)

    def take(self) -> Entry | None:
        """Return the least recently used leaf of the tenant that gives way. O(log) amortised."""
        while (tenant := self.shares.next_to_give()) is not None:
            victim = self.take_from(tenant)
            if victim is not None:
                return victim
            # All that it had is leased or has left.
            self.shares.withdraw(tenant)
        return None

    def take_from(self, tenant: Tenant) -> Entry | None:
        """Return the tenant's least recently used leaf without a lease."""
        leaves = self._lists.get(tenant.name)
        if leaves is None:
            return None
        victim = leaves.take()
        self._drop_if_empty(tenant, leaves)
        return victim

    def _drop_if_empty(self, tenant: Tenant, leaves: LRU) -> None:
        if not len(leaves):
            leaves.sweep()
            del self._lists[tenant.name]


def policy_from_name(name: str) -> EvictionPolicy:
    """Return a new policy for a value of `--eviction-policy`.

    Raises:
        ConfigError: there is no such policy; the message names those that exist.
    """
    if name == "LRU":
        return LRU()
    if name == "IsolatedLRU":
        return IsolatedLRU()
    if name == "noop":
        return Noop()
    raise ConfigError(
        f"--eviction-policy {name}: there is no such policy; use LRU, IsolatedLRU or noop"
    )
