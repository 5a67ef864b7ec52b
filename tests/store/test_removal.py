"""A cleared or damaged chunk is gone at once; its slots are when its last reader is."""

from tests.store.bed import (
    DROPPED,
    OTHER_SPACE,
    PAGE,
    PENDING,
    PRESENT,
    RESERVED,
    SPACE,
    VISIBLE,
    Bed,
    key,
    offsets_of,
)

from kvcellar.keys.digest import NamespaceId


class TestClear:
    def test_it_forgets_everything_and_says_how_much(self):
        bed = Bed(pages=16)
        bed.instance(1, 2).put("a b")
        bed.instance(1, space=OTHER_SPACE).put("c")
        assert bed.clear() == (3, 7 * PAGE)
        assert bed.used_pages == 0
        assert bed.store.catalog.entries == {}
        assert (bed.counted.clears, bed.counted.cleared) == (1, 3)

    def test_one_namespace_goes_without_the_others(self):
        bed = Bed()
        gone, kept = bed.instance(), bed.instance(space=OTHER_SPACE)
        gone.put("a")
        kept.put("b")
        assert bed.clear(SPACE) == (1, PAGE)
        assert (gone.found("a"), kept.found("b")) == (0, 1)
        assert bed.clear(NamespaceId(b"?" * 32)) == (0, 0)
        assert kept.found("b") == 1

    def test_each_clear_begins_an_epoch(self):
        bed = Bed()
        before = bed.store.epoch
        bed.clear()
        bed.clear(SPACE)
        assert bed.store.epoch == before + 2

    def test_what_was_being_written_never_becomes_visible(self):
        bed = Bed()
        engine, other = bed.instance(1, 1), bed.instance(space=OTHER_SPACE)
        reserved, kept = engine.reserve("a"), other.reserve("b")
        engine.commit(reserved, 0)
        bed.clear(SPACE)
        assert bed.used_pages == 3
        again = engine.reserve("a")
        assert list(again.states) == [RESERVED]
        assert engine.commit(reserved, 1) == DROPPED
        assert engine.found("a") == 0
        assert other.commit(kept) == VISIBLE
        assert engine.commit(again, 0) == PENDING
        assert engine.commit(again, 1) == VISIBLE

    def test_a_reservation_that_no_rank_knows_may_be_cancelled_after_it(self):
        bed = Bed()
        engine = bed.instance()
        reserved = engine.reserve("a")
        bed.clear()
        engine.cancel(reserved)
        assert bed.used_pages == 0

    def test_leased_slots_are_free_at_the_last_release(self):
        bed = Bed()
        engine, other = bed.instance(), bed.instance()
        engine.put("a b")
        first, second = engine.lookup("a b"), other.lookup("a")
        assert bed.clear() == (2, 2 * PAGE)
        assert engine.found("a") == 0
        assert bed.used_pages == 2
        engine.release(first)
        assert bed.used_pages == 1
        other.release(second)
        assert bed.used_pages == 0

    def test_a_chunk_is_stored_anew_while_its_old_slots_are_still_read(self):
        bed = Bed()
        engine = bed.instance()
        engine.put("a b")
        old = engine.lookup("a b")
        bed.clear()
        engine.put("a b")
        new = engine.lookup("a b")
        assert set(offsets_of(old.refs, 16)) & set(offsets_of(new.refs, 16)) == set()
        engine.release(old)
        assert bed.used_pages == 2
        engine.release(new)
        assert engine.found("a b") == 2


class TestDamage:
    def test_the_chunk_is_gone_and_its_slots_are_free(self):
        bed = Bed()
        engine = bed.instance(1, 2)
        offsets = offsets_of(engine.put("a b").offsets)
        assert bed.remove_damaged("a", 1, offsets[1])
        assert (engine.found("a"), engine.found("b")) == (0, 1)
        assert bed.used_pages == 3
        assert bed.counted.damaged == 1

    def test_only_the_copy_that_was_read_is_removed(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        offsets = offsets_of(engine.put("a").offsets)
        assert not bed.remove_damaged("a", 0, offsets[1])
        assert not bed.remove_damaged("a", 2, offsets[0])
        assert not bed.remove_damaged("a", -1, offsets[0])
        assert not bed.remove_damaged("?", 0, offsets[0])
        held = engine.lookup("a")
        assert bed.remove_damaged("a", 0, offsets[0])
        assert not bed.remove_damaged("a", 0, offsets[0])
        engine.put("a")
        assert not bed.remove_damaged("a", 0, offsets[0])
        engine.release(held)
        assert engine.found("a") == 1

    def test_a_chunk_that_is_being_written_is_not_damaged(self):
        bed = Bed()
        engine = bed.instance()
        reserved = engine.reserve("a")
        assert not bed.remove_damaged("a", 0, offsets_of(reserved.offsets)[0])
        assert engine.commit(reserved) == VISIBLE

    def test_leased_slots_are_free_at_the_last_release(self):
        bed = Bed()
        engine = bed.instance()
        offsets = offsets_of(engine.put("a b c").offsets)
        held = engine.lookup("a b c")
        assert bed.remove_damaged("b", 0, offsets[1])
        assert engine.found("a b c") == 1
        assert bed.used_pages == 3
        assert engine.states("b", "a") == [RESERVED]
        engine.put("b", "a")
        assert engine.found("a b c") == 3
        assert bed.used_pages == 4
        engine.release(held)
        assert bed.used_pages == 3

    def test_what_lies_behind_a_removed_chunk_still_leaves_before_it_is_back(self):
        """Its place in the tree is kept for as long as it has children."""
        bed = Bed(pages=3)
        engine = bed.instance()
        offsets = offsets_of(engine.put("a b c").offsets)
        for held in (False, True):
            hit = engine.lookup("b") if held else None
            bed.remove_damaged("b", 0, offsets[1])
            if hit:
                engine.release(hit)
            offsets[1] = offsets_of(engine.put("b", "a").offsets)[0]
            engine.found("c")
        assert engine.states("x y", now_s=9.0) == [RESERVED, RESERVED]
        assert engine.resident("a b c") == "a"

    def test_a_removed_chunk_does_not_keep_its_parent_from_leaving(self):
        bed = Bed(pages=2)
        engine = bed.instance()
        offsets = offsets_of(engine.put("a b").offsets)
        bed.remove_damaged("b", 0, offsets[1])
        assert list(bed.store.catalog.entries) == [key("a")]
        assert engine.states("x y") == [RESERVED, RESERVED]

    def test_damage_while_another_writes_the_chunk_again_leaves_that_alone(self):
        bed = Bed()
        one, other = bed.instance(), bed.instance()
        slow = one.reserve("a", now_s=0.0)
        offsets = offsets_of(other.put("a", now_s=3.0).offsets)
        held = other.lookup("a")
        assert bed.remove_damaged("a", 0, offsets[0])
        assert other.states("a", now_s=1.0) != [PRESENT]
        assert one.commit(slow) == VISIBLE
        other.release(held)
        assert one.found("a") == 1
        assert bed.used_pages == 1
