"""Write-behind holds what it writes, within bounds, and lets go of it in every case."""

import pytest
from tests.server import tier_line
from tests.store.bed import PAGE, SPACE, Bed, key

from kvcellar.protocol.tier_messages import Write, WriteDone
from kvcellar.server.tier_meters import TierMeters
from kvcellar.server.writebehind import WriteBehind
from kvcellar.store.entries import OwnerId

PROCESS = OwnerId(9_999)


class Disk(tier_line.Disk):
    def answer(self, kept=None):
        question, on_answer = self.asked.pop(0)
        assert isinstance(question, Write)
        on_answer(WriteDone(question.id, kept or b"\1" * (len(question.keys) // 32)))
        return [question.keys[at : at + 32] for at in range(0, len(question.keys), 32)]


class World:
    def __init__(self, *, pages=64, bound_pages=None, is_skipping_l1=False):
        self.bed = Bed(pages)
        self.engine = self.bed.instance(1, 1)
        self.disk = Disk(batch_max=2)
        self.meters = TierMeters()
        self.writes = WriteBehind(
            self.bed.store,
            self.meters,
            self.disk,
            codec="raw",
            l1_bytes=4 * PAGE * (bound_pages or pages),
            is_skipping_l1=is_skipping_l1,
        )

    def put(self, names, owner=PROCESS):
        reserved = self.engine.reserve(names)
        held = self.bed.store.reservations.get(reserved.reservation)
        for rank in range(2):
            self.engine.commit(reserved, rank)
        self.writes.offer(owner, held)
        self.bed.check()

    def held(self):
        return self.bed.counted.leased_chunks, self.writes.chunks, self.writes.bytes // PAGE


def test_chunks_are_held_until_they_are_written():
    world = World()
    world.put("a b c")
    assert world.held() == (3, 3, 6)
    assert world.disk.answer() == [key("a"), key("b")]
    assert world.held() == (1, 1, 2)
    assert world.disk.answer() == [key("c")]
    assert world.held() == (0, 0, 0)
    assert world.meters.unwritten_chunks == 0
    world.bed.check()


def test_what_is_deleted_before_its_turn_is_not_written():
    world = World()
    world.put("a b c d e f g h i")
    assert len(world.disk.asked) == 2
    world.writes.forget({key(name) for name in "beghi"})
    assert world.held() == (9, 5, 18)
    # What was asked for already is the tier process's to delete, in order.
    written = [world.disk.answer() for _ in range(3)]
    assert written == [[key("a"), key("b")], [key("c"), key("d")], [key("f")]]
    assert world.held() == (0, 0, 0)
    assert world.meters.unwritten_chunks == 0
    world.bed.check()


def test_beyond_its_bound_the_leading_chunks_are_kept_and_the_rest_is_counted():
    world = World(bound_pages=4)
    world.put("a b c d")
    assert world.held() == (2, 2, 4)
    assert world.meters.unwritten_chunks == 2
    world.put("x")
    assert world.meters.unwritten_chunks == 3
    world.disk.answer()
    world.put("y")
    assert world.held() == (1, 1, 2)


def test_a_slow_disk_never_takes_the_memory_from_who_stores():
    world = World(pages=16, bound_pages=4)
    for name in "abcdefghijkl":
        world.put(name)
    assert world.engine.resident("l") == "l"
    assert world.held() == (2, 2, 4)


@pytest.mark.parametrize(("kept", "resident"), [(b"\1\1", ""), (b"\1\0", "b"), (b"\0\0", "a b")])
def test_what_a_tier_has_leaves_memory_where_that_is_to_be_skipped(kept, resident):
    world = World(is_skipping_l1=True)
    world.put("a b")
    world.disk.answer(kept)
    world.bed.check()
    assert world.engine.resident("a b") == resident
    assert world.meters.unwritten_chunks == kept.count(0)


def test_without_a_tier_process_nothing_is_held():
    world = World()
    world.put("a", owner=OwnerId(0))
    world.disk.is_away = True
    world.put("b")
    assert world.held() == (0, 0, 0)
    assert world.meters.unwritten_chunks == 2


def test_the_end_of_the_tier_process_ends_every_hold():
    world = World()
    world.put("a b")
    world.put("c d")
    world.put("e f")
    asked, world.disk.asked = world.disk.asked, []
    for _, on_answer in asked:
        on_answer(None)
    world.writes.life_ended()
    world.bed.die(PROCESS)
    assert world.held() == (0, 0, 0)
    assert world.meters.unwritten_chunks == 6


def test_a_clear_forgets_what_waits():
    world = World()
    for names in ("a", "b", "c"):
        world.put(names)
    world.bed.store.clear(SPACE)
    world.writes.drop()
    assert world.held()[1] == 2
    world.disk.answer()
    world.disk.answer()
    assert world.held() == (0, 0, 0)
    assert world.bed.used_pages == 0
