"""Copies pages of an accelerator: a kernel to or from staging, and one plain DMA a slot.

The pages of a job are cut into pieces of a staging buffer's size. While the copy engine moves one
piece between staging and the arena, the kernel gathers or scatters the next in the other buffer;
events order them, and the host waits once, at the end of the batch. Measured on an H200 with 64 KiB
pages: 97 to 99 % of the link's rate from 8 chunks of 32 MiB on, seals included (docs/performance.md
has the figures and the ways that were slower). The streams have the lowest priority there is and
are not those of the model. Opened by `engines.copy`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvcellar.engines.kernels import Piece, SealTables, group_runs, move_piece
from kvcellar.engines.pages import NOT_WRITTEN, BlockIds, PageRun, SlotBytes, check_blocks
from kvcellar.engines.registration import HostRegistration
from kvcellar.memory import seal
from kvcellar.memory.arena import ArenaView
from kvcellar.units import MIB

__all__ = ["GpuCopier"]

_PIECE_BYTES = 16 * MIB
_BUFFERS = 2
_MASK = (1 << 64) - 1


class _Buffer:
    """One staging buffer and the event after which it may be written again."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        # Any: an event of the device's own module, which has no common type.
        self.free: Any = None

    def await_free(self, stream: Any) -> None:  # noqa: ANN401 - the same
        """Let a stream wait until the buffer's last content was used."""
        if self.free is not None:
            stream.wait_event(self.free)


class _Side:
    """One direction's streams and staging; used by one thread."""

    def __init__(self, device: torch.device, *, piece_bytes: int) -> None:
        module = torch.get_device_module(device)
        self.kernel_stream = module.Stream(device)
        self.copy_stream = module.Stream(device)
        words = piece_bytes // seal.WORD_BYTES
        self.buffers = [
            _Buffer(torch.empty(words, dtype=torch.int32, device=device)) for _ in range(_BUFFERS)
        ]


