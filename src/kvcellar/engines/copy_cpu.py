"""Copies pages that lie in host memory, adding up the seal in the same pass where numba is there.

With numba a compiled loop moves each word once and sums it on the way, without the GIL. A load
then writes pages before it knows the sum: nobody reads them meanwhile (they belong to a request
that waits for this load), and if the seal does not match they are made zero, because damaged bytes
can be NaNs, which an attention kernel lets through where it masks. Verifying first would read
every slot twice. Without numba, or for pages whose bytes are no whole words, numpy sums and copies
one after the other. Opened by `engines.copy`.
"""

import functools
import threading
from collections.abc import Callable, Sequence
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

_MASK = (1 << 64) - 1


class _Pages(NamedTuple):
    """One run as numpy sees it.

    Attributes:
        matrix: uint8, shape [blocks, page bytes], strided.
        words: uint32, the run from its first byte to its last, contiguous; None where pages are no
            whole words.
        stride_words: from one block to the next.
    """

    matrix: npt.NDArray[np.uint8]
    words: Words | None
    stride_words: int


class PageKernels(NamedTuple):
    """The compiled loops over a run's pages; each returns its part of the slot's sum.

    Attributes:
        gather: (run, stride, blocks, target, lanes, first) -> sum, all counts in words.
        scatter: (source, run, stride, blocks, lanes, first) -> sum.
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
        self._pages = [_view(run) for run in runs]
        self._block_count = min(run.block_count for run in runs)
        self._lock = threading.Lock()
        self._are_words = all(pages.words is not None for pages in self._pages)
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
        total = position = 0
        for pages in self._pages:
            size = len(blocks) * pages.matrix.shape[1]
            target = slot[position : position + size]
            if kernels is None:
                target = target.reshape(len(blocks), -1)
                np.take(pages.matrix, blocks, axis=0, out=target, mode="clip")
            else:
                total += int(
                    kernels.gather(
                        pages.words,
                        pages.stride_words,
                        blocks,
                        target.view(np.uint32),
                        seal.lane_weights(),
                        position // seal.WORD_BYTES,
                    )
                )
            position += size
        return seal.partial_sum(slot, 0) if kernels is None else total & _MASK

    def _load(self, slot: SlotBytes, blocks: BlockIds, *, is_sealed: Callable[[int], bool]) -> bool:
        self._check(blocks, slot, lowest=NOT_WRITTEN)
        kernels = self._kernels()
        if kernels is None:
            if not is_sealed(seal.partial_sum(slot, 0)):
                return False
            self._scatter(slot, blocks)
            return True
        total = position = 0
        for pages in self._pages:
            size = len(blocks) * pages.matrix.shape[1]
            total += int(
                kernels.scatter(
                    slot[position : position + size].view(np.uint32),
                    pages.words,
                    pages.stride_words,
                    blocks,
                    seal.lane_weights(),
                    position // seal.WORD_BYTES,
                )
            )
            position += size
        if is_sealed(total & _MASK):
            return True
        for pages in self._pages:
            pages.matrix[blocks[blocks != NOT_WRITTEN]] = 0
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

    def _scatter(self, slot: SlotBytes, blocks: BlockIds) -> None:
        wanted = blocks != NOT_WRITTEN
        position = 0
        for pages in self._pages:
            size = len(blocks) * pages.matrix.shape[1]
            source = slot[position : position + size].reshape(len(blocks), -1)
            pages.matrix[blocks[wanted]] = source if wanted.all() else source[wanted]
            position += size

    def _kernels(self) -> PageKernels | None:
        """Return the compiled loops, None where numpy has to do; waits for who compiles."""
        if not self._are_words:
            return None
        with self._lock:
            return page_kernels()


def _view(run: PageRun) -> _Pages:
    """Return a run's memory without a copy; the arrays keep it alive."""
    matrix = _bytes_of(run, (run.block_count, run.page_bytes), (run.stride_bytes, 1))
    span_bytes = (run.block_count - 1) * run.stride_bytes + run.page_bytes
    flat = _bytes_of(run, (span_bytes,), (1,))
    address = flat.__array_interface__["data"][0]
    numbers = (run.page_bytes, run.stride_bytes, address)
    is_words = all(number % seal.WORD_BYTES == 0 for number in numbers)
    return _Pages(
        matrix=matrix,
        words=flat.view(np.uint32) if is_words else None,
        stride_words=run.stride_bytes // seal.WORD_BYTES,
    )


def _bytes_of(
    run: PageRun, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    tensor = torch.empty(0, dtype=torch.uint8)
    tensor.set_(run.storage, run.offset_bytes, shape, strides)
    array: npt.NDArray[np.uint8] = tensor.numpy()
    return array


@functools.cache
def page_kernels() -> PageKernels | None:
    """Return the loops around the seal's own kernels, None without numba; compiles once."""
    kernels = seal.kernels()
    if kernels is None:
        return None
    from numba import njit, types

    copy_words, sum_words = kernels.copy_words, kernels.sum_words

    def gather(
        run: Words, stride: int, blocks: BlockIds, target: Words, lanes: Weights, first: int
    ) -> np.uint64:
        width = target.size // blocks.size
        total = np.uint64(0)
        for index in range(blocks.size):
            start = blocks[index] * stride
            page = target[index * width : (index + 1) * width]
            total += copy_words(run[start : start + width], page, lanes, first + index * width)
        return total

    def scatter(
        source: Words, run: Words, stride: int, blocks: BlockIds, lanes: Weights, first: int
    ) -> np.uint64:
        width = source.size // blocks.size
        total = np.uint64(0)
        for index in range(blocks.size):
            page = source[index * width : (index + 1) * width]
            start = blocks[index] * stride
            if start < 0:
                total += sum_words(page, lanes, first + index * width)
            else:
                total += copy_words(page, run[start : start + width], lanes, first + index * width)
        return total

    words = types.Array(types.uint32, 1, "C")
    blocks = types.Array(types.int64, 1, "C")
    lanes = types.Array(types.uint64, 1, "C", readonly=True)
    number = types.int64
    return PageKernels(
        njit(types.uint64(words, number, blocks, words, lanes, number), nogil=True)(gather),
        njit(types.uint64(words, words, number, blocks, lanes, number), nogil=True)(scatter),
    )
