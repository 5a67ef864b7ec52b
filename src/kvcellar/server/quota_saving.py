"""Quotas on their way into `--quota-file`: written by a thread, so that no lookup waits for a disk.

One write at a time; changes that come meanwhile are written together by the next one. Whoever
changed something is told when it lies on the disk, or why it does not. Used by `quotas`.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping

from kvcellar.config.quota_file import SavedQuota, write_quota_file
from kvcellar.telemetry.logs import EventLog

__all__ = ["QuotaSaving"]

OnSaved = Callable[[str], None]

_log = EventLog("kvcellar.server")


class QuotaSaving:
    """Writes the file of one server."""

    def __init__(self, path: str) -> None:
        """Prepare.

        Args:
            path: of the file; nobody else writes it.
        """
        self._path = path
        self._next: tuple[dict[str, SavedQuota], list[OnSaved]] | None = None
        self._is_writing = False

    def save(self, quotas: Mapping[str, SavedQuota], on_saved: OnSaved) -> None:
        """Write all quotas.

        Args:
            quotas: by salt.
            on_saved: called later on the loop, with why they could not be written, or with "".
        """
        waiting = [] if self._next is None else self._next[1]
        self._next = dict(quotas), [*waiting, on_saved]
        self._go_on()

    def _go_on(self) -> None:
        if self._is_writing or self._next is None:
            return
        (quotas, waiting), self._next = self._next, None
        self._is_writing = True
        loop = asyncio.get_running_loop()

        def write() -> None:
            failure = ""
            try:
                write_quota_file(self._path, quotas)
            except OSError as error:
                failure = error.strerror or str(error)
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._written, waiting, failure)

        # Not an executor's: a disk that hangs must not hold up the server's end.
        threading.Thread(target=write, name="quota-file", daemon=True).start()

    def _written(self, waiting: list[OnSaved], failure: str) -> None:
        if failure:
            _log.error("quotas not saved", file=self._path, reason=failure)
        self._is_writing = False
        for on_saved in waiting:
            on_saved(failure)
        self._go_on()