class GpuCopier:
    """A `Copier` for pages of an accelerator that torch and Triton know."""

    batch_chunks = 64
    """Chunks that are copied behind one wait."""

    def __init__(self, runs: Sequence[PageRun], *, piece_bytes: int = _PIECE_BYTES) -> None:
        """Take staging memory: two buffers a direction.

        Args:
            runs: where the pages lie; all on one device.
            piece_bytes: size of a buffer, at least the largest page.

        Raises:
            ValueError: pages are no whole words.
        """
        self._device = torch.device(runs[0].device)
        self._module = torch.get_device_module(self._device)
        self._groups = group_runs(runs, self._device)
        self._block_count = min(run.block_count for run in runs)
        self._piece_bytes = max(piece_bytes, *(run.page_bytes for run in runs))
        self.block_bytes = sum(run.page_bytes for run in runs)
        self._store_side = _Side(self._device, piece_bytes=self._piece_bytes)
        self._load_side = _Side(self._device, piece_bytes=self._piece_bytes)
        self._tables: dict[int, SealTables] = {}
        self._registration = HostRegistration(self._device)
        # The groups hold addresses; this keeps what lies there.
        self._storages = [run.storage for run in runs]
        self._warming = threading.Lock()
        self._is_warm = False

    def mark(self) -> object:
        """Return an event behind everything that the step's stream was given until now."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def adopt(self, arena: ArenaView, *, start: int, stop: int) -> None:
        """Make [start, stop) of the arena's bytes reachable for DMA; may block for a while."""
        self._registration.add(arena, start=start, stop=stop)

    def disown(self, arena: ArenaView) -> None:
        """Forget an arena that is about to be unmapped."""
        self._registration.drop(arena)

    def store(
        self, chunks: Sequence[BlockIds], slots: Sequence[SlotBytes], *, after: object
    ) -> list[int]:
        """See `Copier.store`."""
        self._check(chunks, slots, lowest=0)
        side = self._store_side
        batch, sums = self._begin(side, chunks, after=after)
        for turn, piece in enumerate(self._pieces(*batch.shape)):
            buffer = side.buffers[turn % _BUFFERS]
            with self._module.stream(side.kernel_stream):
                buffer.await_free(side.kernel_stream)
                self._move(piece, buffer.words, batch, sums=sums, is_store=True)
                moved = side.kernel_stream.record_event()
            with self._module.stream(side.copy_stream):
                side.copy_stream.wait_event(moved)
                for target, staged in self._parts(piece, slots, buffer.words, width=batch.shape[1]):
                    target.copy_(staged, non_blocking=True)
                buffer.free = side.copy_stream.record_event()
        return self._finish(side, sums)

    def load(
        self,
        slots: Sequence[SlotBytes],
        chunks: Sequence[BlockIds],
        *,
        is_sealed: Callable[[int, int], bool],
        after: object,
    ) -> int:
        """See `Copier.load`; pages of a chunk that is not good are made zero."""
        self._check(chunks, slots, lowest=NOT_WRITTEN)
        side = self._load_side
        batch, sums = self._begin(side, chunks, after=after)
        for turn, piece in enumerate(self._pieces(*batch.shape)):
            buffer = side.buffers[turn % _BUFFERS]
            with self._module.stream(side.copy_stream):
                buffer.await_free(side.copy_stream)
                for source, staged in self._parts(piece, slots, buffer.words, width=batch.shape[1]):
                    staged.copy_(source, non_blocking=True)
                arrived = side.copy_stream.record_event()
            with self._module.stream(side.kernel_stream):
                side.kernel_stream.wait_event(arrived)
                self._move(piece, buffer.words, batch, sums=sums, is_store=False)
                buffer.free = side.kernel_stream.record_event()
        values = self._finish(side, sums)
        good = next((i for i, value in enumerate(values) if not is_sealed(i, value)), len(values))
        if good < len(values):
            self._wipe(batch[good:])
        return good

    def warm_up(self) -> None:
        """Compile the kernels, once: some seconds the first time on a machine."""
        with self._warming:
            if self._is_warm:
                return
            blocks, slot = np.zeros(1, np.int64), np.zeros(self.block_bytes, np.uint8)
            self.store([blocks], [slot], after=None)
            self.load([slot], [blocks + NOT_WRITTEN], is_sealed=lambda *_: True, after=None)
            self._is_warm = True

    def _check(
        self, chunks: Sequence[BlockIds], slots: Sequence[SlotBytes], *, lowest: int
    ) -> None:
        for blocks, slot in zip(chunks, slots, strict=True):
            check_blocks(
                blocks,
                slot,
                lowest=lowest,
                block_count=self._block_count,
                block_bytes=self.block_bytes,
            )

    def _begin(
        self, side: _Side, chunks: Sequence[BlockIds], *, after: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks and the sums, on the device, behind what `after` stands for."""
        with self._module.stream(side.kernel_stream):
            batch = torch.from_numpy(np.stack(chunks)).to(self._device)
            sums = torch.zeros(len(chunks), dtype=torch.int64, device=self._device)
            if after is not None:
                # Pages may still be written by the step (stores), or by their last owner's (loads).
                side.kernel_stream.wait_event(after)
        return batch, sums

    def _pieces(self, chunk_count: int, width: int) -> Iterator[Piece]:
        """Cut a batch into pieces, in the order of the slots' bytes."""
        # With one page size the pages of all chunks follow one another in staging.
        spans = [chunk_count] if len(self._groups) == 1 else [1] * chunk_count
        first_chunk = 0
        for span in spans:
            for group in self._groups:
                chunk_pages = group.run_count * width
                at_once = self._piece_bytes // (group.page_words * seal.WORD_BYTES)
                first, stop = first_chunk * chunk_pages, (first_chunk + span) * chunk_pages
                for page in range(first, stop, at_once):
                    yield Piece(group, page, min(at_once, stop - page))
            first_chunk += span

    def _parts(
        self, piece: Piece, slots: Sequence[SlotBytes], staging: torch.Tensor, *, width: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each slot that a piece has, and where they are in staging."""
        group = piece.group
        page_words, chunk_pages = group.page_words, group.run_count * width
        page, stop = piece.first_page, piece.first_page + piece.page_count
        while page < stop:
            chunk, place = divmod(page, chunk_pages)
            count = min(stop - page, chunk_pages - place)
            in_slot = group.words_before * width + place * page_words
            in_staging = (page - piece.first_page) * page_words
            slot = torch.from_numpy(slots[chunk]).view(torch.int32)
            yield (
                slot[in_slot : in_slot + count * page_words],
                staging[in_staging : in_staging + count * page_words],
            )
            page += count

    def _move(
        self,
        piece: Piece,
        staging: torch.Tensor,
        batch: torch.Tensor,
        *,
        sums: torch.Tensor,
        is_store: bool,
    ) -> None:
        width = batch.shape[1]
        tables = self._tables.get(width)
        if tables is None:
            words = width * self.block_bytes // seal.WORD_BYTES
            tables = self._tables[width] = SealTables.make(self._device, shard_words=words)
        move_piece(piece, staging, blocks=batch, sums=sums, tables=tables, is_store=is_store)

    def _finish(self, side: _Side, sums: torch.Tensor) -> list[int]:
        """Wait for everything that the batch launched and return the sums."""
        with self._module.stream(side.kernel_stream):
            side.kernel_stream.wait_stream(side.copy_stream)
            # This copy is the one wait; the thread has no GIL in it.
            return [int(value) & _MASK for value in sums.cpu().tolist()]

    def _wipe(self, batch: torch.Tensor) -> None:
        """Make the pages of chunks zero: damaged bytes can be NaNs, which pass through masks."""
        side = self._load_side
        unused = torch.zeros(batch.shape[0], dtype=torch.int64, device=self._device)
        with self._module.stream(side.kernel_stream):
            for piece in self._pieces(*batch.shape):
                words = side.buffers[0].words.zero_()
                self._move(piece, words, batch.contiguous(), sums=unused, is_store=False)
        self._finish(side, unused)
