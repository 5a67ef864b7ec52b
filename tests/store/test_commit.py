"""Chunks are visible when the last rank has committed; slots are free when no rank is out."""

import pytest
from tests.store.bed import DROPPED, PENDING, RESERVED, VISIBLE, Bed, offsets_of, seals

from kvcellar.errors import MalformedError, NotRegisteredError


def test_all_chunks_are_visible_at_the_last_commit_and_none_before():
    engine = Bed(pages=9).instance(1, 1, 1)
    reserved = engine.reserve("a b c")
    assert [engine.commit(reserved, 2), engine.commit(reserved, 0)] == [PENDING, PENDING]
    assert engine.found("a b c") == 0
    assert engine.commit(reserved, 1) == VISIBLE
    assert engine.found("a b c") == 3


def test_a_reservation_is_over_after_the_last_commit():
    bed = Bed()
    engine = bed.instance()
    reserved = engine.reserve("a")
    assert (bed.counted.reservations, bed.counted.reserved_chunks) == (1, 1)
    engine.commit(reserved)
    assert (bed.counted.reservations, bed.counted.reserved_chunks) == (0, 0)
    with pytest.raises(NotRegisteredError):
        engine.commit(reserved)
    with pytest.raises(NotRegisteredError):
        engine.abort(reserved)
    engine.cancel(reserved)
    assert engine.found("a") == 1


def test_a_commit_that_comes_twice_changes_nothing():
    """Its reply may have been lost with the connection."""
    engine = Bed().instance(1, 1)
    reserved = engine.reserve("a")
    assert engine.commit(reserved, 0, start=5) == PENDING
    assert engine.commit(reserved, 0, start=6) == PENDING
    assert engine.commit(reserved, 1, start=7) == VISIBLE
    refs = engine.lookup("a").refs
    assert [refs[at] for at in (8, 24)] == [5, 7]


def test_a_commit_that_breaks_the_protocol_is_refused_and_changes_nothing():
    bed = Bed()
    engine, stranger = bed.instance(1, 1), bed.owner()
    reserved = engine.reserve("a b")

    def commit(owner, shard, sealed):
        return bed.store.commit(owner, reserved.reservation, shard, sealed)

    with pytest.raises(MalformedError, match="shard 0"):
        commit(engine.workers[1], 0, seals(2))
    with pytest.raises(MalformedError, match="shard 2"):
        commit(engine.workers[1], 2, seals(2))
    with pytest.raises(MalformedError, match="shard -1"):
        commit(engine.workers[1], -1, seals(2))
    with pytest.raises(MalformedError, match="shard 0"):
        commit(stranger, 0, seals(2))
    with pytest.raises(MalformedError, match="shard 0"):
        commit(engine.scheduler, 0, seals(2))
    with pytest.raises(MalformedError, match="8 bytes of seals for 2 chunks"):
        commit(engine.workers[0], 0, seals(1))
    with pytest.raises(MalformedError, match="shard 1"):
        bed.store.abort(stranger, reserved.reservation, 1)
    with pytest.raises(NotRegisteredError, match="99"):
        bed.store.commit(engine.workers[0], 99, 0, seals(2))
    assert [engine.commit(reserved, 0), engine.commit(reserved, 1)] == [PENDING, VISIBLE]


class TestTwoWriters:
    def test_the_first_to_be_complete_is_kept_and_the_other_is_freed(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a", now_s=0.0)
        fast = other.reserve("a", now_s=2.0)
        assert other.commit(fast) == VISIBLE
        assert bed.used_pages == 2
        assert one.commit(slow) == DROPPED
        assert bed.used_pages == 1
        assert offsets_of(one.lookup("a").refs)[0] == offsets_of(fast.offsets)[0]
        assert (bed.counted.stored, bed.counted.dropped) == (1, 1)

    def test_the_older_wins_when_it_is_first_after_all(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a", now_s=0.0)
        fast = other.reserve("a", now_s=2.0)
        assert one.commit(slow) == VISIBLE
        assert other.commit(fast) == DROPPED
        assert offsets_of(one.lookup("a").refs)[0] == offsets_of(slow.offsets)[0]
        assert bed.used_pages == 1

    def test_who_lost_some_chunks_still_stores_the_rest(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a b c", now_s=0.0)
        other.put("a b", now_s=2.0)
        assert one.commit(slow) == VISIBLE
        assert one.found("a b c") == 3
        assert bed.used_pages == 3

    def test_the_one_that_is_left_may_still_win_when_the_other_gives_up(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a", now_s=0.0)
        other.abort(other.reserve("a", now_s=2.0))
        assert one.commit(slow) == VISIBLE

    def test_the_loser_makes_the_chunk_visible_again_if_it_was_removed_meanwhile(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a", now_s=0.0)
        fast = other.put("a", now_s=2.0)
        assert bed.remove_damaged("a", 0, offsets_of(fast.offsets)[0])
        assert one.found("a") == 0
        assert one.commit(slow) == VISIBLE
        assert one.found("a") == 1


class TestAbort:
    def test_one_rank_that_fails_drops_the_chunks_and_frees_them_at_the_last(self):
        bed = Bed(pages=9)
        engine = bed.instance(1, 1, 1)
        reserved = engine.reserve("a b c")
        assert engine.commit(reserved, 0) == PENDING
        assert engine.abort(reserved, 1) == DROPPED
        assert bed.used_pages == 9
        assert engine.commit(reserved, 0) == DROPPED
        assert engine.commit(reserved, 2) == DROPPED
        assert bed.used_pages == 0
        assert engine.found("a") == 0
        assert bed.counted.dropped == 3

    def test_a_rank_may_take_its_commit_back_while_others_are_out(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        reserved = engine.reserve("a")
        engine.commit(reserved, 0)
        assert engine.abort(reserved, 0) == DROPPED
        assert engine.commit(reserved, 1) == DROPPED
        assert bed.used_pages == 0

    def test_slots_of_a_failed_reservation_are_not_given_to_the_next_writer(self):
        """Rank 1 may still be copying."""
        bed = Bed(pages=4)
        engine = bed.instance(1, 1)
        failed = engine.reserve("a")
        engine.abort(failed, 0)
        again = engine.reserve("a")
        assert list(again.states) == [RESERVED]
        assert set(offsets_of(failed.offsets)) & set(offsets_of(again.offsets)) == set()
        engine.abort(failed, 1)
        assert engine.commit(again, 0) == PENDING
        assert engine.commit(again, 1) == VISIBLE


class TestCancel:
    def test_what_no_rank_was_told_of_is_free_at_once(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        engine.cancel(engine.reserve("a b"))
        assert bed.used_pages == 0
        assert bed.store.catalog.entries == {}

    def test_the_reservation_of_another_is_not_cancelled(self):
        bed = Bed()
        engine, other = bed.instance(), bed.instance()
        reserved = engine.reserve("a")
        other.cancel(reserved)
        bed.store.cancel(engine.workers[0], reserved.reservation)
        assert engine.commit(reserved) == VISIBLE

    def test_a_cancel_that_cannot_be_true_waits_for_the_ranks(self):
        """A rank has spoken, so some rank was told, and the others may be copying."""
        bed = Bed()
        engine = bed.instance(1, 1)
        reserved = engine.reserve("a")
        engine.commit(reserved, 0)
        engine.cancel(reserved)
        assert bed.used_pages == 2
        assert engine.found("a") == 0
        assert engine.commit(reserved, 1) == DROPPED
        assert bed.used_pages == 0
