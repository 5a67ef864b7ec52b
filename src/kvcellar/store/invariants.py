"""What is true of a store at all times, as assertions that look at everything.

Linear in all that the store knows, so it is for tests and not for a server: they call it after
every step, and whatever a change of the store breaks, it breaks here first, with the values.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from kvcellar.store.entries import Entry
from kvcellar.store.machine import Store
from kvcellar.tenancy.ranking import Tenant

__all__ = ["check"]


def check(store: Store) -> None:
    """Assert every invariant of `store`."""
    store.catalog.allocator.check()
    _check_slots(store)
    _check_entries(store)
    _check_writers(store)
    _check_leases(store)
    _check_tenants(store)
    _check_statistics(store)


def _retired(store: Store) -> set[Entry]:
    """Return the records that have left the catalogue and live by their leases."""
    return {
        entry
        for lease in store.leases
        for entry in lease.entries
        if not store.catalog.is_listed(entry)
    }


def _owned_extents(store: Store) -> Iterator[tuple[int, int]]:
    for entry in [*store.catalog.entries.values(), *_retired(store)]:
        if entry.refs:
            yield from entry.group.extents_of_refs(entry.refs)
    for held in store.reservations:
        for chunk in held.chunks:
            yield from chunk.extents()


def _check_slots(store: Store) -> None:
    allocator = store.catalog.allocator
    extents = sorted(_owned_extents(store))
    for (offset, size_bytes), (following, _) in pairwise(extents):
        assert offset + size_bytes <= following, ("one slot, two owners", offset, following)
    owned_bytes = sum(size_bytes for _, size_bytes in extents)
    assert owned_bytes == allocator.used_bytes, (owned_bytes, allocator.used_bytes)


def _check_entries(store: Store) -> None:
    entries = store.catalog.entries
    children = Counter(entry.parent for entry in entries.values() if entry.parent)
    for key, entry in entries.items():
        assert entry.key == key, (entry.key, key)
        assert entry.children == children[key], (key, entry.children, children[key])
        assert entry.refs or entry.children or key in store.catalog.writers, ("kept", key)
        assert entry.refs or not entry.leases, ("leased and incomplete", key)
        if entry.parent:
            assert entries[entry.parent].group is entry.group, key
    assert children.keys() <= entries.keys()
    counted = Counter(entry.group for entry in entries.values())
    for group in counted:
        assert group.entries == counted[group], (group.entries, counted[group])


def _check_writers(store: Store) -> None:
    writing = {
        (chunk.key, held)
        for held in store.reservations
        if not held.is_void
        for chunk in held.chunks
    }
    listed = [(key, held) for key, helds in store.catalog.writers.items() for held in helds]
    assert len(listed) == len(set(listed))
    assert set(listed) == writing
    assert all(store.catalog.writers.values()), "an empty list is kept"
    for held in store.reservations:
        for chunk in held.chunks:
            assert chunk.group in held.namespace.groups, chunk.key
            entry = store.catalog.entries.get(chunk.key)
            assert held.is_void or (entry and entry.group is chunk.group), chunk.key
        assert held.out, ("nobody is awaited", held.handle)


def _check_leases(store: Store) -> None:
    counts = Counter(entry for lease in store.leases for entry in lease.entries)
    for entry, count in counts.items():
        assert entry.leases == count, (entry.key, entry.leases, count)
        assert entry.refs, ("leased without slots", entry.key)
    for entry in store.catalog.entries.values():
        assert entry.leases == counts[entry], (entry.key, entry.leases, counts[entry])


def _check_tenants(store: Store) -> None:
    shares = store.catalog.shares
    shares.check()
    held = Counter[Tenant]()
    for entry in [*store.catalog.entries.values(), *_retired(store)]:
        if entry.refs:
            held[entry.tenant] += entry.group.chunk_bytes
    for reservation in store.reservations:
        held[reservation.tenant] += sum(chunk.group.chunk_bytes for chunk in reservation.chunks)
    assert {tenant: tenant.used_bytes for tenant in shares if tenant.used_bytes} == +held
    assert shares.used_bytes == store.catalog.allocator.used_bytes
    assert shares.capacity_bytes == store.catalog.allocator.total_bytes


def _check_statistics(store: Store) -> None:
    counted = store.statistics
    complete = [entry for entry in store.catalog.entries.values() if entry.refs]
    pending = sum(len(held.chunks) for held in store.reservations if not held.is_void)
    assert counted.chunks == len(complete)
    assert counted.objects == sum(len(entry.group.shard_bytes) for entry in complete)
    assert counted.leases == len(list(store.leases))
    assert counted.leased_chunks == sum(len(lease.entries) for lease in store.leases)
    assert counted.reservations == len(list(store.reservations))
    assert counted.reserved_chunks == sum(len(held.chunks) for held in store.reservations)
    assert counted.reserved == counted.stored + counted.dropped + pending
    assert counted.stored == len(complete) + counted.evicted + counted.damaged + counted.cleared
    assert counted.evicted_quota <= counted.evicted
    assert counted.chunks_hit <= counted.chunks_asked
