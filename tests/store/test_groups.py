"""Namespaces of several KV groups: each has its own sizes, and a hit needs of each its own."""

import pytest
from tests.store.bed import FULL, PAGE, PRESENT, RESERVED, SPACE, Bed, joined, key, offsets_of

from kvcellar.errors import LimitError, MalformedError, MismatchError
from kvcellar.protocol.limits import GROUPS_MAX
from kvcellar.store.machine import Hit

MISS = Hit(0, 0, b"")


@pytest.fixture
def bed():
    return Bed(pages=32)


@pytest.fixture
def engine(bed):
    """One shard a chunk: a page of a group that needs all, two of one with a window of one."""
    return bed.instance(1, 2, spans=(0, 1))


def put(engine, whole, window="", parent=""):
    """Store chunks of both groups; the window's have capital letters."""
    names = [*whole.split(), *window.split()]
    groups = bytes([0] * len(whole.split()) + [1] * len(window.split()))
    return engine.put(" ".join(names), parent, groups=groups)


def test_a_hit_ends_where_every_group_has_what_it_needs(engine):
    put(engine, "a b c", "B")
    assert engine.lookup("a b c A B C").count == 2
    assert engine.lookup("a b A B").count == 2
    assert engine.lookup("a A") == MISS


def test_the_lease_holds_just_what_the_hit_needs(bed, engine):
    reserved = put(engine, "a b c", "A B")
    hit = engine.lookup("a b c A B C")
    at = offsets_of(reserved.offsets)
    assert offsets_of(hit.refs, 16) == [at[0], at[1], at[4]]
    assert bed.counted.leased_chunks == 3
    assert (bed.counted.chunks_asked, bed.counted.chunks_hit) == (3, 2)
    # What no lease holds may leave.
    engine.store.room.evict_down_to(0, victims_max=10)
    assert engine.resident("a b c A B C") == "a b B"
    engine.release(hit)
    assert bed.counted.leased_chunks == 0


def test_local_spans_need_nothing_where_they_end(bed):
    engine = bed.instance(1, 1, spans=(0, -2))
    put(engine, "a b c d", "C")
    assert engine.lookup("a b A B").count == 2
    assert engine.lookup("a b c A B C").count == 3
    assert engine.lookup("a b c d A B C D").count == 4


def test_a_model_of_windows_alone_needs_no_beginning(bed):
    engine = bed.instance(1, spans=(2,))
    engine.put("c d")
    assert engine.lookup("a b c d").count == 4
    assert engine.lookup("a b c") == MISS


def test_what_needs_nothing_hits_nothing(bed):
    assert bed.instance(1, spans=(-1,)).lookup("a b") == MISS


def test_of_a_group_that_needs_all_a_tail_leaves_before_its_head(bed):
    engine = bed.instance(1, 1, 1, spans=(0, 1, 0))
    engine.put("a x b y", groups=bytes([0, 2, 0, 2]))
    reserved = engine.store.reserve(
        engine.scheduler,
        SPACE,
        joined("c z"),
        parent=key("b") + key("y"),
        writers=engine.workers,
        now_s=0.0,
        request=9,
        groups=bytes([0, 2]),
    )
    engine.commit(reserved)
    entries = engine.store.catalog.entries
    assert [entries[key(name)].parent for name in "abcxyz"] == [
        key(name) for name in ["", "a", "b", "", "x", "y"]
    ]


def test_a_window_hangs_below_nothing_and_leaves_first_when_nobody_ends_there(bed, engine):
    put(engine, "a b", "A B")
    engine.release(engine.lookup("a b A B"))
    engine.store.room.evict_down_to(5 * PAGE, victims_max=1)
    assert engine.resident("a b A B") == "a b B"


def test_states_come_in_the_order_of_the_keys_and_nothing_after_the_first_full(bed):
    engine = Bed(pages=4).instance(1, 2, spans=(0, 1))
    reserved = engine.reserve("a A b B c", groups=bytes([0, 1, 0, 1, 0]))
    assert list(reserved.states) == [RESERVED, RESERVED, RESERVED, FULL, FULL]
    engine.commit(reserved)
    assert list(engine.reserve("a A", groups=bytes([0, 1])).states) == [PRESENT, PRESENT]


def test_all_groups_of_a_namespace_are_cleared(bed, engine):
    put(engine, "a b", "A B")
    bed.instance(1, space=b"m" * 32).put("m")
    assert engine.store.clear(SPACE) == (4, 6 * PAGE)
    assert bed.used_pages == 1


def test_a_key_of_another_group_is_not_found_there(engine):
    put(engine, "a", "A")
    assert engine.lookup("A a") == MISS
    assert list(engine.reserve("a", groups=b"\x01").states) == [2]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda one: one.lookup("a b c"), MalformedError, "3 keys for 2 KV groups"),
        (lambda one: one.reserve("a b", groups=b"\x00"), MalformedError, "groups has 1 bytes"),
        (lambda one: one.reserve("a", groups=b"\x02"), MalformedError, "up to 2 for 1 keys"),
        (
            lambda one: one.store.bind(SPACE, (PAGE, 2 * PAGE), (0, 2)),
            MismatchError,
            "in 2 KV groups",
        ),
        (lambda one: one.store.bind(b"m" * 32, (PAGE,), (0, 1)), MalformedError, "1 shards in 2"),
        (lambda one: one.store.bind(b"m" * 32, (PAGE,), ()), MalformedError, "spans"),
        (
            lambda one: one.store.bind(b"m" * 32, (PAGE,) * 65, (0,) * (GROUPS_MAX + 1)),
            MalformedError,
            "from 1 to 64",
        ),
        (lambda one: one.store.bind(b"m" * 32, (PAGE,), (1 << 40,)), MalformedError, "none over"),
        (
            lambda one: one.store.bind(b"m" * 32, (PAGE, 64 * PAGE), (0, 1)),
            LimitError,
            "growth step",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(engine, call, error, text):
    with pytest.raises(error, match=text):
        call(engine)
