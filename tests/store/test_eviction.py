"""Chunks leave only when memory is asked for, the tail of a prefix before its head."""

from hypothesis import given
from hypothesis import strategies as st
from tests.store.bed import FULL, OTHER_SPACE, RESERVED, Bed, key, offsets_of


def _fill(bed, engine, count):
    """Make `count` new chunks come in, one at a time; return the names in the order they left."""
    left = []
    for number in range(count):
        before = {name for name, entry in bed.store.catalog.entries.items() if entry.refs}
        engine.put(f"new{number}")
        after = {name for name, entry in bed.store.catalog.entries.items() if entry.refs}
        left += [name.rstrip(b".").decode() for name in before - after]
    return left


def test_nothing_leaves_while_there_is_room():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a b c")
    assert engine.resident("a b c") == "a b c"
    assert bed.counted.evicted == 0


def test_the_tail_leaves_before_the_head():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a b c")
    assert _fill(bed, bed.instance(), 3) == ["c", "b", "a"]


def test_a_prefix_that_was_looked_up_outlives_one_that_was_not():
    bed = Bed(pages=4)
    engine = bed.instance()
    engine.put("a b")
    engine.put("x y")
    engine.found("a b")
    assert _fill(bed, bed.instance(), 4) == ["y", "x", "b", "a"]


def test_being_asked_to_store_it_again_is_a_use_as_well():
    bed = Bed(pages=2)
    engine = bed.instance()
    engine.put("a")
    engine.put("b")
    engine.reserve("a")
    assert _fill(bed, bed.instance(), 2) == ["b", "a"]


def test_being_stored_is_a_use_at_the_moment_when_it_becomes_visible():
    bed = Bed(pages=2)
    engine = bed.instance()
    engine.put("z")
    reserved = engine.reserve("a")
    engine.found("z")
    engine.commit(reserved)
    assert _fill(bed, bed.instance(), 2) == ["z", "a"]


def test_a_shared_head_stays_for_as_long_as_any_tail():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a b")
    engine.put("c", "a")
    engine.found("c")
    assert _fill(bed, bed.instance(), 3) == ["b", "c", "a"]


def test_a_tail_that_was_stored_before_its_head_leaves_before_it_all_the_same():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a")
    engine.put("c", "b")
    engine.put("b", "a")
    engine.found("c")
    assert _fill(bed, bed.instance(), 3) == ["c", "b", "a"]


def test_what_is_leased_stays_and_so_does_the_head_before_it():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a b")
    engine.put("x")
    held = engine.lookup("b")
    assert engine.states("n1 n2") == [RESERVED, FULL]
    engine.release(held)
    assert _fill(bed, bed.instance(), 4) == ["b", "a", "new0"]


def test_a_tail_that_was_leased_when_its_turn_came_leaves_after_its_release():
    bed = Bed(pages=2)
    engine, other = bed.instance(), bed.instance()
    engine.put("a")
    engine.put("b")
    held = [engine.lookup("a"), engine.lookup("a")]
    other.put("c")
    assert engine.resident("a b c") == "a c"
    engine.release(*held)
    other.found("c")
    other.put("d")
    assert engine.resident("a c d") == "c d"


def test_a_store_never_evicts_its_own_prefix():
    bed = Bed(pages=3)
    engine = bed.instance()
    engine.put("a b")
    assert list(engine.reserve("c d", "b").states) == [RESERVED, FULL]
    assert engine.resident("a b") == "a b"


def test_the_head_of_what_is_being_written_stays():
    bed = Bed(pages=2)
    engine = bed.instance()
    engine.put("a")
    reserved = engine.reserve("b", "a")
    assert bed.instance().states("x") == [FULL]
    engine.cancel(reserved)
    assert bed.instance().states("x y") == [RESERVED, RESERVED]


def test_a_chunk_of_one_model_leaves_for_one_of_another():
    bed = Bed(pages=2)
    engine = bed.instance()
    engine.put("a b")
    assert bed.instance(1, 1, space=OTHER_SPACE).states("x") == [RESERVED]
    assert bed.counted.evicted == 2


def test_a_removed_chunk_is_stored_again_although_the_one_behind_it_has_to_leave_for_it():
    bed = Bed(pages=2)
    engine = bed.instance()
    offsets = offsets_of(engine.put("a b").offsets)
    bed.remove_damaged("a", 0, offsets[0])
    engine.put("x")
    engine.put("a")
    assert engine.resident("a b x") == "a x"


@st.composite
def _histories(draw):
    """Draw a tree of prefixes, then uses of its chunks; the arena holds the tree exactly."""
    parents = [None]
    parents += [draw(st.none() | st.integers(0, n - 1)) for n in range(1, draw(st.integers(2, 14)))]
    use = st.tuples(st.integers(0, len(parents) - 1), st.integers(0, 5))
    uses = draw(st.lists(use, max_size=12))
    return parents, uses


@given(_histories())
def test_in_any_tree_the_least_recently_used_leaf_is_next(history):
    parents, uses = history
    bed = Bed(pages=len(parents))
    engine = bed.instance()
    last_use = {}
    for node, parent in enumerate(parents):
        engine.put(f"t{node}", "" if parent is None else f"t{parent}")
        last_use[f"t{node}"] = len(last_use)
    for clock, (node, start) in enumerate(uses, len(parents)):
        path, at = [], node
        while at is not None:
            path.insert(0, f"t{at}")
            at = parents[at]
        asked = path[min(start, len(path) - 1) :]
        assert engine.found(" ".join(asked)) == len(asked)
        last_use |= dict.fromkeys(asked, clock)
    children = {name: set() for name in last_use}
    for node, parent in enumerate(parents):
        if parent is not None:
            children[f"t{parent}"].add(f"t{node}")
    expected = []
    while last_use:
        leaves = [name for name in last_use if not children[name] & last_use.keys()]
        expected.append(min(leaves, key=last_use.get))
        del last_use[expected[-1]]
    assert _fill(bed, bed.instance(), len(parents)) == expected
    assert key("t0") not in bed.store.catalog.entries
