"""Pages and slots, byte for byte against plain slices, with numba's loops and with numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.engines import copy_cpu
from kvcellar.engines.copy import open_copier
from kvcellar.engines.copy_cpu import CpuCopier
from kvcellar.engines.pages import NOT_WRITTEN, PageRun
from kvcellar.errors import UnsupportedModelError
from kvcellar.layout.shard import EXACT
from kvcellar.memory import seal

pytestmark = pytest.mark.engine

KEY = bytes(range(32))


@pytest.fixture(params=["numba", "numpy"], autouse=True)
def engine(request, monkeypatch):
    if request.param == "numba":
        assert copy_cpu.page_kernels()
    else:
        monkeypatch.setattr(seal, "kernels", lambda: None)
        monkeypatch.setattr(copy_cpu, "page_kernels", lambda: None)


# The fixture is the same for every example.
STEADY = [HealthCheck.function_scoped_fixture]


class Memory:
    """Runs of pages in one storage, and the same bytes as plain Python sees them."""

    def __init__(self, page_bytes, gaps, *, block_count, packed, seed=0):
        self.block_count = block_count
        self.page_bytes = page_bytes
        places, end = [], 0
        for size, gap in zip(page_bytes, gaps, strict=True):
            places.append(end + gap)
            end += gap + (size if packed else size * block_count)
        strides = [end if packed else size for size in page_bytes]
        generator = np.random.default_rng(seed)
        total = end * block_count if packed else end
        self.tensor = torch.from_numpy(generator.integers(0, 256, total, dtype=np.uint8))
        self.runs = [
            PageRun((f"l{index}",), self.tensor.untyped_storage(), "cpu", place, stride, size,
                    block_count)
            for index, (place, stride, size) in enumerate(
                zip(places, strides, page_bytes, strict=True)
            )
        ]  # fmt: skip

    def bytes(self):
        return bytes(self.tensor.numpy())

    def span(self, run, block):
        start = run.offset_bytes + block * run.stride_bytes
        return slice(start, start + run.page_bytes)

    def shard(self, blocks):
        whole = self.bytes()
        return b"".join(whole[self.span(run, block)] for run in self.runs for block in blocks)

    def filled(self, blocks, shard):
        """What the memory must hold once `shard` is in `blocks`, all else untouched."""
        whole, position = bytearray(self.bytes()), 0
        for run in self.runs:
            for block in blocks:
                if block != NOT_WRITTEN:
                    whole[self.span(run, block)] = shard[position : position + run.page_bytes]
                position += run.page_bytes
        return bytes(whole)


@st.composite
def memories(draw):
    word = draw(st.sampled_from([1, 4]))
    page_bytes = [
        word * size for size in draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    ]
    gaps = [word * gap for gap in draw(st.lists(
        st.integers(0, 3), min_size=len(page_bytes), max_size=len(page_bytes)
    ))]  # fmt: skip
    block_count = draw(st.integers(1, 9))
    packed, seed = draw(st.booleans()), draw(st.integers(0, 99))
    return Memory(page_bytes, gaps, block_count=block_count, packed=packed, seed=seed)


def ids(blocks):
    return np.array(blocks, dtype=np.int64)


def slot_of(data):
    """A writable slot that is no multiple of a page into its buffer, as slots may be."""
    buffer = np.zeros(len(data) + 4096, dtype=np.uint8)
    start = -buffer.ctypes.data % 4096
    slot = buffer[start : start + len(data)]
    slot[:] = np.frombuffer(data, dtype=np.uint8)
    return slot


@settings(max_examples=60, suppress_health_check=STEADY)
@given(memory=memories(), data=st.data())
def test_a_store_gathers_the_pages_in_order_and_sums_them(engine, memory, data):
    blocks = data.draw(st.permutations(range(memory.block_count)))
    blocks = blocks[: data.draw(st.integers(1, memory.block_count))]
    expected, before = memory.shard(blocks), memory.bytes()
    slot = slot_of(bytes(len(expected)))
    (partial,) = CpuCopier(memory.runs).store([ids(blocks)], [slot], fidelity=EXACT, after=None)
    assert bytes(slot) == expected
    assert memory.bytes() == before
    assert seal.finish(partial, KEY, 3, len(expected)) == seal.seal(expected, KEY, 3)


@settings(max_examples=60, suppress_health_check=STEADY)
@given(memory=memories(), data=st.data())
def test_a_load_fills_the_wanted_blocks_and_touches_nothing_else(engine, memory, data):
    blocks = data.draw(st.permutations(range(memory.block_count)))
    blocks = blocks[: data.draw(st.integers(1, memory.block_count))]
    blocks = [NOT_WRITTEN if data.draw(st.booleans()) else block for block in blocks]
    length = sum(memory.page_bytes) * len(blocks)
    shard = np.random.default_rng(7).integers(0, 256, length, dtype=np.uint8).tobytes()
    expected = memory.filled(blocks, shard)
    slot, sums = slot_of(shard), []
    good = CpuCopier(memory.runs).load(
        [slot],
        [ids(blocks)],
        fidelity=EXACT,
        is_sealed=lambda _, value: not sums.append(value),
        after=None,
    )
    assert good == 1
    assert memory.bytes() == expected
    assert bytes(slot) == shard
    assert [seal.finish(value, KEY, 0, length) for value in sums] == [seal.seal(shard, KEY, 0)]


def test_runs_of_several_storages_share_a_slot_in_their_order(engine):
    """Engines may give each layer its own memory, and in any order; here both at once."""
    first = Memory([64, 32, 96], [4, 8, 0], block_count=4, packed=False, seed=1)
    other = Memory([128], [0], block_count=5, packed=True, seed=2)
    runs = [first.runs[1], first.runs[0], other.runs[0], first.runs[2]]
    homes = [first, first, other, first]
    copier = CpuCopier(runs)
    slot = slot_of(bytes(320 * 2))
    (partial,) = copier.store([ids([3, 1])], [slot], fidelity=EXACT, after=None)
    stored = b"".join(
        home.bytes()[home.span(run, block)]
        for home, run in zip(homes, runs, strict=True)
        for block in (3, 1)
    )
    assert bytes(slot) == stored
    assert seal.finish(partial, KEY, 0, 640) == seal.seal(stored, KEY, 0)
    good = copier.load(
        [slot], [ids([0, 2])], fidelity=EXACT, is_sealed=lambda _, v: v == partial, after=None
    )
    assert good == 1
    for home, run in zip(homes, runs, strict=True):
        whole = home.bytes()
        assert whole[home.span(run, 0)] == whole[home.span(run, 3)]
        assert whole[home.span(run, 2)] == whole[home.span(run, 1)]


@settings(max_examples=40, suppress_health_check=STEADY)
@given(memory=memories(), data=st.data())
def test_a_load_whose_seal_is_wrong_leaves_no_byte_of_the_slot(engine, memory, data):
    block_count = memory.block_count
    blocks = data.draw(st.permutations(range(block_count)))[: max(1, block_count // 2)]
    blocks = [NOT_WRITTEN, *blocks[1:]]
    length = sum(memory.page_bytes) * len(blocks)
    slot = slot_of(b"\xff" * length)  # NaNs in every floating-point format.
    before = memory.bytes()
    blank = memory.filled(blocks, bytes(length))
    good = CpuCopier(memory.runs).load(
        [slot], [ids(blocks)], fidelity=EXACT, is_sealed=lambda *_: False, after=None
    )
    assert good == 0
    assert memory.bytes() in {before, blank}


@pytest.mark.parametrize("blocks", [[0, 4], [0, -2], [99, 0]])
def test_a_block_that_does_not_exist_is_an_error_and_touches_nothing(engine, blocks):
    memory = Memory([64, 32], [0, 0], block_count=4, packed=False)
    before, slot = memory.bytes(), slot_of(bytes(96 * 2))
    copier = CpuCopier(memory.runs)
    with pytest.raises(IndexError, match="of 4 blocks"):
        copier.store([ids(blocks)], [slot], fidelity=EXACT, after=None)
    with pytest.raises(IndexError, match="of 4 blocks"):
        copier.load([slot], [ids(blocks)], fidelity=EXACT, is_sealed=lambda *_: True, after=None)
    assert memory.bytes() == before
    assert not slot.any()


def test_a_batch_ends_at_the_first_chunk_that_is_not_good(engine):
    memory = Memory([64, 32], [0, 0], block_count=6, packed=False)
    copier, chunks = CpuCopier(memory.runs), [ids([0, 1]), ids([2, 3]), ids([4, 5])]
    slots = [slot_of(bytes(96 * 2)) for _ in chunks]
    sums = copier.store(chunks, slots, fidelity=EXACT, after=None)
    assert [bytes(slot) for slot in slots] == [memory.shard(blocks) for blocks in chunks]
    slots[1][7] ^= 1
    expected = memory.filled([4, 5], bytes(slots[2]))
    good = copier.load(
        slots, chunks, fidelity=EXACT, is_sealed=lambda at, value: sums[at] == value, after=None
    )
    assert good == 1
    assert memory.shard([0, 1]) == bytes(slots[0])
    assert memory.shard([2, 3]) != bytes(slots[1])
    assert (
        memory.bytes()[memory.span(memory.runs[0], 4)] == expected[memory.span(memory.runs[0], 4)]
    )


def test_a_store_never_takes_a_block_that_stands_for_none(engine):
    memory = Memory([64], [0], block_count=4, packed=False)
    slot = slot_of(bytes(64))
    with pytest.raises(IndexError):
        CpuCopier(memory.runs).store([ids([NOT_WRITTEN])], [slot], fidelity=EXACT, after=None)


def test_pages_of_a_device_that_nothing_copies_from_are_refused_by_name(engine):
    memory = Memory([64], [0], block_count=4, packed=False)
    run = PageRun(("l0",), memory.tensor.untyped_storage(), "xpu:0", 0, 64, 64, 4)
    with pytest.raises(UnsupportedModelError, match="xpu:0"):
        open_copier([run])
    assert isinstance(open_copier(memory.runs), CpuCopier)
