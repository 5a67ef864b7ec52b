"""A store with a few pages of arena, and instances that talk to it as the server would.

Chunks have short names: "a b c" are three in prefix order. After each call everything that must
be true of a store is checked.
"""

from kvcellar.keys.digest import NamespaceId
from kvcellar.memory.slots import SLOT_ALIGNMENT, SlotAllocator
from kvcellar.protocol.messages import ChunkState, CommitOutcome
from kvcellar.store import invariants
from kvcellar.store.entries import OwnerId
from kvcellar.store.machine import Store
from kvcellar.store.policies import LRU

PAGE = SLOT_ALIGNMENT
SPACE = NamespaceId(b"n" * 32)
OTHER_SPACE = NamespaceId(b"m" * 32)
PRESENT, RESERVED, BUSY, FULL = (
    ChunkState.PRESENT, ChunkState.RESERVED, ChunkState.BUSY, ChunkState.FULL,
)  # fmt: skip
PENDING, VISIBLE, DROPPED = CommitOutcome.PENDING, CommitOutcome.VISIBLE, CommitOutcome.DROPPED


def key(name):
    return name.encode().ljust(32, b".") if name else b""


def joined(names):
    return b"".join(key(name) for name in names.split())


def seals(count, start=1):
    return b"".join((start + index).to_bytes(8, "little") for index in range(count))


def offsets_of(packed, stride=8):
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), stride)]


class Bed:
    """The store, its arena, and a count of owners."""

    def __init__(self, pages=8, *, step_pages=None, policy=None, limits=None):
        step = (step_pages or pages) * PAGE
        self.store = Store(SlotAllocator(step), policy or LRU(), limits=limits)
        self.steps = [(at, min(step, pages * PAGE - at)) for at in range(0, pages * PAGE, step)]
        for offset, size_bytes in self.steps:
            self.store.add_step(offset, size_bytes)
        self._owners = 0

    @property
    def used_pages(self):
        return self.store.catalog.allocator.used_bytes // PAGE

    @property
    def counted(self):
        return self.store.statistics

    def owner(self):
        self._owners += 1
        return OwnerId(self._owners)

    def instance(self, *shard_pages, space=SPACE, tenant="", spans=(0,)):
        return Instance(self, shard_pages or (1,) * len(spans), space, tenant, spans)

    def limit(self, tenant, pages):
        """Give a tenant a quota, as far as the store goes."""
        self.store.catalog.shares.set_limit(tenant, None if pages is None else pages * PAGE)
        while self.store.shrink(tenant):
            self.check()
        self.check()

    def pages_of(self, tenant):
        return self.store.catalog.shares.tenant(tenant).used_bytes // PAGE

    def check(self):
        invariants.check(self.store)

    def clear(self, space=None):
        answer = self.store.clear(space)
        self.check()
        return answer

    def remove_damaged(self, name, shard, offset):
        answer = self.store.remove_damaged(key(name), shard, offset)
        self.check()
        return answer

    def die(self, *owners):
        for owner in owners:
            self.store.owner_died(owner)
            self.check()


class Instance:
    """A scheduler half and a worker half for each rank.

    With several KV groups the shards' pages come group after group.
    """

    def __init__(self, bed, shard_pages, space, tenant="", spans=(0,)):
        self.bed = bed
        self.tenant = tenant
        self.store = bed.store
        self.space = space
        self.store.bind(space, tuple(pages * PAGE for pages in shard_pages), spans)
        self.scheduler = bed.owner()
        self.workers = tuple(bed.owner() for _ in range(len(shard_pages) // len(spans)))
        self.requests = 0

    def reserve(self, names, parent="", *, now_s=0.0, groups=b""):
        self.requests += 1
        reserved = self.store.reserve(
            self.scheduler,
            self.space,
            joined(names),
            parent=key(parent),
            writers=self.workers,
            now_s=now_s,
            request=self.requests,
            tenant=self.tenant,
            groups=groups,
        )
        self.bed.check()
        return reserved

    def states(self, names, parent="", *, now_s=0.0):
        """Reserve, and let what was reserved go again."""
        reserved = self.reserve(names, parent, now_s=now_s)
        self.cancel(reserved)
        return list(reserved.states)

    def commit(self, reserved, rank=0, *, start=1):
        count = list(reserved.states).count(RESERVED)
        outcome = self.store.commit(
            self.workers[rank], reserved.reservation, rank, seals(count, start)
        )
        self.bed.check()
        return outcome

    def abort(self, reserved, rank=0):
        outcome = self.store.abort(self.workers[rank], reserved.reservation, rank)
        self.bed.check()
        return outcome

    def cancel(self, reserved):
        self.store.cancel(self.scheduler, reserved.reservation)
        self.bed.check()

    def put(self, names, parent="", *, now_s=0.0, groups=b""):
        """Store chunks; return what was reserved."""
        reserved = self.reserve(names, parent, now_s=now_s, groups=groups)
        if reserved.reservation:
            outcomes = [self.commit(reserved, rank) for rank in range(len(self.workers))]
            assert outcomes[-1] == VISIBLE
        return reserved

    def lookup(self, names):
        self.requests += 1
        hit = self.store.lookup(self.scheduler, self.space, joined(names), request=self.requests)
        self.bed.check()
        return hit

    def found(self, names):
        """Return how many leading chunks a lookup finds, holding none of them."""
        hit = self.lookup(names)
        self.release(hit)
        return hit.count

    def release(self, *hits):
        self.store.release(self.scheduler, [hit.lease for hit in hits])
        self.bed.check()

    def heartbeat(self, *, leases=(), reservations=(), seen=None):
        self.store.keep(
            self.scheduler,
            leases=leases,
            reservations=reservations,
            seen=self.requests if seen is None else seen,
        )
        self.bed.check()

    def disconnect(self):
        self.store.reader_left(self.scheduler)
        self.bed.check()

    def resident(self, names):
        """Return which of the chunks are complete, without touching any."""
        entries = self.store.catalog.entries
        return " ".join(
            name for name in names.split() if key(name) in entries and entries[key(name)].refs
        )
