"""Shards of several sizes share one arena, and none of them can starve."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.bed import FULL, OTHER_SPACE, PAGE, RESERVED, VISIBLE, Bed, offsets_of

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


class Scattered:
    """Three steps full of chunks of a page, of which those on even pages are the oldest.

    They leave first and leave holes of a page, so that nothing larger fits before a step is
    emptied. The chunk on page 7 is named s7.
    """

    def __init__(self, *, colder=(0, 1, 2), pending=()):
        self.bed = Bed(pages=16)
        self.small = self.bed.instance(1)
        self.pending = {}
        for page in range(48):
            if page in (16, 32):
                self.bed.store.add_step(page * PAGE, 16 * PAGE)
            if page in pending:
                self.pending[page] = self.small.reserve(f"s{page}")
            else:
                assert offsets_of(self.small.put(f"s{page}").offsets) == [page * PAGE]
        for step in colder:
            for page in range(step * 16 + 1, step * 16 + 16, 2):
                self.small.found(f"s{page}")

    def step_of_large(self, *pages, names="x"):
        """Reserve chunks with a last shard of many pages; return the steps of these."""
        large = self.bed.instance(*pages, space=OTHER_SPACE)
        reserved = large.reserve(names, now_s=9.0)
        assert set(reserved.states) == {RESERVED}
        return [offset // (16 * PAGE) for offset in offsets_of(reserved.offsets)][
            len(pages) - 1 :: len(pages)
        ]


def test_a_step_is_emptied_where_every_hole_is_too_short():
    scattered = Scattered(colder=(1, 0, 2))
    assert scattered.step_of_large(12) == [1]
    assert scattered.bed.counted.steps_reclaimed == 1
    kept = [page for page in range(48) if scattered.small.resident(f"s{page}")]
    assert kept == [*range(1, 16, 2), *range(33, 48, 2)]


def test_chunks_with_several_shards_in_the_step_leave_it_once():
    bed = Bed(pages=48, step_pages=16)
    pairs = bed.instance(1, 1)
    for number in range(24):
        pairs.put(f"p{number}")
    for number in range(1, 24, 2):
        pairs.found(f"p{number}")
    assert bed.instance(12, space=OTHER_SPACE).states("x") == [RESERVED]
    assert bed.counted.steps_reclaimed == 1


def test_what_is_leased_is_not_moved_for_it():
    scattered = Scattered()
    held = scattered.small.lookup("s9")
    assert scattered.step_of_large(12) == [1]
    assert scattered.small.lookup("s9").refs == held.refs


def test_what_is_being_written_is_not_moved_for_it():
    scattered = Scattered(pending=[9])
    assert scattered.step_of_large(12) == [1]
    assert scattered.small.commit(scattered.pending[9]) == VISIBLE


def test_what_the_same_request_was_given_is_not_moved_for_it():
    scattered = Scattered(colder=())
    for page in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11):
        assert scattered.bed.remove_damaged(f"s{page}", 0, page * PAGE)
    # Step 0 has the place for the first chunk. Of what must leave for the second, the last to go
    # before a step is emptied are 12, 13 and 14; what is left in step 0 is then the oldest.
    for page in [17, 19, 21, 33, 35, 37, 12, 13, 14, 15, *range(23, 32, 2), *range(39, 48, 2)]:
        scattered.small.found(f"s{page}")
    assert scattered.step_of_large(12, names="x y") == [0, 1]


def test_the_other_shards_of_the_chunk_are_not_moved_for_it():
    scattered = Scattered()
    for page in (7, 8):
        assert scattered.bed.remove_damaged(f"s{page}", 0, page * PAGE)
    assert scattered.step_of_large(2, 12) == [1]


def test_the_prefix_that_wants_to_grow_is_not_moved_for_it():
    scattered = Scattered()
    bed, small = scattered.bed, scattered.small
    bed.remove_damaged("s9", 0, 9 * PAGE)
    engine = bed.instance(1, 12, space=OTHER_SPACE)
    offsets = offsets_of(engine.put("p").offsets)
    assert [offset // (16 * PAGE) for offset in offsets] == [0, 1]
    for number in range(48 - bed.used_pages):
        small.put(f"t{number}")
    entries = [entry for entry in bed.store.catalog.entries.values() if len(entry.refs) == 16]
    at = {offsets_of(entry.refs)[0] // PAGE: entry.key.rstrip(b".").decode() for entry in entries}
    for page in [page for step in (1, 0, 2) for page in at if page // 16 == step]:
        if page % 2:
            small.found(at[page])
    # Without its prefix, step 1 would be the coldest by far.
    reserved = engine.reserve("q", "p")
    assert bed.counted.steps_reclaimed == 2
    assert offsets_of(reserved.offsets)[1] // (16 * PAGE) == 2
    assert engine.found("p") == 1


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
