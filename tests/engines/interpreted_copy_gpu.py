"""The accelerator's copier, run by Triton's interpreter on host memory, against plain slices.

Triton decides when it is imported whether it interprets, so `test_copy_gpu` runs this file in a
process of its own. The kernel's source is what a GPU runs. What the interpreter cannot show, such
as streams that overlap, is checked on a GPU by `make bench-gpu`.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engines.copy_gpu import GpuCopier
from kvcellar.engines.pages import NOT_WRITTEN, PageRun
from kvcellar.memory import seal


class Engine:
    """Runs of random pages, and what should be in a slot."""

    def __init__(self, page_sizes, *, block_count, gap, seed):
        rng = np.random.default_rng(seed)
        self.runs = []
        self.matrices = []
        for index, page in enumerate(page_sizes):
            stride = page + gap
            memory = torch.from_numpy(rng.integers(0, 256, block_count * stride, dtype=np.uint8))
            self.matrices.append(memory.numpy().reshape(block_count, stride)[:, :page])
            storage = memory.untyped_storage()
            run = PageRun((f"layer.{index}",), storage, "cpu", 0, stride, page, block_count)
            self.runs.append(run)
        self.order = rng.permutation(block_count)
        self.block_bytes = sum(page_sizes)

    def chunks(self, count, width):
        return list(self.order[: count * width].reshape(count, width).astype(np.int64))

    def slot_of(self, blocks):
        return np.concatenate([pages[blocks].reshape(-1) for pages in self.matrices])


pages = st.integers(1, 3000).map(lambda words: words * 4)


@settings(max_examples=15, deadline=None)
@given(
    page_sizes=st.one_of(
        st.tuples(st.integers(1, 3), st.sampled_from([4096, 8192, 1152 * 4])).map(
            lambda pair: [pair[1]] * pair[0]
        ),
        st.lists(pages, min_size=1, max_size=4),
    ),
    count=st.integers(1, 3),
    width=st.integers(1, 3),
    gap=st.sampled_from([0, 64, 4096]),
    pieces=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_any_strided_run_of_pages_goes_there_and_back(page_sizes, count, width, gap, pieces, seed):
    engine = Engine(page_sizes, block_count=10, gap=gap, seed=seed)
    chunks = engine.chunks(count, width)
    wanted = [engine.slot_of(blocks) for blocks in chunks]
    copier = GpuCopier(engine.runs, piece_bytes=pieces * max(page_sizes))
    slots = [np.zeros(width * engine.block_bytes, np.uint8) for _ in chunks]

    sums = copier.store(chunks, slots, after=copier.mark())

    for slot, want, total in zip(slots, wanted, sums, strict=True):
        assert np.array_equal(slot, want)
        assert total == seal.partial_sum(want, 0)
    for matrix in engine.matrices:
        matrix[:] = 0
    targets = [blocks.copy() for blocks in chunks]
    targets[0][0] = NOT_WRITTEN
    good = copier.load(slots, targets, is_sealed=lambda i, value: value == sums[i], after=None)
    assert good == count
    held_back = chunks[0][0]
    assert all(not matrix[held_back].any() for matrix in engine.matrices)
    for matrix in engine.matrices:
        matrix[held_back] = 7
    copier.load(slots[:1], chunks[:1], is_sealed=lambda i, value: value == sums[i], after=None)
    assert [bytes(engine.slot_of(blocks)) for blocks in chunks] == [bytes(want) for want in wanted]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_pages_of_a_damaged_chunk_and_of_those_behind_it_are_zero(damaged):
    engine = Engine([4096, 4096], block_count=8, gap=0, seed=1)
    chunks = engine.chunks(3, 2)
    copier = GpuCopier(engine.runs, piece_bytes=8192)
    slots = [np.zeros(2 * engine.block_bytes, np.uint8) for _ in chunks]
    sums = copier.store(chunks, slots, after=None)
    wanted = [engine.slot_of(blocks) for blocks in chunks]
    slots[damaged][5000] ^= 16

    good = copier.load(slots, chunks, is_sealed=lambda i, value: value == sums[i], after=None)

    assert good == damaged
    for index, blocks in enumerate(chunks):
        got = engine.slot_of(blocks)
        assert np.array_equal(got, wanted[index]) if index < damaged else not got.any()


def test_a_block_that_does_not_exist_is_an_error_before_anything_is_copied():
    engine = Engine([4096], block_count=4, gap=0, seed=1)
    copier = GpuCopier(engine.runs)
    slot = np.zeros(4096, np.uint8)
    with pytest.raises(IndexError, match="block ids 4 to 4 of 4 blocks"):
        copier.store([np.array([4], np.int64)], [slot], after=None)
    assert not slot.any()


def test_pages_that_are_no_whole_words_are_refused():
    engine = Engine([4098], block_count=4, gap=2, seed=1)
    with pytest.raises(ValueError, match=r"layer\.0 are no whole words"):
        GpuCopier(engine.runs)
