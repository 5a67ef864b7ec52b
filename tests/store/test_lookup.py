"""A lookup finds the longest leading run that is complete, and holds it."""

import pytest
from tests.store.bed import OTHER_SPACE, PAGE, SPACE, Bed, key

from kvcellar.errors import LimitError, MalformedError, NotRegisteredError
from kvcellar.keys.digest import NamespaceId
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.store.limits import StoreLimits
from kvcellar.store.machine import Hit

MISS = Hit(0, 0, b"")


def test_nothing_is_found_where_nothing_is_stored():
    assert Bed().instance().lookup("a b") == MISS


def test_no_keys_find_nothing():
    assert Bed().instance().lookup("") == MISS


def test_the_run_ends_at_the_first_chunk_that_is_missing():
    engine = Bed().instance()
    engine.put("a b")
    engine.put("d", "c")
    hit = engine.lookup("a b c d")
    assert hit.count == 2
    assert hit.lease > 0


def test_a_run_may_begin_in_the_middle_of_a_prefix():
    """An engine asks only for what its own cache lacks."""
    engine = Bed().instance()
    engine.put("a b c")
    assert engine.found("b c") == 2


def test_the_answer_has_offset_and_seal_of_each_shard_chunk_after_chunk():
    bed = Bed()
    engine = bed.instance(1, 2)
    reserved = engine.reserve("a b")
    engine.commit(reserved, 0, start=100)
    engine.commit(reserved, 1, start=200)
    at = [reserved.offsets[n : n + 8] for n in range(0, 32, 8)]
    sealed = [n.to_bytes(8, "little") for n in (100, 200, 101, 201)]
    assert engine.lookup("a b").refs == b"".join(
        part for pair in zip(at, sealed, strict=True) for part in pair
    )


def test_a_chunk_that_is_being_written_is_not_found():
    engine = Bed().instance(1, 1)
    reserved = engine.reserve("a")
    assert engine.found("a") == 0
    engine.commit(reserved, 0)
    assert engine.found("a") == 0
    engine.commit(reserved, 1)
    assert engine.found("a") == 1


def test_a_chunk_of_another_namespace_is_not_found():
    bed = Bed()
    bed.instance().put("a")
    assert bed.instance(space=OTHER_SPACE).lookup("a") == MISS


def test_each_lookup_has_a_lease_of_its_own():
    bed = Bed()
    engine = bed.instance()
    engine.put("a")
    first, second = engine.lookup("a"), engine.lookup("a")
    assert first.lease != second.lease
    assert (bed.counted.leases, bed.counted.leased_chunks) == (2, 2)
    engine.release(first)
    engine.release(first)
    assert (bed.counted.leases, bed.counted.leased_chunks) == (1, 1)
    engine.release(second)
    assert (bed.counted.leases, bed.counted.leased_chunks) == (0, 0)


def test_leases_of_others_and_unknown_ones_are_not_released():
    bed = Bed()
    one, other = bed.instance(), bed.instance()
    one.put("a")
    hit = one.lookup("a")
    other.release(hit)
    one.store.release(one.scheduler, [0, -1, 99])
    assert bed.counted.leases == 1


def test_an_owner_with_too_many_leases_finds_nothing_until_it_releases_some():
    bed = Bed(limits=StoreLimits(leases_max=2))
    engine, other = bed.instance(), bed.instance()
    engine.put("a")
    hits = [engine.lookup("a"), engine.lookup("a")]
    assert engine.lookup("a") == MISS
    assert other.lookup("a").count == 1
    assert bed.counted.lookups_refused == 1
    engine.release(hits[0])
    assert engine.lookup("a").count == 1


def test_lookups_are_counted():
    bed = Bed()
    engine = bed.instance()
    engine.put("a b")
    engine.lookup("a b c")
    engine.lookup("x")
    counted = bed.counted
    assert (counted.lookups, counted.chunks_asked, counted.chunks_hit) == (2, 4, 2)


def test_what_is_no_list_of_keys_is_malformed_and_too_long_a_one_is_refused():
    engine = Bed().instance()
    with pytest.raises(MalformedError, match="33 bytes"):
        engine.store.lookup(engine.scheduler, SPACE, b"x" * 33, request=1)
    with pytest.raises(LimitError, match=f"at most {KEYS_MAX}"):
        engine.store.lookup(engine.scheduler, SPACE, bytes(32 * (KEYS_MAX + 1)), request=1)


def test_a_namespace_must_be_bound_first():
    bed = Bed()
    unknown = NamespaceId(b"u" * 32)
    with pytest.raises(NotRegisteredError, match="bind it first"):
        bed.store.lookup(bed.owner(), unknown, key("a"), request=1)
    bed.store.bind(unknown, (PAGE,))
    assert bed.store.lookup(bed.owner(), unknown, key("a"), request=1) == MISS
