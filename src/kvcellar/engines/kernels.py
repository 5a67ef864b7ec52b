"""The Triton kernel that moves pages to and from staging and adds up seals on the way.

One launch moves a *piece*: consecutive pages in the order in which a shard's bytes lie, over as
many chunks as fit into a staging buffer. A program takes slices of pages, some rows of the seal at
a time, and adds its part of the sum to its chunk's; the sums are integers modulo 2^64, so the order
in which programs finish does not matter and the value is exactly the CPU's. Driven by `copy_gpu`;
the same kernel runs under Triton's interpreter, where the tests compare it with numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvcellar.engines.pages import PageRun
from kvcellar.errors import UnsupportedModelError
from kvcellar.memory import seal

__all__ = ["Piece", "RunGroup", "SealTables", "group_runs", "move_piece"]

LANES = seal.ROW_WORDS
SLICE_ROWS = 16
"""Rows of the seal in a slice: 64 KiB, so that one large page keeps many programs busy."""
ROWS_AT_ONCE = 4
WARPS = 8


@dataclass(frozen=True)
class SealTables:
    """The seal's weights on the device.

    Attributes:
        lanes: int64, shape [LANES].
        rows: int64, shape [rows of the largest shard].
    """

    lanes: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, *, shard_words: int) -> "SealTables":
        """Return the weights for shards of up to `shard_words` words."""
        rows = seal.row_weights(-(-shard_words // LANES))
        return cls(_upload(seal.lane_weights(), device), _upload(rows, device))


@dataclass(frozen=True)
class RunGroup:
    """Consecutive runs whose pages have one size.

    Attributes:
        bases: int64, shape [runs]: the address of each run's first page.
        strides: int64, shape [runs]: bytes from one block to the next.
        page_words: words of a page.
        words_before: words of one block in the runs before the group.
    """

    bases: torch.Tensor
    strides: torch.Tensor
    page_words: int
    words_before: int

    @property
    def run_count(self) -> int:
        """Return the number of runs."""
        return len(self.bases)


@dataclass(frozen=True)
class Piece:
    """Pages that are moved by one launch.

    Attributes:
        group: whose pages.
        first_page: index of the first, by chunk, then run, then block.
        page_count: how many.
    """

    group: RunGroup
    first_page: int
    page_count: int


def group_runs(runs: Sequence[PageRun], device: torch.device) -> list[RunGroup]:
    """Return the runs as groups of equal page size, in order.

    Raises:
        UnsupportedModelError: a run's pages or addresses are no whole words.
    """
    groups: list[RunGroup] = []
    start = words_before = 0
    for index, run in enumerate(runs):
        address = run.storage.data_ptr() + run.offset_bytes
        if any(number % seal.WORD_BYTES for number in (address, run.stride_bytes, run.page_bytes)):
            raise UnsupportedModelError(
                f"layer {run.names[0]}: its pages are no whole words of {seal.WORD_BYTES} bytes"
            )
        is_last = index + 1 == len(runs)
        if is_last or runs[index + 1].page_bytes != run.page_bytes:
            members = runs[start : index + 1]
            bases = [each.storage.data_ptr() + each.offset_bytes for each in members]
            strides = [each.stride_bytes for each in members]
            page_words = run.page_bytes // seal.WORD_BYTES
            groups.append(
                RunGroup(
                    torch.tensor(bases, dtype=torch.int64, device=device),
                    torch.tensor(strides, dtype=torch.int64, device=device),
                    page_words,
                    words_before,
                )
            )
            words_before += page_words * len(members)
            start = index + 1
    return groups


def move_piece(
    piece: Piece,
    staging: torch.Tensor,
    *,
    blocks: torch.Tensor,
    sums: torch.Tensor,
    tables: SealTables,
    is_store: bool,
) -> None:
    """Launch the move of a piece on the current stream; does not wait.

    Args:
        piece: see `Piece`.
        staging: int32, contiguous, at least the piece's words; its first word is the piece's.
        blocks: int64, shape [chunks, blocks a chunk], on the device; negative for pages that a load
            sums but does not write.
        sums: int64, shape [chunks]: each chunk's unfinished seal, to which the piece's part is
            added.
        tables: see `SealTables`.
        is_store: pages to staging, else staging to pages.
    """
    group = piece.group
    chunk_blocks = blocks.shape[1]
    first_word = group.words_before * chunk_blocks
    slices = -(-group.page_words // (SLICE_ROWS * LANES))
    count = piece.page_count * slices
    _move[(count,)](
        group.bases,
        group.strides,
        blocks,
        staging,
        sums,
        tables.lanes,
        tables.rows,
        piece.first_page,
        chunk_blocks,
        group.run_count * chunk_blocks,
        first_word,
        PAGE_WORDS=group.page_words,
        SLICES=slices,
        SLICE_ROWS=SLICE_ROWS if slices > 1 else -(-group.page_words // LANES),
        ROWS=min(ROWS_AT_ONCE, triton.next_power_of_2(-(-group.page_words // LANES))),
        LANES=LANES,
        IS_ALIGNED=group.page_words % LANES == 0 and first_word % LANES == 0,
        IS_STORE=is_store,
        num_warps=WARPS,
    )


# Triton compiles this function from its source; its parameters are device values without types.
@triton.jit(  # type: ignore[untyped-decorator]
    # One compiled kernel for every chunk size and every piece, or the first request pays for it.
    do_not_specialize=["first_page", "chunk_blocks", "chunk_pages", "first_word"]
)
def _move(  # type: ignore[no-untyped-def]
    bases,
    strides,
    blocks,
    staging,
    sums,
    lane_weights,
    row_weights,
    first_page,
    chunk_blocks,
    chunk_pages,
    first_word,
    PAGE_WORDS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_STORE: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    index = tl.program_id(0)
    page_index = index // SLICES
    page = first_page + page_index
    chunk = page // chunk_pages
    place = page % chunk_pages
    run = place // chunk_blocks
    block = tl.load(blocks + chunk * chunk_blocks + place % chunk_blocks)
    address = tl.load(bases + run) + tl.maximum(block, 0) * tl.load(strides + run)
    words_at = address.to(tl.pointer_type(tl.int32))
    staged_at = staging + page_index.to(tl.int64) * PAGE_WORDS
    shard_word = first_word + place.to(tl.int64) * PAGE_WORDS
    # A page that must not be written is summed all the same.
    written = tl.where(block >= 0, PAGE_WORDS, 0)
    by_lane = tl.zeros([ROWS, LANES], dtype=tl.int64)
    for step in range(0, SLICE_ROWS, ROWS):
        rows = (index % SLICES) * SLICE_ROWS + step + row
        word = rows[:, None] * LANES + lane[None, :]
        is_inside = word < PAGE_WORDS
        if IS_STORE:
            moved = tl.load(words_at + word, mask=is_inside, other=0)
            tl.store(staged_at + word, moved, mask=is_inside)
        else:
            moved = tl.load(staged_at + word, mask=is_inside, other=0)
            tl.store(words_at + word, moved, mask=word < written)
        value = moved.to(tl.int64) & 0xFFFFFFFF
        if IS_ALIGNED:
            # Whole rows: a row's weight is one number, and the lanes' are applied at the end.
            is_row = rows * LANES < PAGE_WORDS
            weight = tl.load(row_weights + shard_word // LANES + rows, mask=is_row, other=0)
            by_lane += value * weight[:, None]
        else:
            at = shard_word + word
            weight = tl.load(row_weights + at // LANES, mask=is_inside, other=0)
            by_lane += value * weight * tl.load(lane_weights + at % LANES)
    totals = tl.sum(by_lane, axis=0)
    if IS_ALIGNED:
        totals *= tl.load(lane_weights + lane)
    tl.atomic_add(sums + chunk, tl.sum(totals, axis=0), sem="relaxed")


def _upload(weights: seal.Weights, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64).copy()).to(device)
