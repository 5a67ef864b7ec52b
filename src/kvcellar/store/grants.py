"""What the server does to chunks on its own account, beside what clients ask for.

Chunks that go to a tier are held while their slots are read, and may leave the arena afterwards;
chunks that came from one may be the first to leave. None of it counts as a use or as a lookup.
Called by the server's tiers; all of it keeps the invariants of the store.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvcellar.keys.digest import NamespaceId
from kvcellar.store.entries import Entry, OwnerId
from kvcellar.store.leases import Lease
from kvcellar.store.machine import Hit, Store

__all__ = ["Held", "coming_as_oldest", "hold", "look_again", "stay_oldest", "vacate"]


class Held(NamedTuple):
    """Complete chunks under a lease.

    Attributes:
        lease: its handle; ends by `Store.release` or with its owner.
        keys: their keys.
        refs: `REF_BYTES` for each shard of each of them.
        size_bytes: bytes of their slots.
    """

    lease: int
    keys: list[bytes]
    refs: bytes
    size_bytes: int


def hold(store: Store, owner: OwnerId, keys: Iterable[bytes]) -> Held | None:
    """Lease those of some chunks of one namespace that are complete; None if none is.

    Unlike a lookup it makes no chunk look used, and does not stop at a gap.
    """
    found: list[Entry] = []
    for key in keys:
        entry = store.catalog.entries.get(key)
        if entry is not None and entry.refs:
            entry.leases += 1
            found.append(entry)
    if not found:
        return None
    store.statistics.leased_chunks += len(found)
    return Held(
        store.leases.add(owner, Lease(0, found)),
        [entry.key for entry in found],
        b"".join([entry.refs for entry in found]),
        sum(entry.group.chunk_bytes for entry in found),
    )


def look_again(
    store: Store, owner: OwnerId, namespace: NamespaceId, keys: bytes, *, request: int, found: int
) -> Hit:
    """Look up once more for a request whose lookup has been counted, and count what is new.

    Args:
        store: where to look.
        owner: who asks.
        namespace: a bound one.
        keys: as in `Store.lookup`.
        request: id of the request that gets the lease.
        found: chunks that the lookup found at first.

    Raises:
        NotRegisteredError: the namespace is not bound any more.
    """
    counters = store.statistics
    lookups, asked, hit = counters.lookups, counters.chunks_asked, counters.chunks_hit
    again = store.lookup(owner, namespace, keys, request=request)
    counters.lookups, counters.chunks_asked = lookups, asked
    counters.chunks_hit = hit + max(0, again.count - found)
    return again


@contextmanager
def coming_as_oldest(store: Store, owner: OwnerId, keys: Iterable[bytes]) -> Iterator[None]:
    """Have the chunks that become complete within the block count as used before all others.

    They are the first to leave then, until somebody uses them; a chunk that has children still
    leaves after these. A lease keeps them from being offered for eviction as newly used.
    """
    entries = [store.catalog.entries.get(key) for key in keys]
    coming = [entry for entry in entries if entry is not None and not entry.refs]
    for entry in coming:
        entry.leases += 1
    store.statistics.leased_chunks += len(coming)
    lease = store.leases.add(owner, Lease(0, coming))
    try:
        yield
    finally:
        for entry in coming:
            entry.tick = 0
        store.release(owner, [lease])


def stay_oldest(store: Store, keys: Iterable[bytes]) -> None:
    """Take back that the last lookup used chunks that came as the oldest."""
    for key in keys:
        entry = store.catalog.entries.get(key)
        if entry is not None and entry.refs:
            entry.tick = 0


def vacate(store: Store, keys: Iterable[bytes]) -> None:
    """Remove chunks from the arena, since they are kept elsewhere; leased slots stay for now.

    They count as evicted: they leave room, too.
    """
    for key in keys:
        entry = store.catalog.entries.get(key)
        if entry is not None and entry.refs:
            store.catalog.vacate(entry)
            store.statistics.evicted += 1
