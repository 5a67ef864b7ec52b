"""The forms in which an accelerator's chunks lie in slots: raw pages, or int8.

A form cuts a batch of chunks into pieces that fit into staging, launches the kernel that moves one,
and says which bytes of which slot a piece's DMA carries. `copy_gpu` does the rest in the same way
for all forms: streams, buffers, waits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from kvcellar.engines.kernels import Piece, RunGroup, SealTables, move_piece
from kvcellar.engines.kernels_int8 import Int8Shape, move_chunks, sum_shards
from kvcellar.layout.shard import Vectors
from kvcellar.memory import seal

__all__ = ["Form", "Int8Form", "Part", "RawForm"]


class Part(NamedTuple):
    """Bytes of one slot that a piece has in staging.

    Attributes:
        chunk: index of the slot in the batch.
        slot_word: first word in the slot.
        staged_word: first word in staging.
        words: how many.
    """

    chunk: int
    slot_word: int
    staged_word: int
    words: int


class Form(Protocol):
    """How chunks become the bytes of slots; see the module."""

    def shard_bytes(self, chunk_blocks: int) -> int:
        """Return the bytes of a chunk's shard."""
        ...

    def staging_bytes(self, chunk_blocks: int) -> int:
        """Return a staging buffer's bytes: what was wished, or what the smallest piece needs."""
        ...

    def pieces(self, chunk_count: int, chunk_blocks: int) -> Iterator[Piece]:
        """Cut a batch into pieces, in the order of the slots' bytes."""
        ...

    def parts(self, piece: Piece, chunk_blocks: int) -> Iterator[Part]:
        """Return which bytes of which slots a piece has."""
        ...

    def move(
        self,
        piece: Piece,
        staging: torch.Tensor,
        *,
        blocks: torch.Tensor,
        sums: torch.Tensor,
        is_store: bool,
    ) -> None:
        """Launch a piece's kernels on the current stream; see `kernels.move_piece`."""
        ...


class RawForm:
    """A slot holds the pages as they are."""

    def __init__(
        self, groups: Sequence[RunGroup], *, device: torch.device, wished_bytes: int
    ) -> None:
        """Take the pages.

        Args:
            groups: of all runs.
            device: where they lie.
            wished_bytes: a staging buffer's size; at least a page is taken.
        """
        self._groups = groups
        largest = max(group.page_words for group in groups) * seal.WORD_BYTES
        self._piece_bytes = max(wished_bytes, largest)
        self._block_words = sum(group.page_words * group.run_count for group in groups)
        self._tables = _Tables(device)

    def shard_bytes(self, chunk_blocks: int) -> int:
        """See `Form`."""
        return chunk_blocks * self._block_words * seal.WORD_BYTES

    def staging_bytes(self, chunk_blocks: int) -> int:
        """See `Form`."""
        return self._piece_bytes

    def pieces(self, chunk_count: int, chunk_blocks: int) -> Iterator[Piece]:
        """See `Form`; with one page size the pages of all chunks follow one another."""
        spans = [chunk_count] if len(self._groups) == 1 else [1] * chunk_count
        first_chunk = 0
        for span in spans:
            for group in self._groups:
                chunk_pages = group.run_count * chunk_blocks
                at_once = self._piece_bytes // (group.page_words * seal.WORD_BYTES)
                first, stop = first_chunk * chunk_pages, (first_chunk + span) * chunk_pages
                for page in range(first, stop, at_once):
                    yield Piece(group, page, min(at_once, stop - page))
            first_chunk += span

    def parts(self, piece: Piece, chunk_blocks: int) -> Iterator[Part]:
        """See `Form`."""
        group = piece.group
        page_words, chunk_pages = group.page_words, group.run_count * chunk_blocks
        page, stop = piece.first_page, piece.first_page + piece.page_count
        while page < stop:
            chunk, place = divmod(page, chunk_pages)
            count = min(stop - page, chunk_pages - place)
            yield Part(
                chunk,
                group.words_before * chunk_blocks + place * page_words,
                (page - piece.first_page) * page_words,
                count * page_words,
            )
            page += count

    def move(
        self,
        piece: Piece,
        staging: torch.Tensor,
        *,
        blocks: torch.Tensor,
        sums: torch.Tensor,
        is_store: bool,
    ) -> None:
        """See `Form`: pages and seals in one kernel."""
        tables = self._tables.of(self.shard_bytes(blocks.shape[1]))
        move_piece(piece, staging, blocks=blocks, sums=sums, tables=tables, is_store=is_store)


