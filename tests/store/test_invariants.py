"""The invariants see whatever is broken on purpose."""

import pytest
from tests.store.bed import PAGE, Bed, key, offsets_of

from kvcellar.store import invariants


@pytest.fixture
def store():
    """Return a store with something of everything: old copies, two writers, a failed one."""
    bed = Bed(pages=16)
    engine, other = bed.instance(1, 1), bed.instance(1, 1)
    offsets = offsets_of(engine.put("a b").offsets)
    engine.put("c", "a")
    engine.lookup("a b")
    bed.remove_damaged("b", 0, offsets[2])
    engine.reserve("b d", "a")
    other.reserve("d", "b", now_s=3.0)
    engine.abort(engine.reserve("e"), 0)
    return bed.store


def _entry(store, name):
    return store.catalog.entries[key(name)]


def _change(holder, field, by):
    setattr(holder, field, getattr(holder, field) + by)


def _first_pending(store):
    return next(iter(store.reservations))


FAULTS = {
    "a slot leaks": lambda store: store.catalog.allocator.allocate(PAGE),
    "a slot has two owners": lambda store: setattr(
        _entry(store, "c"), "refs", _entry(store, "a").refs
    ),
    "a slot in use is free": lambda store: store.catalog.allocator.free(
        offsets_of(_entry(store, "a").refs)[0], PAGE
    ),
    "a child is not counted": lambda store: _change(_entry(store, "a"), "children", -1),
    "a child is counted twice": lambda store: _change(_entry(store, "a"), "children", 1),
    "an entry is kept for nothing": lambda store: store.catalog.link(
        key("x"), _entry(store, "a").group, parent=b"", tenant=_entry(store, "a").tenant
    ),
    "an entry has another's key": lambda store: setattr(_entry(store, "c"), "key", key("x")),
    "a parent is not there": lambda store: setattr(_entry(store, "c"), "parent", key("x")),
    "a group miscounts": lambda store: _change(_entry(store, "a").group, "entries", 1),
    "a lease is not counted": lambda store: _change(_entry(store, "a"), "leases", -1),
    "a lease is counted twice": lambda store: _change(_entry(store, "a"), "leases", 1),
    "a lease of nobody": lambda store: _change(_entry(store, "c"), "leases", 1),
    "a writer is not listed": lambda store: store.catalog.writers[key("d")].pop(),
    "a writer is listed twice": lambda store: store.catalog.writers[key("d")].append(
        store.catalog.writers[key("d")][0]
    ),
    "a void reservation is listed": lambda store: setattr(_first_pending(store), "is_void", True),
    "an empty list of writers is kept": lambda store: store.catalog.writers.setdefault(
        key("a"), []
    ),
    "a reservation awaits nobody": lambda store: _first_pending(store).out.clear(),
    "chunks are miscounted": lambda store: _change(store.catalog, "chunks", 1),
    "objects are miscounted": lambda store: _change(store.catalog, "objects", 1),
    "leased chunks are miscounted": lambda store: _change(store.statistics, "leased_chunks", 1),
    "reserved chunks are miscounted": lambda store: _change(store.statistics, "reserved_chunks", 1),
    "stored chunks are miscounted": lambda store: _change(store.statistics, "stored", 1),
    "dropped chunks are miscounted": lambda store: _change(store.statistics, "dropped", 1),
    "evictions are miscounted": lambda store: _change(store.statistics, "evicted", 1),
    "an account is too large": lambda store: _change(_entry(store, "a").tenant, "used_bytes", PAGE),
    "a chunk is on another's account": lambda store: setattr(
        _entry(store, "c"), "tenant", store.catalog.shares.tenant("else")
    ),
    "a quota is not in the sum": lambda store: setattr(
        _entry(store, "a").tenant, "limit_bytes", PAGE
    ),
    "hits are miscounted": lambda store: _change(store.statistics, "chunks_hit", 9),
}


def test_a_sound_store_passes(store):
    invariants.check(store)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(store, fault):
    fault(store)
    with pytest.raises(AssertionError):
        invariants.check(store)
