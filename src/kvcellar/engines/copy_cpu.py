"""Copies pages that lie in host memory, adding up the seal in the same pass where numba is there.

With numba a compiled loop moves each word once and sums it on the way, without the GIL. A load
then writes pages before it knows the sum: nobody reads them meanwhile (they belong to a request
that waits for this load), and if the seal does not match they are made zero, because damaged bytes
can be NaNs, which an attention kernel lets through where it masks. Verifying first would read
every slot twice. A whole chunk is one call, because each return from the loop waits for the GIL,
which the engine's own threads hold for milliseconds at a time. Without numba, or for pages whose
bytes are no whole words, numpy sums and copies one after the other. Opened by `engines.copy`.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcellar.engines.pages import (
    NOT_WRITTEN,
    BlockIds,
    PageRun,
    SlotBytes,
    check_blocks,
    touch_pages,
)
from kvcellar.layout.shard import EXACT
from kvcellar.memory import seal
from kvcellar.memory.arena import ArenaView

__all__ = ["CpuCopier", "PageKernels", "page_kernels"]

Words = npt.NDArray[np.uint32]
Weights = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1


class _Span(NamedTuple):
    """Runs that follow one another in a slot and lie in one storage, for the compiled loops.

    Attributes:
        words: uint32, the storage from the runs' first byte to their last, contiguous.
        places: int64, shape [runs, 3]: where block 0 begins in `words`, from one block to the
            next, and the length of a page, all in words.
        block_bytes: bytes of one block over these runs.
    """

    words: Words
    places: Places
    block_bytes: int


class PageKernels(NamedTuple):
    """The compiled loops over the pages of a span; each returns its part of the slot's sum.

    Attributes:
        gather: (words, places, blocks, target, lanes, first) -> sum; `target` is the span's part
            of the slot and `first` the index of its first word there.
        scatter: (source, words, places, blocks, lanes, first) -> sum.
    """

    gather: Callable[..., int]
    scatter: Callable[..., int]


class CpuCopier:
    """A `Copier` for pages in host memory; what it copies has been computed when it is asked."""

    batch_chunks = 1
    """A batch gains nothing where each copy is a loop of this thread."""
    fidelities = frozenset({EXACT})
    """A CPU's attention packs pages as it likes: there are no vectors to scale in them."""

    def __init__(self, runs: Sequence[PageRun]) -> None:
        self._pages = [_pages_of(run) for run in runs]
        self._spans = _spans_of(runs)
        self._block_count = min(run.block_count for run in runs)
        self._lock = threading.Lock()
        self._block_bytes = sum(run.page_bytes for run in runs)

    def shard_bytes(self, chunk_blocks: int, *, fidelity: str) -> int:
        """See `Copier.shard_bytes`."""
        return chunk_blocks * self._block_bytes

    def mark(self) -> object:
        """Return nothing to wait for: a CPU's forward pass is over when it returns."""
        return None

    def store(
        self,
        chunks: Sequence[BlockIds],
        slots: Sequence[SlotBytes],
        *,
        fidelity: str,
        after: object,
    ) -> list[int]:
        """See `Copier.store`."""
        return [self._store(*pair) for pair in zip(chunks, slots, strict=True)]

    def load(
        self,
        slots: Sequence[SlotBytes],
        chunks: Sequence[BlockIds],
        *,
        fidelity: str,
        is_sealed: Callable[[int, int], bool],
        after: object,
    ) -> int:
        """See `Copier.load`."""
        for index, (slot, blocks) in enumerate(zip(slots, chunks, strict=True)):
            if not self._load(slot, blocks, is_sealed=functools.partial(is_sealed, index)):
                return index
        return len(chunks)

    def adopt(self, arena: ArenaView, *, start: int, stop: int) -> None:
        """Touch the pages."""
        touch_pages(arena, start=start, stop=stop)

    def disown(self, arena: ArenaView) -> None:
        """Do nothing: the page tables go with the mapping."""

    def _store(self, blocks: BlockIds, slot: SlotBytes) -> int:
        self._check(blocks, slot, lowest=0)
        kernels = self._kernels()
        if kernels is None:
            self._gather(blocks, slot)
            return seal.partial_sum(slot, 0)
        total = 0
        for span, part, first in self._parts(blocks, slot):
            total += int(
                kernels.gather(span.words, span.places, blocks, part, seal.lane_weights(), first)
            )
        return total & _MASK

    def _load(self, slot: SlotBytes, blocks: BlockIds, *, is_sealed: Callable[[int], bool]) -> bool:
        self._check(blocks, slot, lowest=NOT_WRITTEN)
        kernels = self._kernels()
        if kernels is None:
            if not is_sealed(seal.partial_sum(slot, 0)):
                return False
            self._scatter(slot, blocks)
            return True
        total = 0
        for span, part, first in self._parts(blocks, slot):
            total += int(
                kernels.scatter(part, span.words, span.places, blocks, seal.lane_weights(), first)
            )
        if is_sealed(total & _MASK):
            return True
        for pages in self._pages:
            pages[blocks[blocks != NOT_WRITTEN]] = 0
        return False

    def warm_up(self, *, fidelity: str) -> None:
        """Compile the loops: a second or more, most of it with the GIL."""
        self._kernels()

    def _check(self, blocks: BlockIds, slot: SlotBytes, *, lowest: int) -> None:
        check_blocks(
            blocks,
            slot,
            lowest=lowest,
            block_count=self._block_count,
            size_bytes=len(blocks) * self._block_bytes,
        )

    def _parts(self, blocks: BlockIds, slot: SlotBytes) -> Iterator[tuple[_Span, Words, int]]:
        """Yield each span, its words of the slot, and the index of the first of them."""
        words = slot.view(np.uint32)
        first = 0
        for span in self._spans:
            count = len(blocks) * span.block_bytes // seal.WORD_BYTES
            yield span, words[first : first + count], first
            first += count

    def _gather(self, blocks: BlockIds, slot: SlotBytes) -> None:
        position = 0
        for pages in self._pages:
            size = len(blocks) * pages.shape[1]
            target = slot[position : position + size].reshape(len(blocks), -1)
            np.take(pages, blocks, axis=0, out=target, mode="clip")
            position += size

    def _scatter(self, slot: SlotBytes, blocks: BlockIds) -> None:
        wanted = blocks != NOT_WRITTEN
        position = 0
        for pages in self._pages:
            size = len(blocks) * pages.shape[1]
            source = slot[position : position + size].reshape(len(blocks), -1)
            pages[blocks[wanted]] = source if wanted.all() else source[wanted]
            position += size

    def _kernels(self) -> PageKernels | None:
        """Return the compiled loops, None where numpy has to do; waits for who compiles."""
        if not self._spans:
            return None
        with self._lock:
            return page_kernels()


