"""Brings a mapped arena into this process's page tables before the first copy needs it.

The server has the memory already, but the first access of each process to each page of 4 KiB is a
fault: a copy into fresh pages runs at a fifth of its speed. So a thread reads one byte of every
page that the server has announced, a little at a time. It takes no memory but the page tables;
the resident size that the kernel reports for the process grows by the arena all the same, for
shared pages count in everyone's. Part of the worker half.
"""

from collections.abc import Callable

import numpy as np

from kvcellar.clock import Clock
from kvcellar.engines.shelf import ArenaShelf
from kvcellar.units import MIB

__all__ = ["Toucher"]

_PAGE_BYTES = 4096
_PIECE_BYTES = 16 * MIB
_BUDGET_S = 0.05


class Toucher:
    """Remembers how far the present arena was touched; used by one thread."""

    def __init__(self, shelf: ArenaShelf, ready_bytes: Callable[[], int], *, clock: Clock) -> None:
        """Begin at the start of whatever arena there is.

        Args:
            shelf: has the present arena.
            ready_bytes: how much of it holds memory, from its start.
            clock: for the budget.
        """
        self._shelf = shelf
        self._ready_bytes = ready_bytes
        self._clock = clock
        self._boot_id: bytes | None = None
        self._done_bytes = 0

    def touch(self) -> None:
        """Touch some more, for about 50 ms at most; without the GIL."""
        boot_id = self._shelf.boot_id
        if boot_id is None:
            return
        if boot_id != self._boot_id:
            self._boot_id, self._done_bytes = boot_id, 0
        end_s = self._clock.monotonic_s() + _BUDGET_S
        while self._done_bytes < self._ready_bytes() and self._clock.monotonic_s() < end_s:
            if not self._touch_piece(boot_id):
                return

    def _touch_piece(self, boot_id: bytes) -> bool:
        hold = self._shelf.take(boot_id)
        if hold is None:
            return False
        try:
            with self._shelf.reading(hold) as arena:
                if arena is None:
                    return False
                start = self._done_bytes
                stop = min(start + _PIECE_BYTES, self._ready_bytes(), arena.size_bytes)
                if stop <= start:
                    return False
                pages = np.frombuffer(arena.view, np.uint8, stop - start, start)[::_PAGE_BYTES]
                # The value means nothing; a sum is what numpy computes without the GIL.
                pages.sum(dtype=np.uint64)
                del pages
                self._done_bytes = stop
                return True
        finally:
            self._shelf.give_back(hold)
