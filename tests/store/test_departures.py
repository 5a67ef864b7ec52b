"""The store says why a chunk is not there, within bounds."""

import pytest
from tests.store.bed import OTHER_SPACE, SPACE, Bed, key

from kvcellar.store.departures import Departures, Reason
from kvcellar.store.inspection import Deletion, delete_chunk, list_chunks


def why(bed, name):
    found = bed.store.catalog.departures.find(key(name))
    return found and found.reason


def test_an_evicted_chunk_is_remembered_with_its_time():
    bed = Bed(pages=2)
    instance = bed.instance()
    instance.commit(instance.reserve("a b", now_s=1.0))
    instance.commit(instance.reserve("c", now_s=5.0))
    assert why(bed, "b") == Reason.EVICTED
    assert bed.store.catalog.departures.find(key("b")).when_s == 5.0
    assert why(bed, "a") is None


def test_a_chunk_without_memory_and_one_whose_writer_failed_are_remembered():
    bed = Bed(pages=1)
    instance = bed.instance()
    held = instance.reserve("a b")
    assert why(bed, "b") == Reason.FULL
    instance.store.abort(instance.workers[0], held.reservation, 0)
    assert why(bed, "a") == Reason.DROPPED


def test_a_damaged_chunk_and_a_cleared_namespace_are_remembered():
    bed = Bed()
    instance = bed.instance()
    instance.commit(instance.reserve("a b", now_s=3.0))
    refs = bed.store.catalog.entries[key("b")].refs
    assert bed.remove_damaged("b", 0, int.from_bytes(refs[:8], "little"))
    assert why(bed, "b") == Reason.DAMAGED
    departures = bed.store.catalog.departures
    assert departures.last_clear_s(SPACE) is None
    bed.clear(SPACE)
    assert departures.last_clear_s(SPACE) == 3.0
    assert departures.last_clear_s(OTHER_SPACE) is None
    bed.clear()
    assert departures.last_clear_s(OTHER_SPACE) == 3.0


def test_only_so_many_are_remembered_the_newest():
    departures = Departures(keys_max=3)
    for number in range(5):
        departures.note(key(str(number)), Reason.EVICTED)
    departures.note(key("3"), Reason.DAMAGED)
    departures.note(key("5"), Reason.EVICTED)
    assert [departures.find(key(str(n))) is not None for n in range(6)] == [
        False, False, False, True, True, True,
    ]  # fmt: skip
    assert departures.find(key("3")).reason == Reason.DAMAGED


def test_a_chunk_in_use_is_deleted_only_by_force():
    bed = Bed()
    instance = bed.instance()
    instance.commit(instance.reserve("a b"))
    hit = instance.lookup("a b")
    assert delete_chunk(bed.store, key("b"), force=False) == Deletion.IN_USE
    assert delete_chunk(bed.store, key("b"), force=True) == Deletion.DELETED
    assert delete_chunk(bed.store, key("b"), force=True) == Deletion.ABSENT
    bed.check()
    assert bed.used_pages == 2
    instance.release(hit)
    assert bed.used_pages == 1
    assert why(bed, "b") == Reason.DELETED


def test_pages_of_a_listing_hold_every_complete_chunk_once():
    bed = Bed()
    instance, other = bed.instance(), bed.instance(space=OTHER_SPACE)
    instance.commit(instance.reserve("a b c"))
    other.commit(other.reserve("d"))
    instance.reserve("e")
    seen, at = [], 0
    while True:
        page = list_chunks(bed.store, at, count=2)
        seen += [entry.key for entry in page.chunks]
        at = page.next_at
        if not at:
            break
    assert seen == [key(name) for name in "abcd"]
    (only,) = list_chunks(bed.store, 0, count=9, namespaces=frozenset({OTHER_SPACE})).chunks
    assert only.key == key("d")
    assert list_chunks(bed.store, 100, count=9) == ([], 0)


@pytest.mark.parametrize(("pages", "gone"), [(8, 0), (4, 0), (2, 2), (0, 4)])
def test_memory_can_be_made_free_before_it_is_asked_for(pages, gone):
    bed = Bed(pages=8)
    instance = bed.instance()
    instance.commit(instance.reserve("a b c d"))
    step = bed.store.catalog.allocator.slot_bytes(1)
    assert bed.store.room.evict_down_to(pages * step, victims_max=9) == gone
    bed.check()
    assert bed.used_pages == 4 - gone
    assert instance.lookup("a b c d").count == 4 - gone
