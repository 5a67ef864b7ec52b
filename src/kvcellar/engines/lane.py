"""One thread that does jobs in order, behind a bounded queue.

Copies must not run on the engine's step, and a flood of them must not pile up: a job that finds
the queue full is refused at once and its maker decides what that means. The worker half has one
lane for loads and one for stores, so that a request never waits behind somebody's store.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcellar.telemetry.logs import EventLog

__all__ = ["Lane"]

Job = TypeVar("Job")
TICK_S = 0.25
_LOG = EventLog("vllm.kvcellar.lane")


class Lane(Generic[Job]):
    """A daemon thread and its queue; `offer` never blocks."""

    def __init__(
        self,
        name: str,
        run: Callable[[Job], None],
        *,
        depth_max: int,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            run: does one job; answers for its own failures.
            depth_max: jobs that may wait.
            tick: called on the thread after each job, and every `TICK_S` when there is none.
        """
        self._run = run
        self._tick = tick
        self._jobs: queue.Queue[Job | None] = queue.Queue(depth_max)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def offer(self, job: Job) -> bool:
        """Queue a job; return False, with nothing done, when the queue is full or closed."""
        if self._closing.is_set():
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Have the thread end after the running job; those that wait are dropped."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            # Wakes the thread; with a full queue it does not sleep.
            self._jobs.put_nowait(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end and return whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=TICK_S)
                if job is None:
                    return
                self._guarded(functools.partial(self._run, job))
            self._guarded(self._tick)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 -- the lane must go on for the jobs behind it.
            _LOG.error("copy lane failed", lane=self._thread.name, exception=error)
