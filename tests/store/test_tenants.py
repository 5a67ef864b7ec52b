"""Memory shared by tenants: who keeps what when it gets tight, and that accounts never err."""

from time import perf_counter

import pytest
from tests.store.bed import BUSY, FULL, PRESENT, RESERVED, VISIBLE, Bed, offsets_of

from kvcellar.store.policies import IsolatedLRU


def shared(pages=10):
    bed = Bed(pages=pages, policy=IsolatedLRU())
    return bed, bed.instance(tenant="a"), bed.instance(tenant="b")


def test_the_tenant_that_holds_most_gives_its_oldest_tail():
    bed, one, two = shared()
    one.put("a1 a2 a3")
    two.put("b1 b2 b3 b4 b5")
    two.put("x1 x2")
    one.found("a1 a2 a3")
    one.put("a4")
    assert two.resident("b1 b2 b3 b4 b5 x1 x2") == "b1 b2 b3 b4 x1 x2"
    assert one.resident("a1 a2 a3 a4") == "a1 a2 a3 a4"
    assert (bed.pages_of("a"), bed.pages_of("b")) == (4, 6)


def test_a_quota_holds_while_memory_is_free():
    bed, one, _ = shared()
    bed.limit("a", 3)
    one.put("p q r")
    one.put("s")
    assert one.resident("p q r s") == "p q s"
    assert bed.counted.evicted_quota == 1
    assert bed.used_pages == 3


def test_a_store_keeps_the_leading_chunks_that_its_quota_has_room_for():
    bed, one, _ = shared()
    bed.limit("a", 2)
    assert one.states("p q r s") == [RESERVED, RESERVED, FULL, FULL]
    assert (bed.counted.refused_quota, bed.counted.refused_full) == (1, 2)
    bed.limit("a", 0)
    assert one.states("p") == [FULL]


def test_what_a_tenant_within_its_quota_holds_outlasts_all_that_others_store():
    bed, one, two = shared()
    bed.limit("a", 4)
    one.put("p q r s")
    for number in range(60):
        two.put(f"n{number}")
    assert one.resident("p q r s") == "p q r s"
    assert bed.pages_of("b") == 6


def test_a_lease_keeps_chunks_over_a_lowered_quota_until_it_ends():
    bed, one, two = shared()
    one.put("p q r")
    held = one.lookup("p q")
    bed.limit("a", 1)
    assert one.resident("p q r") == "p q"
    assert one.states("s") == [FULL]
    one.release(held)
    bed.limit("a", 1)
    assert one.resident("p q r") == "p"
    two.put("x y")
    assert bed.pages_of("a") == 1


def test_a_tenant_that_cannot_give_because_all_it_has_is_read_is_passed_over():
    bed, one, two = shared()
    one.put("p q r s t u")
    two.put("w x y z")
    held = one.lookup("p q r s t u")
    two.put("n")
    assert (bed.pages_of("a"), two.resident("w x y z n")) == (6, "w x y n")
    one.release(held)
    two.put("m")
    assert (bed.pages_of("a"), bed.pages_of("b")) == (5, 5)


def test_a_removed_chunk_stays_on_its_tenants_account_while_somebody_reads_it():
    bed, one, _ = shared()
    reserved = one.put("p")
    held = one.lookup("p")
    bed.remove_damaged("p", 0, offsets_of(reserved.offsets)[0])
    assert bed.pages_of("a") == 1
    one.put("p")
    assert bed.pages_of("a") == 2
    one.release(held)
    assert bed.pages_of("a") == 1


def test_reserved_slots_are_on_the_account_until_nobody_writes_them():
    bed, one, _ = shared()
    bed.limit("a", 2)
    reserved = one.reserve("p q")
    assert bed.pages_of("a") == 2
    assert one.states("r") == [FULL]
    bed.clear()
    assert bed.pages_of("a") == 2
    one.abort(reserved)
    assert bed.pages_of("a") == 0


def test_who_writes_a_chunk_of_another_tenant_lies_and_changes_nothing():
    bed, one, two = shared()
    reserved = one.reserve("p")
    assert two.states("p", now_s=9.0) == [BUSY]
    assert one.commit(reserved) == VISIBLE
    assert two.states("p") == [PRESENT]
    assert (bed.pages_of("a"), bed.pages_of("b")) == (1, 0)


def test_an_entry_that_outlived_its_tenants_account_finds_the_new_one():
    """A head that is kept by its tail alone is stored again after the tenant held nothing."""
    bed, one, _ = shared()
    one.put("q", "p")
    bed.clear()
    assert len(bed.store.catalog.shares) == 0
    tail = one.reserve("q", "p")
    one.put("p")
    one.commit(tail)
    assert bed.pages_of("a") == 2
    bed.limit("a", 1)
    assert one.resident("p q") == "p"


@pytest.mark.parametrize("tenants", [1000])
def test_many_tenants_cost_no_more_a_chunk_than_two(tenants):
    """Each new chunk evicts one; a scan over all tenants would take some 100 times as long."""

    def seconds(count):
        bed = Bed(pages=2 * tenants, policy=IsolatedLRU())
        bed.check = lambda: None
        instances = [bed.instance(tenant=f"t{number}") for number in range(count)]
        for number in range(2 * tenants):
            instances[number % count].put(f"old{number}")
        start_s = perf_counter()
        for number in range(2 * tenants):
            instances[number % count].put(f"new{number}")
        assert bed.counted.evicted == 2 * tenants
        return perf_counter() - start_s

    assert seconds(tenants) < 8 * seconds(2)
