"""Fetches for models of several KV groups: each of them as far as the hit's end needs it."""

from hypothesis import given
from hypothesis import strategies as st
from tests.server.test_fetches import Client, Disk
from tests.store.bed import PAGE, SPACE, Bed, joined

from kvcellar.clock import FakeClock
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import AwaitFetch, Lookup
from kvcellar.server.fetch_legs import Legs
from kvcellar.server.fetches import Fetches, FetchOptions
from kvcellar.server.tier_meters import TierMeters
from kvcellar.store.entries import OwnerId

CHUNKS = 10
PROCESS = OwnerId(9_999)


def part(group, chunk):
    return f"{'wxyz'[group]}{chunk}"


def needed(span, end):
    if span == 0:
        return range(end)
    return range(max(0, end - span), end) if span > 0 else range(end - end % -span, end)


def best_end(spans, there, count):
    ends = (
        end
        for end in range(count, 0, -1)
        if all(part(g, c) in there for g, span in enumerate(spans) for c in needed(span, end))
    )
    return next(ends, 0)


class World:
    """A store, a tier and one instance with as many pages a shard as the group's number and one."""

    def __init__(self, spans, memory, disk):
        self.spans, self.disk = spans, disk
        self.bed = Bed(pages=256)
        self.namespace, self.name = SPACE, "engine"
        pages = tuple(group + 1 for group in range(len(spans)))
        self.shard_bytes = tuple(count * PAGE for count in pages)
        engine = self.bed.instance(*pages, spans=spans)
        if memory:
            groups = bytes("wxyz".index(name[0]) for name in memory)
            engine.put(" ".join(memory), groups=groups)
        self.alarms = []
        self.fetches = Fetches(
            self.bed.store, TierMeters(), disk, FetchOptions("raw", 2, is_retaining=True),
            clock=FakeClock(), later=self._later,
        )  # fmt: skip

    def _later(self, _wait_s, act):
        self.alarms.append(act)
        return self

    def cancel(self):
        """Do as an alarm that is called off."""

    def fetch(self, draw):
        """Look up, fetch what is missing with answers in any order, and return both counts."""
        names = [part(g, c) for g in range(len(self.spans)) for c in range(CHUNKS)]
        client, keys = Client(self.bed.owner()), joined(" ".join(names))
        first = self.bed.store.lookup(client.owner, SPACE, keys, request=1)
        handle = self.fetches.begin(client, PROCESS, self, Lookup(1, keys), first.count)
        if not handle:
            return first.count, first.count
        reply = self.fetches.wait(client, AwaitFetch(2, handle, 1.0))
        while self.disk.asked:
            self.disk.answer(draw(len(self.disk.asked)))
            self.bed.check()
        (reply,) = client.replies if reply is None else [reply]
        self.bed.die(client.owner)
        return first.count, reply.count


SPANS = st.sampled_from([(0,), (0, 1), (2, 0), (0, 3, 0), (0, -3), (2,), (0, -2, 2)])


@given(data=st.data(), spans=SPANS)
def test_what_comes_is_the_longest_hit_of_memory_and_tiers_together(data, spans):
    names = [part(g, c) for g in range(len(spans)) for c in range(CHUNKS)]
    some = st.sets(st.sampled_from(names), max_size=3)
    memory = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=12))
    stored = [name for name in names if name not in data.draw(some)]
    damaged = data.draw(some)
    world = World(spans, sorted(memory), Disk(stored, damaged))
    found, count = world.fetch(lambda n: data.draw(st.integers(0, n - 1)))
    good = {name for name in stored if name not in damaged}
    whole = [g for g, span in enumerate(spans) if not span]
    # Of groups that need all, what memory has behind a gap of the tiers is not looked for.
    reached = next(
        (chunk for chunk in range(found, CHUNKS) if any(part(g, chunk) not in good for g in whole)),
        CHUNKS,
    )
    assert found == best_end(spans, {*memory}, CHUNKS)
    best = best_end(spans, {*memory} | good, reached)
    assert count >= max(found, best)
    assert count <= best_end(spans, {*memory} | good, CHUNKS)
    counted = world.bed.counted
    assert (counted.leases, counted.reservations, counted.reserved_chunks) == (0, 0, 0)
    assert (world.fetches.in_flight, world.fetches.queued, world.fetches._reading) == (0, 0, {})


def test_of_windows_only_what_the_end_needs_is_read():
    names = [part(g, c) for g in range(2) for c in range(CHUNKS)]
    world = World((0, 2), [], Disk(names))
    assert world.fetch(lambda _n: 0) == (0, CHUNKS)
    read = {key.rstrip(b".").decode() for _, keys in world.disk.reads for key in keys}
    assert read == {*(part(0, c) for c in range(CHUNKS)), part(1, 8), part(1, 9)}


def test_no_more_than_a_few_ends_are_tried():
    keys = joined(" ".join(part(g, c) for g in range(2) for c in range(40)))
    legs = Legs(keys, (0, 1), (PAGE, PAGE), found=0)
    assert legs.next(lambda _key: False).group == 0
    legs.end(40)
    tried = 0
    while (leg := legs.next(lambda _key: False)) is not None:
        assert (leg.group, len(leg.keys)) == (1, KEY_BYTES)
        tried += 1
        legs.end(0)
    assert tried == 8
