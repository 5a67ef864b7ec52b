"""What the store should do, as plain dictionaries, and an arena that remembers who wrote what.

The model knows nothing of trees, heaps or slots: it says what is complete, who reads and who
writes, and which bytes lie where. What leaves to make room it learns from the store, and then
checks that it was allowed to leave. A rank that is out may write at any time, so a slot that was
given away too early shows as foreign bytes under somebody's seal.
"""

import dataclasses

from tests.store.bed import (
    BUSY,
    DROPPED,
    FULL,
    PAGE,
    PENDING,
    PRESENT,
    RESERVED,
    VISIBLE,
    Bed,
    joined,
    key,
)

from kvcellar.store import invariants
from kvcellar.store.entries import OwnerId

WRITER_ALONE_S = 2.0
STEP_PAGES = 16
STEPS = 3


def prefixes(space, bits):
    """Return the names of the chunks on the way to `bits`, from the first on."""
    return [f"{space.decode()[0]}{bits[:length]}" for length in range(1, len(bits) + 1)]


def part(name, group):
    """Return the name of a KV group's part of a chunk; that of the first is the chunk's."""
    return name + "wxyz"[group - 1] * bool(group)


def group_of(name):
    """Return the KV group of a part."""
    return " wxyz".index(name[-1]) if name[-1] in "wxyz" else 0


def needed(span, end):
    """Return which chunks a hit needs that ends before chunk `end`."""
    if span == 0:
        return range(end)
    return range(max(0, end - span), end) if span > 0 else range(end - end % -span, end)


@dataclasses.dataclass
class Writing:
    """A reservation as the model sees it."""

    handle: int
    party: object
    owner: OwnerId
    sizes: dict  # name -> pages of each shard
    workers: tuple
    request: int
    at_s: float
    places: dict  # name -> offset of each shard
    out: set
    is_void: bool = False
    told: set = dataclasses.field(default_factory=set)  # ranks with a copy that may still run

    def seal(self, name, rank):
        return self.handle * 4096 + list(self.places).index(name) * 8 + rank


class Party:
    """An instance and what its scheduler half knows."""

    def __init__(self, world, space, shard_pages, tenant, spans=(0,)):
        self.world = world
        self.space = space
        self.tenant = tenant
        self.spans = spans
        ranks = len(shard_pages) // len(spans)
        self.pages = [shard_pages[at : at + ranks] for at in range(0, len(shard_pages), ranks)]
        world.store.bind(space, tuple(pages * PAGE for pages in shard_pages), spans)
        self.workers = tuple(world.bed.owner() for _ in range(ranks))
        self.begin()

    def parts(self, names):
        """Return the parts of chunks, chunk after chunk, and the KV group of each."""
        parts = [(part(name, group), group) for name in names for group in range(len(self.spans))]
        return [name for name, _ in parts], bytes(group for _, group in parts)

    def begin(self):
        """Start the scheduler half anew, after its death or for the first time."""
        self.scheduler = self.world.bed.owner()
        self.requests = 0
        self.leases = set()
        self.untold = set()
        self.replies = {}  # request id -> what its reply, still on the way, grants

    def heartbeat(self):
        """Return what a heartbeat made now says."""
        used = {
            handle
            for handle, writing in self.world.writings.items()
            if writing.owner == self.scheduler and writing.told
        }
        seen = min(self.replies, default=self.requests + 1) - 1
        return {"leases": set(self.leases), "reservations": used | self.untold, "seen": seen}


