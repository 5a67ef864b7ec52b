"""Lets writes wait for reads: somebody waits for a read, nobody for a write.

The file-system tier counts its reads here; a write looks before each chunk.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcellar.transport.deadline import Deadline

__all__ = ["Traffic"]

# Under reads without end a write still gets its turn, four times a second for each thread.
_PATIENCE_S = 0.25


class Traffic:
    """Counts the reads on their way; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reads = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold writes back meanwhile."""
        with self._changed:
            self._reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._reads -= 1
                if not self._reads:
                    self._changed.notify_all()

    def wait_for_quiet(self, deadline: Deadline) -> None:
        """Wait until no read is on its way, for a quarter of a second at most."""
        with self._changed:
            timeout_s = min(_PATIENCE_S, deadline.remaining_s())
            self._changed.wait_for(lambda: not self._reads, timeout_s)
