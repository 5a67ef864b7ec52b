"""A reservation has slots for all shards of the chunks that are new and fit."""

import pytest
from tests.store.bed import (
    BUSY,
    FULL,
    OTHER_SPACE,
    PAGE,
    PRESENT,
    RESERVED,
    SPACE,
    VISIBLE,
    Bed,
    joined,
    key,
    offsets_of,
)

from kvcellar.errors import LimitError, MalformedError, MismatchError, NotRegisteredError
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.store.limits import StoreLimits
from kvcellar.store.policies import Noop


def test_each_shard_of_each_new_chunk_gets_a_slot_of_its_own():
    bed = Bed(pages=6)
    engine = bed.instance(1, 2)
    reserved = engine.reserve("a b")
    assert list(reserved.states) == [RESERVED, RESERVED]
    assert reserved.reservation > 0
    offsets = offsets_of(reserved.offsets)
    taken = [
        page
        for offset, pages in zip(offsets, (1, 2, 1, 2), strict=True)
        for page in range(offset // PAGE, offset // PAGE + pages)
    ]
    assert sorted(taken) == list(range(6))


def test_what_is_stored_already_is_present_and_gets_none():
    bed = Bed()
    engine = bed.instance()
    engine.put("a b")
    reserved = engine.reserve("a b c")
    assert list(reserved.states) == [PRESENT, PRESENT, RESERVED]
    assert len(reserved.offsets) == 8
    assert bed.used_pages == 3


def test_nothing_new_makes_no_reservation():
    bed = Bed()
    engine = bed.instance()
    engine.put("a")
    assert engine.reserve("a").reservation == 0
    assert engine.reserve("").states == b""
    assert bed.counted.reservations == 0


def test_what_another_writes_is_busy_for_two_seconds():
    bed = Bed()
    one, other = bed.instance(), bed.instance()
    one.reserve("a b", now_s=10.0)
    assert list(other.reserve("a b c", now_s=11.999).states) == [BUSY, BUSY, RESERVED]
    assert list(other.reserve("a b c", now_s=12.0).states) == [RESERVED, RESERVED, BUSY]
    assert bed.counted.busy == 3
    assert bed.counted.second_writers == 2


def test_the_youngest_writer_is_the_one_that_is_waited_for():
    bed = Bed()
    one, two, three = bed.instance(), bed.instance(), bed.instance()
    one.reserve("a", now_s=0.0)
    two.reserve("a", now_s=5.0)
    assert three.states("a", now_s=6.9) == [BUSY]
    assert three.states("a", now_s=7.0) == [RESERVED]


def test_a_writer_that_gave_up_is_not_waited_for():
    bed = Bed()
    one, other = bed.instance(1, 1), bed.instance(1, 1)
    reserved = one.reserve("a")
    one.abort(reserved, 0)
    assert other.states("a", now_s=0.1) == [RESERVED]
    assert bed.counted.second_writers == 0


def test_the_leading_chunks_that_fit_are_kept():
    bed = Bed(pages=2)
    reserved = bed.instance().reserve("a b c d")
    assert list(reserved.states) == [RESERVED, RESERVED, FULL, FULL]
    assert bed.counted.refused_full == 2
    assert bed.instance().states("x", now_s=9.0) == [FULL]


def test_a_chunk_behind_a_hole_is_not_stored_even_where_it_would_fit():
    bed = Bed(pages=4, policy=Noop())
    engine = bed.instance(2, 1)
    other = bed.instance(space=OTHER_SPACE)
    engine.put("a")
    assert other.states("x") == [RESERVED]
    assert engine.states("b a", "a") == [FULL, FULL]


def test_a_chunk_gets_all_its_slots_or_none():
    bed = Bed(pages=3)
    engine = bed.instance(1, 1)
    assert list(engine.reserve("a b").states) == [RESERVED, FULL]
    assert bed.used_pages == 2


def test_where_nothing_may_leave_a_full_arena_stays_as_it_is():
    bed = Bed(pages=2, policy=Noop())
    engine = bed.instance()
    engine.put("a b")
    assert engine.states("c") == [FULL]
    assert engine.found("a b") == 2


def test_a_growth_step_that_comes_later_makes_room():
    bed = Bed(pages=1, step_pages=2)
    engine = bed.instance()
    first = engine.reserve("a b")
    assert list(first.states) == [RESERVED, FULL]
    bed.store.add_step(2 * PAGE, 2 * PAGE)
    assert list(engine.reserve("b c", "a").states) == [RESERVED, RESERVED]
    assert bed.counted.total_bytes == 3 * PAGE


def test_a_key_that_comes_twice_is_written_once():
    engine = Bed().instance()
    reserved = engine.reserve("a a b")
    assert list(reserved.states) == [RESERVED, BUSY, RESERVED]
    assert engine.commit(reserved) == VISIBLE
    assert engine.found("a b") == 2


def test_an_owner_with_too_many_reservations_gets_full_until_one_is_over():
    bed = Bed(limits=StoreLimits(reservations_max=2))
    engine, other = bed.instance(), bed.instance()
    reserved = engine.reserve("a")
    engine.reserve("b")
    assert engine.states("c d") == [FULL, FULL]
    assert bed.counted.refused_full == 2
    assert other.states("c") == [RESERVED]
    engine.commit(reserved)
    assert engine.states("c") == [RESERVED]


def test_arguments_that_break_the_protocol_are_refused():
    bed = Bed()
    engine = bed.instance(1, 1)

    def reserve(keys=b"", *, space=SPACE, parent=b"", writers=engine.workers):
        return bed.store.reserve(
            engine.scheduler, space, keys, parent=parent, writers=writers, now_s=0.0, request=1
        )

    with pytest.raises(MalformedError, match="31 bytes"):
        reserve(b"x" * 31)
    with pytest.raises(LimitError, match=str(KEYS_MAX)):
        reserve(bytes(32 * (KEYS_MAX + 1)))
    with pytest.raises(MalformedError, match="parent has 5 bytes"):
        reserve(parent=b"short")
    with pytest.raises(MismatchError, match="1 ranks, its namespace 2"):
        reserve(writers=engine.workers[:1])
    with pytest.raises(NotRegisteredError):
        reserve(space=OTHER_SPACE)
    assert bed.store.catalog.entries == {}


def test_clients_that_lie_about_parents_harm_nobody():
    """Keys are hashes of their parents, so a circle or a stranger as parent is a lie."""
    bed = Bed(pages=3)
    liar, other = bed.instance(), bed.instance(space=OTHER_SPACE)
    (offset,) = offsets_of(liar.put("a", "a").offsets)
    liar.put("b", "a")
    liar.put("c", "b")
    assert bed.remove_damaged("a", 0, offset)
    liar.put("a", "c")
    assert liar.found("a b c") == 3
    other.put("x", "c")
    assert other.found("x") == 1
    assert other.states("a") == [BUSY]
    for name in "defghi":
        other.put(name)
    assert liar.resident("a b c") == ""
    bed.clear()
    assert bed.store.catalog.entries == {}


def test_keys_that_were_only_asked_for_are_not_kept():
    bed = Bed(pages=1)
    engine = bed.instance()
    engine.cancel(engine.reserve("b", "a"))
    engine.reserve("c")
    engine.reserve("e", "d")
    assert list(bed.store.catalog.entries) == [key("c")]
    assert joined("c") in bed.store.catalog.writers
