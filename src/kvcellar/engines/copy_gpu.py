"""Copies pages of an accelerator: a kernel to or from staging, and one plain DMA a slot.

The pages of a job are cut into pieces of a staging buffer's size. While the copy engine moves one
piece between staging and the arena, the kernel gathers or scatters the next in the other buffer;
events order them, and the host waits once, at the end of the batch. Measured on an H200 with 64 KiB
pages: 97 to 99 % of the link's rate from 8 chunks of 32 MiB on, seals included (docs/performance.md
has the figures and the ways that were slower). The streams have the lowest priority there is and
are not those of the model. Opened by `engines.copy`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvcellar.engines.forms import Form, Int8Form, Part, RawForm
from kvcellar.engines.kernels import group_runs
from kvcellar.engines.pages import (
    NOT_WRITTEN,
    BlockIds,
    PageRun,
    SlotBytes,
    check_ids,
    touch_pages,
)
from kvcellar.engines.registration import HostRegistration
from kvcellar.layout.shard import EXACT, INT8, Vectors
from kvcellar.memory import seal
from kvcellar.memory.arena import ArenaView
from kvcellar.telemetry.logs import EventLog
from kvcellar.units import MIB

__all__ = ["PIECE_BYTES", "GpuCopier", "open_gpu_copier"]

PIECE_BYTES = 16 * MIB
"""Of a staging buffer. From 8 to 32 MiB the rate was the same; less costs launches."""

_LOG = EventLog("vllm.kvcellar.copies")
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

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._device = device
        self.kernel_stream = module.Stream(device)
        self.copy_stream = module.Stream(device)
        self.buffers: list[_Buffer] = []

    def provide(self, size_bytes: int) -> None:
        """Have buffers of at least this size; nothing is under way when it is called."""
        words = -(-size_bytes // seal.WORD_BYTES)
        if not self.buffers or self.buffers[0].words.numel() < words:
            self.buffers = [
                _Buffer(torch.empty(words, dtype=torch.int32, device=self._device))
                for _ in range(_BUFFERS)
            ]


class GpuCopier:
    """A `Copier` for pages of an accelerator that torch and Triton know."""

    batch_chunks = 64
    """Chunks that are copied behind one wait."""
    forms: Mapping[str, Form]
    """By fidelity."""

    def __init__(
        self,
        runs: Sequence[PageRun],
        forms: Mapping[str, Form],
        *,
        beside: "GpuCopier | None" = None,
    ) -> None:
        """Copy pages in the given forms.

        Args:
            runs: where the pages lie; all on one device.
            forms: by fidelity, made of the same runs.
            beside: a copier for the same device whose streams, staging and registration this one
                uses; the two never store at once, nor load at once.
        """
        self._device = torch.device(runs[0].device)
        self._module = torch.get_device_module(self._device)
        self.forms = dict(forms)
        self.fidelities = frozenset(forms)
        self._block_count = min(run.block_count for run in runs)
        self._store_side: _Side = beside._store_side if beside else _Side(self._device)
        self._load_side: _Side = beside._load_side if beside else _Side(self._device)
        self._registration: HostRegistration = (
            beside._registration if beside else HostRegistration(self._device)
        )
        # The forms hold addresses; this keeps what lies there.
        self._storages = [run.storage for run in runs]
        self._warming: threading.Lock = beside._warming if beside else threading.Lock()
        self._warm: set[str] = set()

    def shard_bytes(self, chunk_blocks: int, *, fidelity: str) -> int:
        """See `Copier.shard_bytes`."""
        return self.forms[fidelity].shard_bytes(chunk_blocks)

    def mark(self) -> object:
        """Return an event behind everything that the step's stream was given until now."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def adopt(self, arena: ArenaView, *, start: int, stop: int) -> None:
        """Make [start, stop) of the arena's bytes reachable for DMA; may block for a while."""
        touch_pages(arena, start=start, stop=stop)
        self._registration.add(arena, start=start, stop=stop)

    def disown(self, arena: ArenaView) -> None:
        """Forget an arena that is about to be unmapped."""
        self._registration.drop(arena)

    def store(
        self,
        chunks: Sequence[BlockIds],
        slots: Sequence[SlotBytes],
        *,
        fidelity: str,
        after: object,
    ) -> list[int]:
        """See `Copier.store`."""
        form, side = self.forms[fidelity], self._store_side
        ids = self._check(form, chunks, slots, lowest=0)
        side.provide(form.staging_bytes(ids.shape[1]))
        batch, sums = self._begin(side, ids, after=after)
        for turn, piece in enumerate(form.pieces(*batch.shape)):
            buffer = side.buffers[turn % _BUFFERS]
            with self._module.stream(side.kernel_stream):
                buffer.await_free(side.kernel_stream)
                form.move(piece, buffer.words, blocks=batch, sums=sums, is_store=True)
                moved = side.kernel_stream.record_event()
            with self._module.stream(side.copy_stream):
                side.copy_stream.wait_event(moved)
                for target, staged in _parts(
                    form.parts(piece, batch.shape[1]), slots, buffer.words
                ):
                    target.copy_(staged, non_blocking=True)
                buffer.free = side.copy_stream.record_event()
        return self._finish(side, sums)

    def load(
        self,
        slots: Sequence[SlotBytes],
        chunks: Sequence[BlockIds],
        *,
        fidelity: str,
        is_sealed: Callable[[int, int], bool],
        after: object,
    ) -> int:
        """See `Copier.load`; pages of a chunk that is not good are made zero."""
        form, side = self.forms[fidelity], self._load_side
        ids = self._check(form, chunks, slots, lowest=NOT_WRITTEN)
        side.provide(form.staging_bytes(ids.shape[1]))
        batch, sums = self._begin(side, ids, after=after)
        for turn, piece in enumerate(form.pieces(*batch.shape)):
            buffer = side.buffers[turn % _BUFFERS]
            with self._module.stream(side.copy_stream):
                buffer.await_free(side.copy_stream)
                for source, staged in _parts(
                    form.parts(piece, batch.shape[1]), slots, buffer.words
                ):
                    staged.copy_(source, non_blocking=True)
                arrived = side.copy_stream.record_event()
            with self._module.stream(side.kernel_stream):
                side.kernel_stream.wait_event(arrived)
                form.move(piece, buffer.words, blocks=batch, sums=sums, is_store=False)
                buffer.free = side.kernel_stream.record_event()
        values = self._finish(side, sums)
        good = next((i for i, value in enumerate(values) if not is_sealed(i, value)), len(values))
        if good < len(values):
            self._wipe(form, batch[good:].contiguous())
        return good

    def warm_up(self, *, fidelity: str) -> None:
        """Compile the kernels, once: some seconds the first time on a machine."""
        with self._warming:
            if fidelity not in self._warm:
                # The chunk size does not matter: kernels are compiled for the page's.
                blocks = np.zeros(1, np.int64)
                slot = np.zeros(self.shard_bytes(1, fidelity=fidelity), np.uint8)
                self.store([blocks], [slot], fidelity=fidelity, after=None)
                self.load(
                    [slot],
                    [blocks + NOT_WRITTEN],
                    fidelity=fidelity,
                    is_sealed=lambda *_: True,
                    after=None,
                )
                self._warm.add(fidelity)

    def _check(
        self,
        form: Form,
        chunks: Sequence[BlockIds],
        slots: Sequence[SlotBytes],
        *,
        lowest: int,
    ) -> BlockIds:
        """Return the block ids of all chunks, shape [chunks, blocks a chunk], once they are right.

        All at once, since the copy engine idles until this is done: 4 us a chunk one by one.
        """
        ids = np.stack(chunks)
        size_bytes = form.shard_bytes(ids.shape[1])
        assert len(slots) == len(ids), (len(slots), len(ids))
        for slot in slots:
            assert slot.size == size_bytes, (slot.size, size_bytes)
        check_ids(ids, lowest=lowest, block_count=self._block_count)
        return ids

    def _begin(
        self, side: _Side, ids: BlockIds, *, after: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks and the sums, on the device, behind what `after` stands for."""
        with self._module.stream(side.kernel_stream):
            batch = torch.from_numpy(ids).to(self._device)
            sums = torch.zeros(len(ids), dtype=torch.int64, device=self._device)
            if after is not None:
                # Pages may still be written by the step (stores), or by their last owner's (loads).
                side.kernel_stream.wait_event(after)
        return batch, sums

    def _finish(self, side: _Side, sums: torch.Tensor) -> list[int]:
        """Wait for everything that the batch launched and return the sums."""
        with self._module.stream(side.kernel_stream):
            side.kernel_stream.wait_stream(side.copy_stream)
            # This copy is the one wait; the thread has no GIL in it.
            return [int(value) & _MASK for value in sums.cpu().tolist()]

    def _wipe(self, form: Form, batch: torch.Tensor) -> None:
        """Make the pages of chunks zero: damaged bytes can be NaNs, which pass through masks."""
        side = self._load_side
        unused = torch.zeros(batch.shape[0], dtype=torch.int64, device=self._device)
        with self._module.stream(side.kernel_stream):
            for piece in form.pieces(*batch.shape):
                words = side.buffers[0].words.zero_()
                form.move(piece, words, blocks=batch, sums=unused, is_store=False)
        self._finish(side, unused)


def open_gpu_copier(
    runs: Sequence[PageRun],
    *,
    vectors: Vectors | None = None,
    block_tokens: int = 1,
    piece_bytes: int = PIECE_BYTES,
    beside: GpuCopier | None = None,
) -> GpuCopier:
    """Return a copier in every form that the pages allow.

    Args:
        runs: where the pages lie.
        vectors: how each page divides; None where only the raw form works.
        block_tokens: tokens a block.
        piece_bytes: of a staging buffer; there are two a direction.
        beside: see `GpuCopier`.

    Raises:
        UnsupportedModelError: pages are no whole words.
    """
    device = torch.device(runs[0].device)
    groups = group_runs(runs, device)
    forms: dict[str, Form] = {EXACT: RawForm(groups, device=device, wished_bytes=piece_bytes)}
    if vectors is not None and len(groups) == 1:
        forms[INT8] = Int8Form(
            groups[0],
            vectors=vectors,
            block_tokens=block_tokens,
            device=device,
            wished_bytes=piece_bytes,
        )
    # Which way is no question of the machine (docs/decisions/0006), so nothing is tried out here.
    _LOG.info(
        "copies go through staging and one DMA a slot",
        reason="kernels that write host memory are no faster and slow the model's down",
        device=str(device),
        staging_bytes=2 * _BUFFERS * piece_bytes,
        forms=",".join(sorted(forms)),
    )
    return GpuCopier(runs, forms, beside=beside)


def _parts(
    parts: Iterable[Part], slots: Sequence[SlotBytes], staging: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of slots that a piece has, and where they are in staging."""
    for part in parts:
        slot = torch.from_numpy(slots[part.chunk]).view(torch.int32)
        yield (
            slot[part.slot_word : part.slot_word + part.words],
            staging[part.staged_word : part.staged_word + part.words],
        )
