"""What the copy threads have finished and vLLM has not asked for yet.

vLLM wants to know of each load exactly once, in the same step with the blocks that it spoiled, and
the scheduler half wants every job's result. The copy threads put them here; the step's thread
takes them. Part of the worker half.
"""

import threading
from collections.abc import Iterable

from kvcellar.engines.vllm.metadata import JobResult

__all__ = ["Outcomes"]


class Outcomes:
    """Results on their way to vLLM; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: list[tuple[str, frozenset[int] | None]] = []
        self._results: dict[int, JobResult] = {}
        # Touched by the step's thread alone.
        self._spoiled: set[int] = set()
        self._failed: set[str] = set()

    def add_load(
        self, job_id: int, request_id: str, *, spoiled: Iterable[int] | None, result: JobResult
    ) -> None:
        """Note the end of a load and the blocks that do not hold what they should; None: all."""
        blocks = None if spoiled is None else frozenset(spoiled)
        with self._lock:
            self._received.append((request_id, blocks))
            self._results[job_id] = result

    def add_store(self, job_id: int, result: JobResult) -> None:
        """Note that a store no longer reads the engine's blocks."""
        with self._lock:
            self._results[job_id] = result

    def take_received(self) -> set[str]:
        """Return the requests whose loads ended since the last call."""
        with self._lock:
            received, self._received = self._received, []
        for request_id, spoiled in received:
            if spoiled is None:
                self._failed.add(request_id)
            else:
                self._spoiled |= spoiled
        return {request_id for request_id, _ in received}

    def take_failed(self) -> set[str]:
        """Return those of the requests that `take_received` gave whose loads failed as a whole."""
        failed, self._failed = self._failed, set()
        return failed

    def take_spoiled(self) -> set[int]:
        """Return the blocks spoiled by the loads that `take_received` gave since the last call."""
        spoiled, self._spoiled = self._spoiled, set()
        return spoiled

    def take_results(self) -> dict[int, JobResult]:
        """Return the results since the last call, by job id."""
        with self._lock:
            results, self._results = self._results, {}
        return results