class World:
    """The store under test, the model beside it, and the arena."""

    def __init__(self, policy):
        self.bed = Bed(pages=STEP_PAGES, policy=policy)
        self.shares = policy.shares
        self.store = self.bed.store
        self.steps = 1
        self.now_s = 0.0
        self.pages = {}  # page -> seal of whoever wrote it last
        self.complete = {}  # name -> ((offset, seal) of each shard, pages of each shard)
        self.writings = {}  # handle -> Writing
        self.leases = {}  # handle -> (owner, request, {name: as in complete})

    def add_step(self):
        size_bytes = STEP_PAGES * PAGE
        self.store.add_step(self.steps * size_bytes, size_bytes)
        self.steps += 1

    # What clients do.

    def lookup(self, party, names):
        party.requests += 1
        chunks, spans = names.split(), list(enumerate(party.spans))
        asked = " ".join(part(name, group) for group, _ in spans for name in chunks)
        hit = self.store.lookup(party.scheduler, party.space, joined(asked), request=party.requests)

        def parts(end):
            return [part(chunks[at], group) for group, span in spans for at in needed(span, end)]

        ends = (end for end in range(len(chunks), 0, -1) if self.complete.keys() >= {*parts(end)})
        end = next(ends, 0)
        found = parts(end)
        assert hit.count == end, (names, hit.count, end)
        packed = b"".join(
            number.to_bytes(8, "little")
            for name in found
            for ref in self.complete[name][0]
            for number in ref
        )
        assert hit.refs == packed
        if found:
            held = {name: self.complete[name] for name in found}
            self.leases[hit.lease] = (party.scheduler, party.requests, held)
        else:
            assert hit.lease == 0
        party.replies[party.requests] = ("lease", hit.lease)

    def reserve(self, party, names, parent):
        party.requests += 1
        before = dict(self.complete)
        used_bytes = self.shares.tenant(party.tenant).used_bytes
        reclaimed = self.bed.counted.steps_reclaimed
        chunks = names.split()
        parts, groups = party.parts(chunks)
        reserved = self.store.reserve(
            party.scheduler,
            party.space,
            joined(" ".join(parts)),
            parent=key(parent),
            writers=party.workers,
            now_s=self.now_s,
            request=party.requests,
            tenant=party.tenant,
            groups=groups if len(party.spans) > 1 else b"",
        )
        states = dict(zip(parts, reserved.states, strict=True))
        own = [parent, *chunks]
        self._see_evictions(own, states, leaves_only=reclaimed == self.bed.counted.steps_reclaimed)
        self._check_states(states, before)
        self._note_writing(party, reserved, states)
        tenant = self.shares.tenant(party.tenant)
        if tenant.limit_bytes is not None:
            assert tenant.used_bytes <= max(tenant.limit_bytes, used_bytes), "over its quota"
        if FULL in states.values():
            self._check_full(party, own)
        party.replies[party.requests] = ("reservation", reserved.reservation)

    def limit(self, party, pages):
        """Give the party's tenant a quota; what is too much leaves, and is the tenant's own."""
        before = set(self.complete)
        self.shares.set_limit(party.tenant, None if pages is None else pages * PAGE)
        while self.store.shrink(party.tenant):
            pass
        self._see_evictions([], {}, leaves_only=True)
        gone = before - self.complete.keys()
        assert {name[0] for name in gone} <= {party.space.decode()[0]}
        tenant = self.shares.tenant(party.tenant)
        assert not self.shares.over_bytes(tenant) or not self._leaves([], party.tenant)

    def write(self, handle, rank):
        """Let a rank's copy write all its shards; it may do so as long as it is out."""
        writing = self.writings[handle]
        for name, offsets in writing.places.items():
            for page in range(writing.sizes[name][rank]):
                self.pages[offsets[rank] // PAGE + page] = writing.seal(name, rank)

    def commit(self, handle, rank):
        writing = self.writings[handle]
        self.write(handle, rank)
        writing.told.discard(rank)
        seals = [writing.seal(name, rank).to_bytes(8, "little") for name in writing.places]
        outcome = self.store.commit(writing.workers[rank], handle, rank, b"".join(seals))
        writing.out.discard(rank)
        assert outcome == self._advance(handle)

    def abort(self, handle, rank):
        writing = self.writings[handle]
        writing.told.discard(rank)
        outcome = self.store.abort(writing.workers[rank], handle, rank)
        writing.out.discard(rank)
        writing.is_void = True
        assert outcome == self._advance(handle) == DROPPED

    def keep(self, party, heartbeat):
        self.store.keep(party.scheduler, **heartbeat)
        seen = heartbeat["seen"]
        for handle, (owner, request, _) in list(self.leases.items()):
            if owner == party.scheduler and request <= seen and handle not in heartbeat["leases"]:
                del self.leases[handle]
        for handle, writing in list(self.writings.items()):
            mine = writing.owner == party.scheduler and writing.request <= seen
            if mine and handle not in heartbeat["reservations"]:
                assert not writing.told, "the model broke the contract"
                del self.writings[handle]

    def die(self, owner):
        self.store.owner_died(owner)
        self.forget_leases(owner)
        for handle, writing in list(self.writings.items()):
            dead = {rank for rank in writing.out if writing.workers[rank] == owner}
            writing.told -= {rank for rank, who in enumerate(writing.workers) if who == owner}
            if dead or writing.owner == owner:
                writing.out -= dead
                writing.is_void = True
                self._advance(handle)

    def forget_leases(self, owner):
        for handle in [handle for handle, held in self.leases.items() if held[0] == owner]:
            del self.leases[handle]

    def clear(self, space):
        gone = [name for name in self.complete if space is None or name[0] == space.decode()[0]]
        pages = sum(sum(self.complete[name][1]) for name in gone)
        assert self.store.clear(space) == (len(gone), pages * PAGE)
        for name in gone:
            del self.complete[name]
        for writing in self.writings.values():
            if space in (None, writing.party.space):
                writing.is_void = True

    # What the model concludes.

    def _advance(self, handle):
        writing = self.writings[handle]
        if writing.out:
            return DROPPED if writing.is_void else PENDING
        del self.writings[handle]
        if writing.is_void:
            return DROPPED
        new = {
            name: (
                tuple((at, writing.seal(name, rank)) for rank, at in enumerate(offsets)),
                writing.sizes[name],
            )
            for name, offsets in writing.places.items()
            if name not in self.complete
        }
        self.complete |= new
        return VISIBLE if new else DROPPED

    def _live(self, name):
        return [w for w in self.writings.values() if name in w.places and not w.is_void]

    def _resident(self):
        entries = self.store.catalog.entries.values()
        return {entry.key.rstrip(b".").decode(): entry.refs for entry in entries if entry.refs}

    def _see_evictions(self, own, states, *, leaves_only):
        gone = self.complete.keys() - self._resident().keys()
        leased = {copy for _, _, held in self.leases.values() for copy in held.items()}
        last = max((at for at, name in enumerate(own) if states.get(name) == RESERVED), default=0)
        kept = {*own[:last]} if RESERVED in states.values() else set()
        left = {(name, self.complete[name]) for name in gone}
        assert not left & leased, "a leased chunk was evicted"
        # A chunk behind a hole may leave for the one in the hole, and is then reserved anew.
        again = {name for name, state in states.items() if state in {RESERVED, BUSY}}
        assert not gone & kept - again, "a store evicted its own prefix"
        for name in gone:
            del self.complete[name]
        for name in gone if leaves_only else ():
            children = {name + "0", name + "1"}
            assert not children & self.complete.keys(), "a head left before its tail"
            assert not any(self._live(child) for child in children), "a writer lost its prefix"

    def _check_states(self, states, before):
        full = [state == FULL for state in states.values()]
        assert full == sorted(full), "something behind a hole was stored"
        for name, state in states.items():
            ages = [self.now_s - writing.at_s for writing in self._live(name)]
            if state == PRESENT:
                assert name in before
                # What hangs below nothing may have left for a later part of the same reserve.
                assert name in self.complete or group_of(name)
            elif state == BUSY:
                assert min(ages) < WRITER_ALONE_S
            elif state == RESERVED:
                assert name not in self.complete
                assert min(ages, default=WRITER_ALONE_S) >= WRITER_ALONE_S

    def _note_writing(self, party, reserved, states):
        names = [name for name, state in states.items() if state == RESERVED]
        assert bool(names) == bool(reserved.reservation)
        ranks = len(party.workers)
        assert len(reserved.offsets) == 8 * ranks * len(names)
        offsets = [
            int.from_bytes(reserved.offsets[at : at + 8], "little")
            for at in range(0, len(reserved.offsets), 8)
        ]
        if names:
            self.writings[reserved.reservation] = Writing(
                reserved.reservation,
                party,
                party.scheduler,
                {name: party.pages[group_of(name)] for name in names},
                party.workers,
                party.requests,
                self.now_s,
                {name: offsets[at * ranks : (at + 1) * ranks] for at, name in enumerate(names)},
                set(range(ranks)),
            )

    def _check_full(self, party, own):
        """Nothing may be refused while a leaf could go and a place would be large enough."""
        tenant = self.shares.tenant(party.tenant)
        sizes = max(party.pages, key=sum)
        if self.shares.over_bytes(tenant, sum(sizes) * PAGE):
            assert not self._leaves(own, party.tenant), "refused although its own could leave"
            return
        leaves = self._leaves(own)
        # The first shard may be put in the middle of the place where the second would have gone.
        first, *others = sizes
        needed = first + 2 * sum(others)
        assert not leaves or max(self._gaps(own)) < needed, "refused although there was room"

    def _leaves(self, own, tenant=None):
        return [
            entry
            for entry in self.store.catalog.entries.values()
            if entry.refs and not (entry.children or entry.leases)
            and entry.key.rstrip(b".").decode() not in own
            and tenant in (None, entry.tenant.name)
        ]  # fmt: skip

    def _gaps(self, own):
        fixed = set()
        for name, refs in self.complete.items():
            if name in own:
                fixed |= self._pages_of(refs)
        for _, _, held in self.leases.values():
            for refs in held.values():
                fixed |= self._pages_of(refs)
        for writing in self.writings.values():
            for name, offsets in writing.places.items():
                refs = [(at, 0) for at in offsets]
                fixed |= self._pages_of((refs, writing.sizes[name]))
        for page in range(self.steps * STEP_PAGES):
            length = 0
            while (
                page + length not in fixed and (page + length) // STEP_PAGES == page // STEP_PAGES
            ):
                length += 1
            yield length

    @staticmethod
    def _pages_of(chunk):
        refs, sizes = chunk
        return {
            offset // PAGE + page
            for (offset, _), pages in zip(refs, sizes, strict=True)
            for page in range(pages)
        }

    def check(self):
        """Compare everything that both know, and every byte that somebody may read."""
        invariants.check(self.store)
        packed = {
            name: b"".join(number.to_bytes(8, "little") for ref in refs for number in ref)
            for name, (refs, _) in self.complete.items()
        }
        assert self._resident() == packed
        counted = self.bed.counted
        assert counted.leases == len(self.leases)
        assert counted.leased_chunks == sum(len(held) for _, _, held in self.leases.values())
        assert counted.reservations == len(self.writings)
        readable = [*self.complete.items()]
        readable += [item for _, _, held in self.leases.values() for item in held.items()]
        for name, (refs, sizes) in readable:
            for (offset, seal), pages in zip(refs, sizes, strict=True):
                written = {self.pages[offset // PAGE + page] for page in range(pages)}
                assert written == {seal}, (name, "foreign bytes under a seal")
