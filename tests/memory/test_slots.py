"""The allocator against a model that knows nothing but which pages are taken."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcellar.memory.slots import SLOT_ALIGNMENT, SlotAllocator, step_size_bytes
from kvcellar.units import GIB, MIB

PAGE = SLOT_ALIGNMENT


def filled(step_pages, *steps_pages):
    allocator = SlotAllocator(step_pages * PAGE)
    for index, pages in enumerate(steps_pages):
        allocator.add_step(index * step_pages * PAGE, pages * PAGE)
    return allocator


class AllocatorMachine(RuleBasedStateMachine):
    """Random steps, slots and frees; the model is one list of page owners."""

    STEP_PAGES = 8
    SIZES = st.one_of(
        st.sampled_from([1, PAGE, 2 * PAGE, 3 * PAGE, 8 * PAGE]),
        st.integers(1, (STEP_PAGES + 1) * PAGE),
    )

    def __init__(self):
        super().__init__()
        self.allocator = SlotAllocator(self.STEP_PAGES * PAGE)
        self.taken = {}  # page -> True when it is in a slot; no entry when there is no memory
        self.slots = []
        self.steps_missing = list(range(6))

    def free_stretches(self):
        """Return (first page, pages) of each free stretch, cut at the steps' borders."""
        stretches = []
        for page in sorted(self.taken):
            if self.taken[page]:
                continue
            if stretches and sum(stretches[-1]) == page and page % self.STEP_PAGES:
                stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
            else:
                stretches.append((page, 1))
        return stretches

    @precondition(lambda self: self.steps_missing)
    @rule(data=st.data(), pages=st.integers(1, STEP_PAGES))
    def add_step(self, data, pages):
        step = data.draw(st.sampled_from(self.steps_missing))
        self.steps_missing.remove(step)
        first = step * self.STEP_PAGES
        self.allocator.add_step(first * PAGE, pages * PAGE)
        self.taken.update(dict.fromkeys(range(first, first + pages), False))

    @rule(size_bytes=SIZES)
    def allocate(self, size_bytes):
        pages = -(-size_bytes // PAGE)
        lengths = [length for _, length in self.free_stretches()]
        offset = self.allocator.allocate(size_bytes)
        if offset is None:
            assert max(lengths, default=0) < pages
            return
        first, remainder = divmod(offset, PAGE)
        assert remainder == 0
        assert first // self.STEP_PAGES == (first + pages - 1) // self.STEP_PAGES
        stretch = next(s for s in self.free_stretches() if s[0] <= first < sum(s))
        assert first + pages <= sum(stretch)
        assert stretch[1] == min(length for length in lengths if length >= pages)
        self.taken.update(dict.fromkeys(range(first, first + pages), True))
        self.slots.append((offset, size_bytes))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data):
        offset, size_bytes = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.allocator.free(offset, size_bytes)
        first = offset // PAGE
        self.taken.update(dict.fromkeys(range(first, first - (-size_bytes // PAGE)), False))
        with pytest.raises(AssertionError):
            self.allocator.free(offset, size_bytes)

    @invariant()
    def it_says_what_the_model_says(self):
        self.allocator.check()
        free_pages = sum(not taken for taken in self.taken.values())
        assert self.allocator.total_bytes == len(self.taken) * PAGE
        assert self.allocator.free_bytes == free_pages * PAGE
        assert self.allocator.used_bytes == (len(self.taken) - free_pages) * PAGE
        longest = max((length for _, length in self.free_stretches()), default=0)
        assert self.allocator.largest_free_bytes() == longest * PAGE

    def teardown(self):
        for offset, size_bytes in self.slots:
            self.allocator.free(offset, size_bytes)
        self.allocator.check()
        assert self.allocator.used_bytes == 0


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 10 * PAGE))
def test_a_slot_takes_whole_pages(size_bytes):
    taken = SlotAllocator(16 * PAGE).slot_bytes(size_bytes)
    assert taken % PAGE == 0
    assert taken - PAGE < size_bytes <= taken


def test_an_arena_without_memory_yet_has_no_slot():
    allocator = SlotAllocator(MIB)
    assert allocator.allocate(1) is None
    assert (allocator.total_bytes, allocator.largest_free_bytes()) == (0, 0)


def test_no_slot_lies_across_two_steps():
    allocator = filled(4, 4, 4)
    offsets = [allocator.allocate(3 * PAGE) for _ in range(3)]
    assert sorted(offsets[:2]) == [0, 4 * PAGE]
    assert offsets[2] is None
    assert allocator.free_bytes == 2 * PAGE
    assert allocator.allocate(2 * PAGE) is None


def test_free_neighbours_in_two_steps_stay_apart():
    allocator = filled(4, 4, 4)
    slots = [allocator.allocate(4 * PAGE) for _ in range(2)]
    for offset in slots:
        allocator.free(offset, 4 * PAGE)
    assert allocator.largest_free_bytes() == 4 * PAGE
    assert allocator.allocate(5 * PAGE) is None


def test_steps_may_arrive_in_any_order_and_the_last_may_be_short():
    allocator = SlotAllocator(4 * PAGE)
    allocator.add_step(8 * PAGE, PAGE)
    assert allocator.allocate(2 * PAGE) is None
    assert allocator.allocate(PAGE) == 8 * PAGE
    allocator.add_step(0, 4 * PAGE)
    assert allocator.allocate(4 * PAGE) == 0
    allocator.check()


def test_the_slot_freed_last_is_used_next():
    allocator = filled(8, 8)
    slots = [allocator.allocate(2 * PAGE) for _ in range(4)]
    allocator.free(slots[1], 2 * PAGE)
    allocator.free(slots[3], 2 * PAGE)
    assert allocator.allocate(2 * PAGE) == slots[3]


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (0, 2 * PAGE),  # twice, as it was allocated
        (PAGE, PAGE),  # its second half
        (0, 4 * PAGE),  # more than it was
        (6 * PAGE, PAGE),  # never allocated
        (PAGE // 2, PAGE),  # no slot begins there
        (16 * PAGE, PAGE),  # no such step
        (7 * PAGE, 2 * PAGE),  # beyond the memory that is there
        (-PAGE, PAGE),
        (2 * PAGE, 0),
    ],
)
def test_memory_that_is_not_in_a_slot_cannot_be_freed(offset, size_bytes):
    allocator = filled(16, 8)
    slots = [allocator.allocate(2 * PAGE) for _ in range(3)]
    assert slots == [0, 2 * PAGE, 4 * PAGE]
    allocator.free(0, 2 * PAGE)
    with pytest.raises(AssertionError):
        allocator.free(offset, size_bytes)
    allocator.check()
    assert allocator.used_bytes == 4 * PAGE


def test_a_double_free_is_found_inside_a_merged_run():
    allocator = filled(8, 8)
    slots = [allocator.allocate(2 * PAGE) for _ in range(4)]
    for offset in slots[:3]:
        allocator.free(offset, 2 * PAGE)
    with pytest.raises(AssertionError, match="free already"):
        allocator.free(slots[1], 2 * PAGE)


@pytest.mark.parametrize("arguments", [(2 * PAGE, PAGE), (8 * PAGE, 9 * PAGE), (8 * PAGE, 100)])
def test_a_step_that_does_not_fit_is_refused(arguments):
    allocator = filled(8, 8)
    with pytest.raises(AssertionError):
        allocator.add_step(*arguments)


def test_a_step_is_added_once():
    allocator = filled(8, 8)
    with pytest.raises(AssertionError):
        allocator.add_step(0, 8 * PAGE)


def test_one_size_uses_a_step_to_its_last_slot_again_and_again():
    rng = random.Random(5)
    allocator = filled(1024, 1024, 1024, 1024)
    slots = []
    while (offset := allocator.allocate(7 * PAGE - 5)) is not None:
        slots.append(offset)
    assert len(slots) == 3 * (1024 // 7)
    for _ in range(3):
        rng.shuffle(slots)
        given_back, slots = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        for offset in given_back:
            allocator.free(offset, 7 * PAGE - 5)
        slots += [allocator.allocate(7 * PAGE - 5) for _ in given_back]
        allocator.check()
        assert None not in slots
    assert allocator.allocate(7 * PAGE) is None


@pytest.mark.parametrize(
    ("total_bytes", "step_bytes"),
    [
        (500 * GIB, GIB),
        (8 * GIB, GIB),
        (8 * GIB - PAGE, GIB),
        (2 * GIB, 256 * MIB),
        (GIB + 12 * PAGE, 130 * MIB),
        (512 * MIB, 64 * MIB),
        (100 * MIB, 64 * MIB),
        (10 * MIB, 10 * MIB),
        (PAGE, PAGE),
    ],
)
def test_the_growth_step_follows_the_arena(total_bytes, step_bytes):
    assert step_size_bytes(total_bytes) == step_bytes


@given(st.integers(1, 1 << 28).map(lambda pages: pages * PAGE))
def test_a_growth_step_is_whole_pages_and_no_longer_than_the_arena(total_bytes):
    step_bytes = step_size_bytes(total_bytes)
    assert step_bytes % PAGE == 0
    assert 0 < step_bytes <= total_bytes
    assert step_bytes == total_bytes or step_bytes % (2 * MIB) == 0
