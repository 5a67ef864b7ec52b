"""Registers the arena with CUDA, so that the copy engine reads and writes it directly.

Memory that CUDA does not know is copied through the driver's own small buffers, at a fraction of
the link's rate and with the calling thread busy. Registering takes 0.05 s a GiB once the pages are
there, so the worker's quiet thread does it piece by piece as the server's arena grows; until a
piece is registered, copies of its slots are slow and right. Other accelerators need nothing here.
"""

import threading

import numpy as np
import torch

from kvcellar.memory.arena import ArenaView
from kvcellar.telemetry.logs import EventLog

__all__ = ["HostRegistration"]

log = EventLog("vllm.kvcellar.registration")


class HostRegistration:
    """What of which arena one process has registered; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._addresses: dict[int, list[int]] = {}
        self._has_warned = False

    def add(self, arena: ArenaView, *, start: int, stop: int) -> None:
        """Register [start, stop) of an arena's bytes; blocks, without the GIL.

        A refusal is logged once: copies go on without.
        """
        if self._device.type != "cuda":
            return
        address = np.frombuffer(arena.view, np.uint8, stop - start, start).ctypes.data
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostRegister(address, stop - start, 0))
        if status == 0:
            with self._lock:
                self._addresses.setdefault(id(arena), []).append(address)
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "CUDA refused to register memory, copies will be slow: raise `ulimit -l`?",
                status=status,
                size_bytes=stop - start,
            )

    def drop(self, arena: ArenaView) -> None:
        """Take back what was registered of an arena, before it is unmapped; blocks."""
        with self._lock:
            addresses = self._addresses.pop(id(arena), [])
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