class Int8Form:
    """A slot holds a byte an element, the scales, and the chunk's first tokens exactly."""

    def __init__(
        self,
        group: RunGroup,
        *,
        vectors: Vectors,
        block_tokens: int,
        device: torch.device,
        wished_bytes: int,
    ) -> None:
        """Take the pages.

        Args:
            group: all runs.
            vectors: how a page divides.
            block_tokens: tokens a block.
            device: where the pages lie.
            wished_bytes: a staging buffer's size; at least a chunk is taken.
        """
        self._group = group
        self._vectors = vectors
        self._block_tokens = block_tokens
        self._wished_bytes = wished_bytes
        self._tables = _Tables(device)

    def shard_bytes(self, chunk_blocks: int) -> int:
        """See `Form`."""
        return self._shape(chunk_blocks).shard_bytes

    def staging_bytes(self, chunk_blocks: int) -> int:
        """See `Form`."""
        return max(self._wished_bytes, self.shard_bytes(chunk_blocks))

    def pieces(self, chunk_count: int, chunk_blocks: int) -> Iterator[Piece]:
        """See `Form`; a piece is whole chunks."""
        pages = self._group.run_count * chunk_blocks
        at_once = self.staging_bytes(chunk_blocks) // self.shard_bytes(chunk_blocks)
        for chunk in range(0, chunk_count, at_once):
            yield Piece(self._group, chunk * pages, min(at_once, chunk_count - chunk) * pages)

    def parts(self, piece: Piece, chunk_blocks: int) -> Iterator[Part]:
        """See `Form`."""
        words = self.shard_bytes(chunk_blocks) // seal.WORD_BYTES
        first, count = self._chunks(piece, chunk_blocks)
        for index in range(count):
            yield Part(first + index, 0, index * words, words)

    def move(
        self,
        piece: Piece,
        staging: torch.Tensor,
        *,
        blocks: torch.Tensor,
        sums: torch.Tensor,
        is_store: bool,
    ) -> None:
        """See `Form`: one kernel for the pages, one for the seals."""
        shape = self._shape(blocks.shape[1])
        first, count = self._chunks(piece, blocks.shape[1])
        move_chunks(
            self._group,
            staging.view(torch.uint8),
            blocks=blocks[first : first + count],
            shape=shape,
            is_store=is_store,
        )
        sum_shards(
            staging,
            shard_bytes=shape.shard_bytes,
            sums=sums[first : first + count],
            tables=self._tables.of(shape.shard_bytes),
        )

    def _shape(self, chunk_blocks: int) -> Int8Shape:
        return Int8Shape(self._vectors, self._block_tokens, chunk_blocks, self._group.run_count)

    def _chunks(self, piece: Piece, chunk_blocks: int) -> tuple[int, int]:
        pages = self._group.run_count * chunk_blocks
        return piece.first_page // pages, piece.page_count // pages


class _Tables:
    """The seal's weights on a device, made for the largest shard so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words = 0
        self._tables: SealTables | None = None

    def of(self, shard_bytes: int) -> SealTables:
        words = shard_bytes // seal.WORD_BYTES
        if self._tables is None or words > self._words:
            self._words = words
            self._tables = SealTables.make(self._device, shard_words=words)
        return self._tables