def _pages_of(run: PageRun) -> npt.NDArray[np.uint8]:
    """Return a run's pages without a copy, shape [blocks, page bytes]; keeps the memory alive."""
    shape, strides = (run.block_count, run.page_bytes), (run.stride_bytes, 1)
    return _bytes_of(run, run.offset_bytes, shape, strides)


def _spans_of(runs: Sequence[PageRun]) -> list[_Span]:
    """Return the runs' spans; none where the bytes of some run are no whole words."""
    numbers = [(run.offset_bytes, run.stride_bytes, run.page_bytes) for run in runs]
    addresses = [(run.storage.data_ptr(),) for run in runs]
    if any(number % seal.WORD_BYTES for run in (*numbers, *addresses) for number in run):
        return []
    groups = itertools.groupby(runs, lambda run: run.storage.data_ptr())
    return [_span_of(list(group)) for _, group in groups]


def _span_of(runs: list[PageRun]) -> _Span:
    start = min(run.offset_bytes for run in runs)
    end = max(
        run.offset_bytes + (run.block_count - 1) * run.stride_bytes + run.page_bytes for run in runs
    )
    places = [(run.offset_bytes - start, run.stride_bytes, run.page_bytes) for run in runs]
    return _Span(
        words=_bytes_of(runs[0], start, (end - start,), (1,)).view(np.uint32),
        places=np.array(places, dtype=np.int64) // seal.WORD_BYTES,
        block_bytes=sum(run.page_bytes for run in runs),
    )


def _bytes_of(
    run: PageRun, offset_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    tensor = torch.empty(0, dtype=torch.uint8)
    tensor.set_(run.storage, offset_bytes, shape, strides)
    array: npt.NDArray[np.uint8] = tensor.numpy()
    return array


@functools.cache
def page_kernels() -> PageKernels | None:
    """Return the loops around the seal's own kernels, None without numba; compiles once."""
    # Where another thread compiles them, they are worth waiting for.
    seal.warm_up()
    kernels = seal.kernels()
    if kernels is None:
        return None
    from numba import njit, types

    copy_words, sum_words = kernels.copy_words, kernels.sum_words

    def gather(
        memory: Words, places: Places, blocks: BlockIds, target: Words, lanes: Weights, first: int
    ) -> np.uint64:
        total, at = np.uint64(0), 0
        for run in range(places.shape[0]):
            begin, stride, width = places[run, 0], places[run, 1], places[run, 2]
            for index in range(blocks.size):
                start = begin + blocks[index] * stride
                page = target[at : at + width]
                total += copy_words(memory[start : start + width], page, lanes, first + at)
                at += width
        return total

    def scatter(
        source: Words, memory: Words, places: Places, blocks: BlockIds, lanes: Weights, first: int
    ) -> np.uint64:
        total, at = np.uint64(0), 0
        for run in range(places.shape[0]):
            begin, stride, width = places[run, 0], places[run, 1], places[run, 2]
            for index in range(blocks.size):
                start = begin + blocks[index] * stride
                page = source[at : at + width]
                if blocks[index] < 0:
                    total += sum_words(page, lanes, first + at)
                else:
                    total += copy_words(page, memory[start : start + width], lanes, first + at)
                at += width
        return total

    words = types.Array(types.uint32, 1, "C")
    places = types.Array(types.int64, 2, "C")
    blocks = types.Array(types.int64, 1, "C")
    lanes = types.Array(types.uint64, 1, "C", readonly=True)
    first = types.int64
    return PageKernels(
        njit(types.uint64(words, places, blocks, words, lanes, first), nogil=True)(gather),
        njit(types.uint64(words, words, places, blocks, lanes, first), nogil=True)(scatter),
    )
