"""Prepares a mapped arena for copies before the first copy needs it.

The server has the memory already, but each process must bring it into its own page tables, and
an accelerator's driver must be told of it: a copy into memory that is not prepared runs at a fifth
of its speed. So a thread hands the copier one growth step after another as the server announces
them. It takes no memory but the page tables; the resident size that the kernel reports for the
process grows by the arena all the same, for shared pages count in everyone's. Part of the worker
half.
"""

from collections.abc import Callable

from kvcellar.clock import Clock
from kvcellar.engines.pages import Copier
from kvcellar.engines.shelf import ArenaShelf
from kvcellar.telemetry.logs import EventLog

__all__ = ["Toucher"]

_BUDGET_S = 0.5
_LOG = EventLog("vllm.kvcellar.touch")


class Toucher:
    """Remembers how far the present arena was prepared; used by one thread."""

    def __init__(
        self,
        shelf: ArenaShelf,
        copier: Copier,
        *,
        ready: Callable[[], tuple[int, int]],
        clock: Clock,
    ) -> None:
        """Begin at the start of whatever arena there is.

        Args:
            shelf: has the present arena.
            copier: prepares it.
            ready: how many growth steps hold memory, and the bytes of a step.
            clock: for the budget.
        """
        self._shelf = shelf
        self._copier = copier
        self._ready = ready
        self._clock = clock
        self._boot_id: bytes | None = None
        self._steps_done = 0

    def touch(self) -> None:
        """Prepare what can be, for half a second at most and a step at least; without the GIL."""
        boot_id = self._shelf.boot_id
        if boot_id is None:
            return
        if boot_id != self._boot_id:
            self._boot_id, self._steps_done = boot_id, 0
        end_s = self._clock.monotonic_s() + _BUDGET_S
        while self._touch_step(boot_id) and self._clock.monotonic_s() < end_s:
            pass

    def _touch_step(self, boot_id: bytes) -> bool:
        steps, step_bytes = self._ready()
        hold = self._shelf.take(boot_id) if self._steps_done < steps else None
        if hold is None:
            return False
        try:
            with self._shelf.reading(hold) as arena:
                if arena is None:
                    return False
                # A slot never straddles a step, so neither does a copy straddle what is prepared.
                start = self._steps_done * step_bytes
                stop = min(start + step_bytes, arena.size_bytes)
                self._copier.adopt(arena, start=start, stop=stop)
                self._steps_done += 1
                if stop == arena.size_bytes:
                    # Until this line copies may be slow; `make bench-gpu` waits for it.
                    _LOG.info("arena is prepared", size_bytes=stop)
                return True
        finally:
            self._shelf.give_back(hold)
