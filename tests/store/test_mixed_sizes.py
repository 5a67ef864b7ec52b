"""Shards of several sizes share one arena, and none of them can starve."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.bed import FULL, OTHER_SPACE, PAGE, RESERVED, Bed, offsets_of

from kvcellar.keys.digest import NamespaceId

STEP_PAGES = 16


def _names(prefix, count):
    return " ".join(f"{prefix}{number}" for number in range(count))


def _put_scattered(engine, count, prefix="s"):
    """Fill memory with chunks without relatives, so that any of them may leave first."""
    return [offsets_of(engine.put(f"{prefix}{number}").offsets)[0] for number in range(count)]


def _by_page(offsets):
    return {offset // PAGE: f"s{number}" for number, offset in enumerate(offsets)}


def test_one_victim_makes_room_for_something_smaller():
    bed = Bed(pages=16)
    bed.instance(8).put("a b")
    assert bed.instance(1, space=OTHER_SPACE).states(_names("x", 8)) == [RESERVED] * 8
    assert bed.counted.evicted == 1


def test_a_step_is_emptied_where_every_hole_is_too_short():
    """The oldest chunks lie a page apart, so evicting in order of age makes holes of a page."""
    bed = Bed(pages=16)
    small = bed.instance(1)
    _put_scattered(small, 16)
    for number in range(1, 16, 2):
        small.found(f"s{number}")
    assert bed.instance(4, space=OTHER_SPACE).states("x") == [RESERVED]
    assert bed.counted.steps_reclaimed == 1


def test_it_is_the_step_that_was_used_least_recently_in_the_mean():
    bed = Bed(pages=48, step_pages=16)
    small = bed.instance(1)
    step_of = [offset // (16 * PAGE) for offset in _put_scattered(small, 48)]
    for wanted in (1, 0, 2):
        for number in range(48):
            if step_of[number] == wanted and number % 2:
                small.found(f"s{number}")
    # Step 1 has the chunks that were used again longest ago; of each step half is very old.
    assert bed.instance(16, space=OTHER_SPACE).states("x") == [RESERVED]
    left = [step_of[n] for n in range(48) if not small.resident(f"s{n}") and n % 2]
    assert left == [1] * 8


def test_what_is_leased_is_not_moved_for_it():
    bed = Bed(pages=32, step_pages=16)
    small, large = bed.instance(1), bed.instance(12, space=OTHER_SPACE)
    by_page = _by_page(_put_scattered(small, 32))
    held = small.lookup(by_page[8])
    reserved = large.reserve("x")
    assert offsets_of(reserved.offsets)[0] >= 16 * PAGE
    assert small.lookup(by_page[8]).refs == held.refs
    assert large.states("y") == [FULL]


def test_what_is_being_written_is_not_moved_for_it():
    bed = Bed(pages=32, step_pages=16)
    small, large = bed.instance(1), bed.instance(12, space=OTHER_SPACE)
    pending = [small.reserve(f"p{number}") for number in range(32)]
    by_page = {offsets_of(one.offsets)[0] // PAGE: one for one in pending}
    for page, reserved in by_page.items():
        if page != 8:
            small.commit(reserved)
    assert offsets_of(large.reserve("x").offsets)[0] >= 16 * PAGE
    small.commit(by_page[8])
    assert large.states("y") == [RESERVED]


def test_old_slots_that_are_still_read_are_not_moved_for_it():
    bed = Bed(pages=16)
    small = bed.instance(1)
    by_page = _by_page(_put_scattered(small, 16))
    held = small.lookup(by_page[8])
    bed.remove_damaged(by_page[8], 0, 8 * PAGE)
    assert bed.instance(9, space=OTHER_SPACE).states("x") == [FULL]
    assert bed.instance(8, space=NamespaceId(b"8" * 32)).states("y") == [RESERVED]
    small.release(held)
    assert bed.instance(9, space=OTHER_SPACE).states("x") == [RESERVED]


def test_a_chunk_that_cannot_fit_between_what_must_stay_is_refused():
    bed = Bed(pages=16)
    small = bed.instance(1)
    by_page = _by_page(_put_scattered(small, 16))
    held = [small.lookup(by_page[page]) for page in (5, 10)]
    assert bed.instance(6, space=OTHER_SPACE).states("x") == [FULL]
    assert bed.instance(5, space=NamespaceId(b"5" * 32)).states("y") == [RESERVED]
    small.release(*held)
    assert bed.instance(6, space=OTHER_SPACE).states("x") == [RESERVED]


def test_a_step_is_not_emptied_of_the_prefix_that_wants_to_grow():
    bed = Bed(pages=32, step_pages=16)
    engine, small = bed.instance(1, 8), bed.instance(1, space=OTHER_SPACE)
    engine.put("a")
    _put_scattered(small, 23)
    for number in range(0, 23, 2):
        small.found(f"s{number}")
    assert engine.put("b", "a").reservation
    assert engine.found("a b") == 2


@st.composite
def _mixes(draw):
    """Draw shards' pages for some models, none larger than a step, and an order of stores."""
    models = draw(
        st.lists(
            st.lists(st.integers(1, STEP_PAGES), min_size=1, max_size=2), min_size=2, max_size=3
        )
    )
    stores = st.tuples(st.integers(0, len(models) - 1), st.integers(1, 20))
    return models, draw(st.lists(stores, min_size=3, max_size=8))


@settings(max_examples=50)
@given(_mixes())
def test_whatever_sizes_come_each_is_stored_when_nobody_holds_anything(mix):
    models, stores = mix
    bed = Bed(pages=2 * STEP_PAGES, step_pages=STEP_PAGES)
    engines = [
        bed.instance(*pages, space=NamespaceId(bytes([number]) * 32))
        for number, pages in enumerate(models)
    ]
    for number, (model, count) in enumerate(stores):
        engine = engines[model]
        for index in range(count):
            engine.put(f"{number}.{index}")
            engine.found(f"{number}.{index // 2}")
            assert engine.resident(f"{number}.{index}"), (number, index)
