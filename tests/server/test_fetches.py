"""Fetches in every order of answers: what is there comes in, and nothing is held in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server import tier_line
from tests.store.bed import PAGE, SPACE, Bed, joined, key

from kvcellar.clock import FakeClock
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import AwaitFetch, Lookup
from kvcellar.protocol.tier_messages import Find, Found, Read, ReadDone, Run
from kvcellar.server.fetch_records import Prefix
from kvcellar.server.fetches import FETCHES_MAX, Fetches, FetchOptions
from kvcellar.server.tier_meters import TierMeters
from kvcellar.store.entries import OwnerId
from kvcellar.store.inspection import count_leading
from kvcellar.store.policies import Noop

NAMES = [f"c{number}" for number in range(12)]


class Disk(tier_line.Disk):
    """It has some chunks, and answers in the order that the test says."""

    def __init__(self, names, damaged=()):
        super().__init__(batch_max=3)
        self.stored = {key(name) for name in names}
        self.damaged = {key(name) for name in damaged}
        self.reads = []

    def answer(self, place=0):
        question, on_answer = self.asked.pop(place)
        on_answer(self._found(question) if isinstance(question, Find) else self._read(question))

    def _found(self, question):
        count = 0
        keys = _split(question.keys)[question.start :]
        while count < len(keys) and keys[count] in self.stored:
            count += 1
        # As of two tiers, of which the second has what comes after the first two.
        cuts = [n for n in (min(2, count), count - min(2, count)) if n]
        return Found(question.id, tuple(Run(tier, n) for tier, n in enumerate(cuts)))

    def _read(self, question):
        assert isinstance(question, Read)
        keys = _split(question.keys)
        assert len(keys) <= self.batch_max
        assert len(question.offsets) == 8 * len(keys) * len(question.shard_bytes)
        count = 0
        while count < len(keys) and keys[count] in self.stored - self.damaged:
            count += 1
        self.stored -= self.damaged.intersection(keys)
        self.reads.append((question.tier, keys[:count]))
        return ReadDone(question.id, count, (b"s" * 8 * count,) * len(question.shard_bytes))


class Alarm:
    def __init__(self, act):
        self.act = act
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class Client:
    """A scheduler half with a connection."""

    def __init__(self, owner):
        self.owner = owner
        self.connection = self
        self.found = 0
        self.replies = []

    def push(self, reply):
        self.replies.append(reply)


class Place:
    """What a fetch needs to know of an instance."""

    name = "engine"
    namespace = SPACE
    shard_bytes = (PAGE, PAGE)


class World:
    def __init__(self, *, disk, memory="", pages=64, in_flight_max=2, is_retaining=True, **more):
        self.bed = Bed(pages, **more)
        self.engine = self.bed.instance(1, 1)
        if memory:
            self.engine.put(memory)
        self.disk = disk
        self.alarms = []
        self.meters = TierMeters()
        self.fetches = Fetches(
            self.bed.store,
            self.meters,
            disk,
            FetchOptions("raw", in_flight_max, is_retaining),
            clock=FakeClock(),
            later=self._later,
        )
        self.process = OwnerId(9_999)
        self.ids = 0

    def _later(self, _wait_s, act):
        self.alarms.append(Alarm(act))
        return self.alarms[-1]

    def begin(self, names):
        """Look up, begin to fetch and wait; return who does."""
        client = Client(self.bed.owner())
        keys = joined(" ".join(names))
        first = self.bed.store.lookup(client.owner, SPACE, keys, request=1)
        client.found = first.count
        handle = 0
        if first.count * KEY_BYTES < len(keys):
            lookup = Lookup(1, keys)
            handle = self.fetches.begin(client, self.process, Place, lookup, first.count)
        if handle:
            reply = self.fetches.wait(client, AwaitFetch(2, handle, 1.0))
            if reply is not None:
                client.push(reply)
        self.bed.check()
        return client

    def prefetch(self, names):
        """Begin a prefetch; return a list that gets an entry when it is over."""
        keys, over = joined(" ".join(names)), []
        prefix = Prefix(SPACE, (PAGE, PAGE), "", keys, count_leading(self.bed.store, SPACE, keys))
        assert self.fetches.prefetch(self.process, prefix, lambda: over.append(True))
        self.bed.check()
        return over

    def answer_all(self, draw=lambda _count: 0):
        while self.disk.asked:
            self.disk.answer(draw(len(self.disk.asked)))
            self.bed.check()

    def die(self):
        # The line is closed before anybody is told.
        asked, self.disk.asked, self.disk.is_away = self.disk.asked, [], True
        for _, on_answer in asked:
            on_answer(None)
        self.disk.is_away = False
        self.fetches.give_up()
        self.bed.store.owner_died(self.process)
        self.bed.check()

    def leave(self, *clients):
        for client in clients:
            self.bed.die(client.owner)


def _split(keys):
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def reach(names, *places):
    """Return how many leading names are in one of the places."""
    return next(
        (at for at, name in enumerate(names) if not any(name in place for place in places)),
        len(names),
    )


@given(st.data())
def test_every_order_of_answers_ends_with_all_there_is(data):
    some = st.lists(st.sampled_from(NAMES), unique=True)
    memory = NAMES[: data.draw(st.integers(0, 6))]
    stored = data.draw(st.one_of(st.just(NAMES), some))
    damaged = data.draw(some)
    wanted = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    world = World(
        disk=Disk(stored, damaged),
        memory=" ".join(memory),
        in_flight_max=data.draw(st.integers(1, 3)),
        is_retaining=data.draw(st.booleans()),
    )
    clients, prefetches = [], []
    for length in wanted:
        if data.draw(st.booleans()):
            prefetches.append(world.prefetch(NAMES[: data.draw(st.integers(1, 12))]))
        clients.append(world.begin(NAMES[:length]))
        if data.draw(st.booleans()) and world.disk.asked:
            world.disk.answer(data.draw(st.integers(0, len(world.disk.asked) - 1)))
            world.bed.check()
    is_dying = data.draw(st.booleans())
    if is_dying:
        world.die()
    world.answer_all(lambda count: data.draw(st.integers(0, count - 1)))

    good = [name for name in stored if name not in damaged]
    for client, length in zip(clients, wanted, strict=True):
        if client.found == length:
            assert client.replies == []
            continue
        (reply,) = client.replies
        expected = reach(NAMES[:length], memory, good)
        assert len(memory) <= reply.count <= expected
        if not is_dying:
            assert reply.count == expected
        assert len(reply.refs) == reply.count * 32
    assert prefetches == [[True]] * len(prefetches)
    assert all(alarm.is_cancelled for alarm in world.alarms)
    assert (world.fetches.in_flight, world.fetches.queued) == (0, 0)
    world.leave(*clients)
    counted = world.bed.counted
    assert (counted.leases, counted.reservations, counted.reserved_chunks) == (0, 0, 0)
    assert world.fetches._reading == {}


def test_the_same_chunks_are_read_once_for_all_who_want_them():
    world = World(disk=Disk(NAMES), in_flight_max=3)
    clients = [world.begin(NAMES) for _ in range(3)]
    world.answer_all()
    assert [client.replies[0].count for client in clients] == [12] * 3
    read = [name for _, keys in world.disk.reads for name in keys]
    assert len(read) == len(set(read)) == 12


def test_who_waits_is_answered_at_the_deadline_with_what_is_there():
    world = World(disk=Disk(NAMES))
    client = world.begin(NAMES)
    world.disk.answer()
    world.disk.answer()
    world.alarms[0].act()
    assert [reply.count for reply in client.replies] == [2]
    assert world.meters.fetches_late == 1
    world.answer_all()
    assert len(client.replies) == 1
    assert world.engine.found(" ".join(NAMES)) == 12


def test_an_answer_for_a_connection_that_is_gone_leases_nothing():
    world = World(disk=Disk(NAMES))
    client = world.begin(NAMES)
    client.connection = None
    world.answer_all()
    assert client.replies == []
    assert world.bed.counted.leases == 0


def test_a_fetched_chunk_leaves_first_unless_it_is_used_again():
    """Six pages hold three chunks of two shards: an old one and two that were fetched."""
    world = World(disk=Disk(["a", "b"]), memory="old", pages=6, is_retaining=False)
    once, twice = world.begin(["a"]), world.begin(["b"])
    world.answer_all()
    world.leave(once, twice)
    assert world.engine.found("b") == 1
    world.engine.put("new")
    assert world.engine.resident("old a b new") == "old b new"


def test_a_prefetched_chunk_is_there_to_stay():
    world = World(disk=Disk(["a"]), memory="old", pages=4, is_retaining=False)
    assert world.prefetch(["a"]) == []
    world.answer_all()
    world.engine.put("new")
    assert world.engine.resident("old a new") == "a new"


def test_prefetches_let_engines_go_first_and_take_half_of_the_places():
    world = World(disk=Disk(NAMES), in_flight_max=2)
    over = [world.prefetch([name]) for name in NAMES[:3]]
    for _ in over:
        world.disk.answer()
    assert (world.fetches.in_flight, world.fetches.queued) == (1, 2)
    world.begin(NAMES[3:5])
    world.disk.answer(1)
    assert (world.fetches.in_flight, world.fetches.queued) == (2, 2)
    late = world.begin(NAMES[5:7])
    world.disk.answer(len(world.disk.asked) - 1)
    # The prefetch ends; the place that it leaves goes to the engine, which came last.
    world.disk.answer()
    assert over == [[True], [], []]
    assert late.replies == []
    assert world.fetches.queued == 2
    world.answer_all()
    assert over == [[True]] * 3
    assert late.replies[0].count == 2


@pytest.mark.parametrize("deleted", ["c01", "c04", "c11"])
@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_chunk_that_is_deleted_meanwhile_does_not_come_in(deleted, answered):
    names = [f"c{number:02}" for number in range(12)]
    world = World(disk=Disk(names))
    client = world.begin(names)
    for _ in range(answered):
        world.disk.answer()
    was_there = world.engine.resident(deleted) == deleted
    world.fetches.forget(frozenset([key(deleted)]))
    world.answer_all()
    assert was_there or world.engine.resident(deleted) == ""
    (reply,) = client.replies
    assert reply.count == 12 if was_there else reply.count <= names.index(deleted)
    world.leave(client)
    assert world.bed.counted.reservations == 0
    assert world.fetches._reading == {}


def test_prefetches_that_wait_ask_for_nothing_more_when_the_tiers_are_emptied():
    world = World(disk=Disk(NAMES), in_flight_max=1)
    over = [world.prefetch([name]) for name in NAMES[:3]]
    for _ in over:
        world.disk.answer()
    world.fetches.give_up()
    assert over == [[True]] * 3
    assert (world.fetches.in_flight, world.fetches.queued, len(world.disk.asked)) == (0, 0, 1)


def test_a_prefetch_holds_nothing_and_is_forgotten_when_it_is_over():
    world = World(disk=Disk(NAMES))
    over = world.prefetch(NAMES)
    world.answer_all()
    assert over == [True]
    assert (world.fetches._fetches, world.fetches._keys_bytes) == ({}, 0)
    assert world.bed.counted.leases == 0
    assert world.engine.found(" ".join(NAMES)) == 12


def test_a_retained_chunk_is_as_any_other():
    world = World(disk=Disk(["a"]), memory="old", pages=4, is_retaining=True)
    client = world.begin(["a"])
    world.answer_all()
    world.leave(client)
    world.engine.put("new")
    assert world.engine.resident("old a new") == "a new"


def test_memory_without_room_ends_a_fetch_with_what_fits():
    world = World(disk=Disk(NAMES), pages=8, policy=Noop())
    client = world.begin(NAMES)
    world.answer_all()
    assert client.replies[0].count == 4


def test_a_tier_process_that_cannot_be_asked_begins_nothing():
    world = World(disk=Disk(NAMES))
    world.disk.is_away = True
    assert world.begin(NAMES).replies == []
    assert world.alarms == []
    assert world.meters.fetches == 0


def test_fetches_that_nobody_asks_about_are_bounded():
    world = World(disk=Disk([]))
    client = Client(world.bed.owner())
    for _ in range(FETCHES_MAX + 5):
        assert world.fetches.begin(client, world.process, Place, Lookup(1, joined("x")), 0)
        world.disk.answer()
    assert len(world.fetches._fetches) == FETCHES_MAX


@pytest.mark.parametrize("handle", [0, 7])
def test_a_handle_that_names_nothing_is_an_empty_answer(handle):
    world = World(disk=Disk([]))
    client = Client(world.bed.owner())
    assert world.fetches.wait(client, AwaitFetch(3, handle, 1.0)).count == 0
