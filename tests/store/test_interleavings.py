"""Clients of three instances come, copy, stall, die and report late, in every order.

Two instances share a namespace with one shard a chunk, a third has two shards of other sizes, and
a fourth has three KV groups: one that needs all chunks, one with a window of two, one with local
spans of three.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.store.world import PAGE, STEPS, WRITER_ALONE_S, Party, World, prefixes

from kvcellar.store.policies import LRU, IsolatedLRU

ONE, TWO, GROUPED = b"A" * 32, b"B" * 32, b"C" * 32
PARTIES = st.integers(0, 3)
# Few ways through the tree, so that clients meet each other on them.
BITS = st.sampled_from(["0", "00", "000", "0000", "000000", "001", "00111", "01", "011", "1", "11"])
STARTS = st.sampled_from([0, 0, 0, 1, 2])
PICKS = st.integers(0, 30)
UNTIL = st.sampled_from(["asked", "answered", "told", "half stored", "stored", "stored"])
REPLIES = st.sampled_from(["in time", "too late", "on its way"])
LOSSES = st.sampled_from(["connection", "scheduler", "scheduler", "rank 0", "rank 1"])


class Lives(RuleBasedStateMachine):
    """Each rule is something that one process does, or that happens to it."""

    policy = LRU

    def __init__(self):
        super().__init__()
        self.world = World(self.policy())
        self.parties = [
            Party(self.world, ONE, (2,), "a"),
            Party(self.world, ONE, (2,), "a"),
            Party(self.world, TWO, (3, 5), "b"),
            Party(self.world, GROUPED, (1, 1, 2), "c", spans=(0, 2, -3)),
        ]
        self.world.add_step()
        self.late = []  # heartbeats that are made but have not arrived

    def _copies(self):
        return [
            (handle, rank)
            for handle, writing in sorted(self.world.writings.items())
            for rank in sorted(writing.told)
        ]

    def _busy(self, number):
        """Return an instance that holds something or awaits a reply, if there is one."""
        holders = {writing.owner for writing in self.world.writings.values()}
        holders |= {owner for owner, _, _ in self.world.leases.values()}
        busy = [party for party in self.parties if party.scheduler in holders or party.replies]
        return busy[number % len(busy)] if busy else self.parties[number]

    @initialize(numbers=st.lists(PARTIES, min_size=2, max_size=6), data=st.data())
    def have_begun(self, numbers, data):
        for number in numbers:
            self.store(number, data.draw(BITS), 0, "stored", is_patient=False)
        self.store(numbers[0], data.draw(BITS), 0, data.draw(UNTIL), is_patient=False)

    @rule(number=PARTIES, bits=BITS, start=STARTS, reply=REPLIES)
    def look_up(self, number, bits, start, reply):
        party = self.parties[number]
        names = prefixes(party.space, bits)
        self.world.lookup(party, " ".join(names[min(start, len(names) - 1) :]))
        if reply != "on its way":
            self._hear(party, party.requests, in_time=reply == "in time")

    @rule(number=PARTIES, bits=BITS, start=STARTS, until=UNTIL, is_patient=st.booleans())
    def store(self, number, bits, start, until, is_patient):
        """Begin to store some chunks, and go on until something comes between.

        Who is patient waits until a writer that is there already is no longer waited for.
        """
        party = self.parties[number]
        names = prefixes(party.space, bits)
        start = min(start, len(names) - 1)
        if is_patient:
            self.time_passes(WRITER_ALONE_S)
        self.world.reserve(party, " ".join(names[start:]), names[start - 1] if start else "")
        if until == "asked":
            return
        self._hear(party, party.requests, in_time=True)
        if until != "answered":
            for handle in sorted(party.untold):
                self._tell(party, handle)
        for handle, rank in self._copies() if until.endswith("stored") else ():
            writing = self.world.writings[handle]
            if writing.owner == party.scheduler and writing.request == party.requests:
                self.world.commit(handle, rank)
                if until == "half stored":
                    break

    def _hear(self, party, request, *, in_time):
        kind, handle = party.replies.pop(request)
        if in_time and kind == "lease":
            party.leases |= {handle} & self.world.leases.keys()
        elif in_time:
            party.untold |= {handle} & self.world.writings.keys()

    def _tell(self, party, handle):
        party.untold.discard(handle)
        if handle in self.world.writings:
            writing = self.world.writings[handle]
            # A rank that died since has nobody to copy; its successor knows nothing of it.
            writing.told |= {r for r in writing.out if writing.workers[r] == party.workers[r]}

    @precondition(lambda self: any(party.replies for party in self.parties))
    @rule(pick=PICKS, in_time=st.booleans())
    def a_reply_comes(self, pick, in_time):
        """One that comes after its deadline is dropped: the next heartbeat tells the server."""
        waiting = [(party, one) for party in self.parties for one in party.replies]
        party, request = waiting[pick % len(waiting)]
        self._hear(party, request, in_time=in_time)

    @precondition(lambda self: any(party.untold for party in self.parties))
    @rule(pick=PICKS)
    def tell_the_ranks(self, pick):
        waiting = [(party, one) for party in self.parties for one in sorted(party.untold)]
        party, handle = waiting[pick % len(waiting)]
        self._tell(party, handle)

    @precondition(lambda self: any(party.untold for party in self.parties))
    @rule(pick=PICKS)
    def cancel(self, pick):
        waiting = [(party, one) for party in self.parties for one in sorted(party.untold)]
        party, handle = waiting[pick % len(waiting)]
        party.untold.discard(handle)
        self.world.store.cancel(party.scheduler, handle)
        writing = self.world.writings.get(handle)
        if writing is not None and len(writing.out) == len(writing.workers):
            del self.world.writings[handle]
        elif writing is not None:
            writing.is_void = True

    @precondition(lambda self: self._copies())
    @rule(pick=PICKS)
    def write(self, pick):
        copies = self._copies()
        self.world.write(*copies[pick % len(copies)])

    @precondition(lambda self: self._copies())
    @rule(pick=PICKS)
    def commit(self, pick):
        copies = self._copies()
        self.world.commit(*copies[pick % len(copies)])

    @precondition(lambda self: self._copies())
    @rule(pick=PICKS, is_heard=st.booleans())
    def a_copy_fails(self, pick, is_heard):
        """A rank whose message was lost with its connection is done all the same."""
        copies = self._copies()
        handle, rank = copies[pick % len(copies)]
        if is_heard:
            self.world.abort(handle, rank)
        else:
            self.world.writings[handle].told.discard(rank)

    @precondition(lambda self: self.world.leases)
    @rule(number=PARTIES, pick=PICKS, is_own=st.booleans())
    def release(self, number, pick, is_own):
        handle = sorted(self.world.leases)[pick % len(self.world.leases)]
        owner = self.world.leases[handle][0]
        party = self.parties[number]
        if is_own:
            party = next(party for party in self.parties if party.scheduler == owner)
        self.world.store.release(party.scheduler, [handle, 0])
        if party.scheduler == owner:
            party.leases.discard(handle)
            del self.world.leases[handle]

    @rule(number=PARTIES, is_late=st.booleans())
    def heartbeat(self, number, is_late):
        party = self._busy(number)
        beat = party.heartbeat()
        if is_late:
            self.late.append((party, party.scheduler, beat))
        else:
            self.world.keep(party, beat)

    @precondition(lambda self: self.late)
    @rule(pick=PICKS)
    def a_late_heartbeat_comes(self, pick):
        party, scheduler, beat = self.late.pop(pick % len(self.late))
        if party.scheduler == scheduler:
            self.world.keep(party, beat)

    @rule(number=PARTIES, what=LOSSES)
    def something_is_lost(self, number, what):
        party = self._busy(number)
        if what == "connection":
            self.world.store.reader_left(party.scheduler)
            self.world.forget_leases(party.scheduler)
            for writing in self.world.writings.values():
                if writing.owner == party.scheduler:
                    writing.request = 0
            party.leases.clear()
            party.replies.clear()
            party.requests = 0
            self.late = [beat for beat in self.late if beat[0] is not party]
        elif what == "scheduler":
            self.world.die(party.scheduler)
            party.begin()
        else:
            rank = int(what[-1]) % len(party.workers)
            self.world.die(party.workers[rank])
            workers = list(party.workers)
            workers[rank] = self.world.bed.owner()
            party.workers = tuple(workers)

    @precondition(lambda self: self.world.complete)
    @rule(pick=PICKS, rank=st.integers(0, 1), is_there=st.booleans())
    def damage(self, pick, rank, is_there):
        name = sorted(self.world.complete)[pick % len(self.world.complete)]
        refs, _ = self.world.complete[name]
        rank %= len(refs)
        offset = refs[rank][0] + (0 if is_there else PAGE)
        assert self.world.bed.remove_damaged(name, rank, offset) == is_there
        if is_there:
            del self.world.complete[name]

    @precondition(lambda self: self.world.complete)
    @rule(space=st.sampled_from([ONE, TWO, GROUPED, None]), is_meant=st.booleans())
    def clear(self, space, is_meant):
        """Half as often as the rest, for it ends most of what makes a history interesting."""
        if is_meant:
            self.world.clear(space)

    @precondition(lambda self: self.world.steps < STEPS)
    @rule()
    def a_growth_step_arrives(self):
        self.world.add_step()

    @rule(seconds=st.sampled_from([0.5, 1.5, 2.0]))
    def time_passes(self, seconds):
        self.world.now_s += seconds

    @invariant()
    def the_store_is_as_it_should_be(self):
        self.world.check()

    def teardown(self):
        """Everybody leaves, and only chunks that can be found are left."""
        world = self.world
        for party in self.parties:
            for owner in (party.scheduler, *party.workers):
                world.die(owner)
        world.check()
        assert (world.leases, world.writings) == ({}, {})
        counted = world.bed.counted
        assert (counted.leases, counted.reservations, counted.reserved_chunks) == (0, 0, 0)
        chunks = world.complete.values()
        assert counted.used_bytes == PAGE * sum(sum(sizes) for _, sizes in chunks)
        world.clear(None)
        assert all(one.limit_bytes is not None for one in world.shares)
        assert (world.bed.counted.used_bytes, world.store.catalog.entries) == (0, {})


class LivesOfTenants(Lives):
    """The same, while quotas come, change and go."""

    policy = IsolatedLRU

    @rule(number=PARTIES, pages=st.none() | st.integers(0, 24))
    def a_quota_is_set(self, number, pages):
        self.world.limit(self.parties[number], pages)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40)
TestLivesOfTenants = LivesOfTenants.TestCase
TestLivesOfTenants.settings = settings(max_examples=75, stateful_step_count=40)
