"""Where an engine's pages lie, and what copies them.

An engine's half finds its *page runs* (one page for each block at a constant stride); a `Copier`
moves a chunk's pages between those runs and one slot and adds up the seal's sum on the way. The
runs name memory by numbers and hold the engine's own storage object, so that nothing here needs
torch. Made by `engines.vllm.regions`, opened by `engines.copy`, driven by the worker half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcellar.memory.arena import ArenaView

__all__ = [
    "NOT_WRITTEN",
    "BlockIds",
    "Copier",
    "PageRun",
    "SlotBytes",
    "Storage",
    "check_blocks",
    "check_ids",
    "merge_adjacent",
    "touch_pages",
]

BlockIds = npt.NDArray[np.int64]
"""Block ids of one chunk in token order, shape [blocks a chunk]."""
SlotBytes = npt.NDArray[np.uint8]
"""One slot of the arena, shape [shard bytes], contiguous; a view, owned by the arena's mapping."""
_PAGE_BYTES = 4096
NOT_WRITTEN = -1
"""Stands for a block that a load verifies but must not write: the engine holds it already."""


class Storage(Protocol):
    """What is needed of a `torch.UntypedStorage`."""

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        ...

    def nbytes(self) -> int:
        """Return the size in bytes."""
        ...


@dataclass(frozen=True)
class PageRun:
    """Pages of one region: that of block `b` begins at `offset_bytes + b * stride_bytes`.

    Attributes:
        names: the layers whose pages lie there, in the order of their bytes.
        storage: the engine's memory, kept alive by this reference.
        device: "cpu", "cuda:0" …
        offset_bytes: where block 0 begins in the storage.
        stride_bytes: from one block to the next, at least `page_bytes`.
        page_bytes: bytes of one block.
        block_count: blocks in the run.
    """

    names: tuple[str, ...]
    storage: Storage
    device: str
    offset_bytes: int
    stride_bytes: int
    page_bytes: int
    block_count: int


class Copier(Protocol):
    """Moves chunks between the engine's pages and slots, a batch at a time.

    One thread may store while another loads; neither call is made by two threads at once. A block
    id that no run has is an `IndexError`, with nothing copied.

    Attributes:
        batch_chunks: the most chunks that are worth giving to one call.
        fidelities: the forms in which it can keep chunks, by the server's word for them.
    """

    batch_chunks: int
    fidelities: frozenset[str]

    def shard_bytes(self, chunk_blocks: int, *, fidelity: str) -> int:
        """Return the bytes of a slot that holds a chunk of so many blocks."""
        ...

    def mark(self) -> object:
        """Return what the copies of this step must wait for.

        Called on the step's thread once the forward pass has been launched; does not block.
        """
        ...

    def store(
        self,
        chunks: Sequence[BlockIds],
        slots: Sequence[SlotBytes],
        *,
        fidelity: str,
        after: object,
    ) -> list[int]:
        """Fill each slot with the pages of a chunk's blocks: as they are, or in another form.

        Blocks the calling thread until the bytes are in the slots; holds no GIL while copying.

        Returns:
            The unfinished seal of each slot.
        """
        ...

    def load(
        self,
        slots: Sequence[SlotBytes],
        chunks: Sequence[BlockIds],
        *,
        fidelity: str,
        is_sealed: Callable[[int, int], bool],
        after: object,
    ) -> int:
        """Fill the pages of each chunk's blocks from its slot, up to the first that is damaged.

        Blocks the calling thread until it is done; holds no GIL while copying.

        Args:
            slots: see `SlotBytes`; all of each is summed.
            chunks: their blocks; `NOT_WRITTEN` for those that are not to be touched.
            fidelity: in which they were stored.
            is_sealed: whether the chunk of an index may have this unfinished seal.
            after: see `mark`.

        Returns:
            How many leading chunks are good. The pages of the others hold no byte of their slots:
            they are untouched or zero.
        """
        ...

    def adopt(self, arena: ArenaView, *, start: int, stop: int) -> None:
        """Prepare bytes [start, stop) of an arena for copies; blocks, called off the step."""
        ...

    def disown(self, arena: ArenaView) -> None:
        """Take back what `adopt` did: the arena is about to be unmapped; blocks."""
        ...

    def warm_up(self, *, fidelity: str) -> None:
        """Compile what the first copy would wait for, once; blocks for seconds the first time."""
        ...


def touch_pages(arena: ArenaView, *, start: int, stop: int) -> None:
    """Bring bytes [start, stop) of an arena into this process's page tables; blocks, no GIL.

    The first access of each process to each page is a fault: copies into pages that nobody touched
    run at a fifth of the speed, and a driver that has to fault them while it registers them holds
    up every other call for half a second a GiB.
    """
    pages = np.frombuffer(arena.view, np.uint8, stop - start, start)[::_PAGE_BYTES]
    # The value means nothing; a sum is what numpy computes without the GIL.
    pages.sum(dtype=np.uint64)


def check_blocks(
    blocks: BlockIds, slot: SlotBytes, *, lowest: int, block_count: int, size_bytes: int
) -> None:
    """Check what a copy was asked for, before it touches anything.

    Args:
        blocks: the chunk's.
        slot: theirs.
        lowest: 0, or `NOT_WRITTEN` for a load.
        block_count: blocks of the runs.
        size_bytes: that the slot must have.

    Raises:
        IndexError: a block id that the runs do not have.
    """
    assert slot.size == size_bytes, (slot.size, len(blocks), size_bytes)
    check_ids(blocks, lowest=lowest, block_count=block_count)


def check_ids(blocks: BlockIds, *, lowest: int, block_count: int) -> None:
    """Check block ids of any shape; see `check_blocks`."""
    if blocks.size and not lowest <= blocks.min() <= blocks.max() < block_count:
        raise IndexError(f"block ids {blocks.min()} to {blocks.max()} of {block_count} blocks")


def merge_adjacent(runs: list[PageRun]) -> list[PageRun]:
    """Return the runs, each memory once, joined where their pages touch inside the stride.

    Layouts that keep all layers of a block together give runs whose pages follow one another: one
    run then copies them at once. The order is that of the runs' first layers in `runs`, whatever
    the addresses are, so that it is the same in every process.
    """
    unique: dict[tuple[int, ...], tuple[int, PageRun]] = {}
    for index, run in enumerate(runs):
        place = (run.storage.data_ptr(), run.stride_bytes, run.offset_bytes, run.page_bytes)
        unique.setdefault(place, (index, run))
    merged: list[tuple[int, PageRun]] = []
    for _, (index, run) in sorted(unique.items(), key=lambda item: item[0]):
        if merged and _touch(merged[-1][1], run):
            earlier, last = merged.pop()
            joined = replace(
                last, names=last.names + run.names, page_bytes=last.page_bytes + run.page_bytes
            )
            merged.append((min(earlier, index), joined))
        else:
            merged.append((index, run))
    return [run for _, run in sorted(merged, key=lambda item: item[0])]


def _touch(left: PageRun, right: PageRun) -> bool:
    return (
        left.storage.data_ptr() == right.storage.data_ptr()
        and left.stride_bytes == right.stride_bytes
        and left.block_count == right.block_count
        and left.offset_bytes + left.page_bytes == right.offset_bytes
        and left.page_bytes + right.page_bytes <= left.stride_bytes
    )
