"""Copies pages of an accelerator through host memory: right on any CUDA device, not yet fast.

One gather or scatter for each run on a stream of its own, which waits for what the step had
launched when the job came, and one plain copy between the device and the host. The seal is summed
on the host, before a load's bytes reach the device. Opened by `engines.copy`.
"""

from collections.abc import Callable, Sequence

import torch

from kvcellar.engines.pages import NOT_WRITTEN, BlockIds, PageRun, SlotBytes, check_blocks
from kvcellar.memory import seal

__all__ = ["DeviceCopier"]


class DeviceCopier:
    """A `Copier` for pages on a CUDA device."""

    def __init__(self, runs: Sequence[PageRun]) -> None:
        self._device = torch.device(runs[0].device)
        self._block_count = min(run.block_count for run in runs)
        self._pages = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                run.storage,
                run.offset_bytes,
                (run.block_count, run.page_bytes),
                (run.stride_bytes, 1),
            )
            for run in runs
        ]
        self._store_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)
        self.block_bytes = sum(run.page_bytes for run in runs)

    def mark(self) -> object:
        """Return an event behind everything that the step's stream was given until now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def store(self, blocks: BlockIds, slot: SlotBytes, *, after: object) -> int:
        """See `Copier.store`."""
        self._check(blocks, slot, lowest=0)
        position = 0
        with torch.inference_mode(), torch.cuda.stream(self._store_stream):
            self._store_stream.wait_event(after)
            index = torch.from_numpy(blocks).to(self._device)
            for pages in self._pages:
                # The copy to the host waits for this stream, and for nothing that the step runs.
                source = pages.index_select(0, index).cpu().numpy().reshape(-1)
                target = slot[position : position + source.size]
                target[:] = source
                position += source.size
        return seal.partial_sum(slot, 0)

    def load(
        self,
        slot: SlotBytes,
        blocks: BlockIds,
        *,
        is_sealed: Callable[[int], bool],
        after: object,
    ) -> bool:
        """See `Copier.load`; nothing unverified reaches the device."""
        self._check(blocks, slot, lowest=NOT_WRITTEN)
        if not is_sealed(seal.partial_sum(slot, 0)):
            return False
        wanted = blocks != NOT_WRITTEN
        position = 0
        with torch.inference_mode(), torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(after)
            index = torch.from_numpy(blocks[wanted]).to(self._device)
            for pages in self._pages:
                size = len(blocks) * pages.shape[1]
                part = slot[position : position + size].reshape(len(blocks), -1)[wanted]
                pages.index_copy_(0, index, torch.from_numpy(part).to(self._device))
                position += size
            self._load_stream.synchronize()
        return True

    def warm_up(self) -> None:
        """Compile the seal's sum."""
        seal.warm_up()

    def _check(self, blocks: BlockIds, slot: SlotBytes, *, lowest: int) -> None:
        check_blocks(
            blocks,
            slot,
            lowest=lowest,
            block_count=self._block_count,
            block_bytes=self.block_bytes,
        )
