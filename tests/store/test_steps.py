"""Which step to empty: the coldest of those in which it is sure to help."""

from hypothesis import given
from hypothesis import strategies as st
from tests.store.bed import PAGE, SPACE

from kvcellar.store.entries import Entry, Group
from kvcellar.store.steps import StepMap
from kvcellar.tenancy.ranking import Tenant

STEP_PAGES = 8
GROUP = Group(SPACE, (1,), (PAGE,))
TENANT = Tenant("")
PAGES = st.dictionaries(st.integers(0, 3 * STEP_PAGES - 3), st.none() | st.integers(0, 9))


def _map():
    """Return three steps, the last two pages shorter, that did not come in order."""
    steps = StepMap(STEP_PAGES * PAGE)
    steps.add(2 * STEP_PAGES * PAGE, (STEP_PAGES - 2) * PAGE)
    steps.add(0, STEP_PAGES * PAGE)
    steps.add(STEP_PAGES * PAGE, STEP_PAGES * PAGE)
    return steps


def _entry(page, tick):
    entry = Entry(page.to_bytes(32, "little"), GROUP, TENANT)
    entry.refs = (page * PAGE).to_bytes(8, "little") + bytes(8)
    entry.tick = tick
    return entry


def _longest_run(fixed, step):
    """Return the pages of the longest stretch of a step in which nothing is fixed."""
    longest = length = 0
    for page in range(step * STEP_PAGES, min((step + 1) * STEP_PAGES, 3 * STEP_PAGES - 2)):
        length = 0 if page in fixed else length + 1
        longest = max(longest, length)
    return longest


@given(pages=PAGES, needed=st.integers(1, STEP_PAGES), data=st.randoms(use_true_random=False))
def test_it_is_the_step_that_a_search_through_all_would_find(pages, needed, data):
    """A page holds something fixed (None), something that may leave (its tick), or nothing."""
    fixed = [page for page, tick in pages.items() if tick is None]
    left = {page: tick for page, tick in pages.items() if tick is not None}
    movable = [_entry(page, tick) for page, tick in left.items()]
    data.shuffle(fixed)
    chosen = _map().coldest(
        needed * PAGE, movable=movable, fixed=[(page * PAGE, PAGE) for page in fixed]
    )
    ticks = [
        {page: tick for page, tick in left.items() if page // STEP_PAGES == step}
        for step in range(3)
    ]
    means = {
        step: sum(ticks[step].values()) / len(ticks[step])
        for step in range(3)
        if ticks[step] and _longest_run(fixed, step) >= needed
    }
    at = {int.from_bytes(entry.key, "little") for entry in chosen}
    best = [step for step in means if means[step] == min(means.values())]
    assert at in [set(ticks[step]) for step in best] or at == set() == set(best)


def test_a_chunk_with_shards_in_two_steps_counts_in_both():
    space = Group(SPACE, (1, 1), (PAGE, PAGE))
    both = Entry(b"b" * 32, space, TENANT)
    both.refs = b"".join((page * PAGE).to_bytes(8, "little") + bytes(8) for page in (0, STEP_PAGES))
    both.tick = 1
    other = _entry(STEP_PAGES + 1, 9)
    fixed = [(page * PAGE, PAGE) for page in range(2 * STEP_PAGES, 3 * STEP_PAGES - 2)]
    needed_bytes = STEP_PAGES * PAGE
    assert _map().coldest(needed_bytes, movable=[other, both], fixed=fixed) == [both]
    fixed.append((2 * PAGE, PAGE))
    assert set(_map().coldest(needed_bytes, movable=[other, both], fixed=fixed)) == {both, other}
