"""Room for a chunk: slots for all its shards or for none, evicting only when they are asked for.

A tenant with a quota stays within it: its own chunks leave for its new ones. Then whatever is
free; then leaves, as the policy names them; and where shards of several sizes have cut the free
memory into runs that are all too short, one growth step is emptied whole, the coldest in which
that is sure to help, whosever the chunks in it are. Nothing that is leased or being written is
ever moved, nor is the prefix of the chunk that wants in. Called by the store for each new chunk.
"""

from collections.abc import Iterator

from kvcellar.store.catalog import Catalog
from kvcellar.store.departures import Reason
from kvcellar.store.entries import Entry
from kvcellar.store.holdings import Holdings
from kvcellar.store.leases import Lease
from kvcellar.store.reservations import Reservation
from kvcellar.store.statistics import StoreStatistics
from kvcellar.store.steps import StepMap
from kvcellar.tenancy.ranking import Tenant

__all__ = ["Room"]

_VICTIMS_MAX = 64


class Room:
    """Finds memory in the arena for one store.

    Attributes:
        steps: the growth steps that are there.
    """

    def __init__(
        self,
        catalog: Catalog,
        counters: StoreStatistics,
        *,
        leases: Holdings[Lease],
        reservations: Holdings[Reservation],
    ) -> None:
        self.steps = StepMap(catalog.allocator.step_bytes)
        self._catalog = catalog
        self._allocator = catalog.allocator
        self._counters = counters
        self._leases = leases
        self._reservations = reservations

    def allocate(self, entry: Entry, pending: Reservation) -> bytes | None:
        """Return `OFFSET_BYTES` for each shard of the chunk, or None with nothing allocated.

        Args:
            entry: the chunk, linked below its parent already, so that the parent is no leaf.
            pending: the reservation in the making, whose slots are not in the books yet.
        """
        shares, tenant = self._catalog.shares, pending.tenant
        chunk_bytes = entry.group.chunk_bytes
        if shares.over_bytes(tenant, chunk_bytes):
            self.shrink(tenant, chunk_bytes)
            if shares.over_bytes(tenant, chunk_bytes):
                self._counters.refused_quota += 1
                return None
        # Charged before anybody has to give way, so that of two with as much as they may have it
        # is the one that wants more.
        shares.charge(tenant, chunk_bytes)
        offsets = self._take_slots(entry, pending)
        if offsets is None:
            shares.discharge(tenant, chunk_bytes)
        return offsets

    def _take_slots(self, entry: Entry, pending: Reservation) -> bytes | None:
        space = entry.group
        taken: list[int] = []
        for size_bytes in space.shard_bytes:
            offset = self._allocator.allocate(size_bytes)
            if offset is None:
                offset = self._evict_leaves(size_bytes, entry, pending=pending, taken=taken)
            if offset is None:
                for freed, freed_bytes in zip(taken, space.shard_bytes, strict=False):
                    self._allocator.free(freed, freed_bytes)
                return None
            taken.append(offset)
        return space.packer.pack(*taken)

    def shrink(self, tenant: Tenant, wanted_bytes: int = 0) -> None:
        """Evict chunks of `tenant` until its quota has room for `wanted_bytes`; a few at most."""
        for _ in range(_VICTIMS_MAX):
            if not self._catalog.shares.over_bytes(tenant, wanted_bytes):
                return
            victim = self._catalog.policy.take_from(tenant)
            if victim is None:
                return
            self._evict(victim)
            self._counters.evicted_quota += 1

    def evict_down_to(self, used_bytes: int, *, victims_max: int) -> int:
        """Evict in the policy's order until no more than `used_bytes` are in slots.

        Returns:
            How many chunks went; as many as `victims_max` means that there may be more to do.
        """
        for count in range(victims_max):
            victim = (
                self._catalog.policy.take() if self._allocator.used_bytes > used_bytes else None
            )
            if victim is None:
                return count
            self._evict(victim)
        return victims_max

    def _evict_leaves(
        self, size_bytes: int, entry: Entry, *, pending: Reservation, taken: list[int]
    ) -> int | None:
        # One victim is enough unless it is smaller than what is wanted. Victims whose bytes would
        # have been enough twice, and still left no run, are scattered: more would be as well.
        freed_bytes = 0
        for _ in range(_VICTIMS_MAX):
            victim = self._catalog.policy.take()
            if victim is None:
                return None
            freed_bytes += victim.group.chunk_bytes
            self._evict(victim)
            offset = self._allocator.allocate(size_bytes)
            if offset is not None:
                return offset
            if freed_bytes > 2 * size_bytes:
                break
        own = [*self._prefix(entry)]
        victims = self._steps_victims(size_bytes, own, [*self._written(entry, pending, taken)])
        for victim in dict.fromkeys(victims):
            self._evict(victim)
        self._counters.steps_reclaimed += bool(victims)
        return self._allocator.allocate(size_bytes)

    def _steps_victims(
        self, size_bytes: int, own: list[Entry], written: list[tuple[int, int]]
    ) -> list[Entry]:
        kept = {*own}
        fixed = written
        for lease in self._leases:
            kept.update(lease.entries)
        for held in kept:
            fixed.extend(held.group.extents_of_refs(held.refs))
        entries = self._catalog.entries.values()
        return self.steps.coldest(
            self._allocator.slot_bytes(size_bytes),
            movable=(entry for entry in entries if entry.refs and entry not in kept),
            fixed=fixed,
        )

    def _written(
        self, entry: Entry, pending: Reservation, taken: list[int]
    ) -> Iterator[tuple[int, int]]:
        yield from zip(taken, entry.group.slot_bytes, strict=False)
        for reservation in (*self._reservations, pending):
            for chunk in reservation.chunks:
                yield from chunk.extents()

    def _prefix(self, entry: Entry) -> Iterator[Entry]:
        while entry.parent:
            entry = self._catalog.entries[entry.parent]
            if entry.refs:
                yield entry

    def _evict(self, victim: Entry) -> None:
        self._catalog.vacate(victim)
        self._catalog.departures.note(victim.key, Reason.EVICTED)
        self._counters.evicted += 1
