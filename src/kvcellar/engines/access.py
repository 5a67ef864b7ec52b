"""Whether copies may touch the engine's pages: an engine that sleeps gives their memory away.

A copy thread that reads or writes memory which is not mapped any more ends the process on a CPU
and the device's context on a GPU. So each copy asks here for every batch, and the step's thread
closes the pages before they go: it waits for the batch that is under way, and what comes after
ends as a copy that failed. Used by the worker half.
"""

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["PageAccess"]


class PageAccess:
    """Open until it is closed, and again after it is opened; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._users = 0

    @contextlib.contextmanager
    def using(self) -> Iterator[bool]:
        """Say whether the pages may be touched inside of the block; they stay there as long."""
        with self._changed:
            is_open = self._is_open
            self._users += is_open
        try:
            yield is_open
        finally:
            with self._changed:
                self._users -= is_open
                self._changed.notify_all()

    def close(self, *, timeout_s: float) -> bool:
        """Let nobody begin, wait for those who use the pages, and return whether all have left.

        Idempotent. Blocks for at most `timeout_s`.
        """
        with self._changed:
            self._is_open = False
            return self._changed.wait_for(lambda: self._users == 0, timeout_s)

    def open(self) -> None:
        """Let the pages be used again; idempotent."""
        with self._changed:
            self._is_open = True
