"""The tier process: its entry, its threads, and how it ends with its parent.

Started by the server with one end of a socket pair and the arena's descriptor. Finding has threads
of its own, so that no lookup waits behind a read; there is one thread for what changes a tier, so
that a wipe comes after the writes that were asked for before it. A fault of ours ends the process:
its parent frees whatever it held, exactly, and starts another.
"""

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvcellar.clock import SystemClock
from kvcellar.errors import KVCellarError
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.frames import FrameReader, encode
from kvcellar.protocol.tier_messages import (
    Configure,
    Delete,
    Find,
    Read,
    Ready,
    Refused,
    Report,
    SetQuotas,
    TierAnswer,
    TierFacts,
    TierNews,
    TierQuestion,
    Touch,
    Wipe,
    Write,
    decode_question,
)
from kvcellar.telemetry.logs import EventLog, setup_logging
from kvcellar.tiers.adapters import read_adapter
from kvcellar.tiers.jobs import Jobs
from kvcellar.tiers.registry import open_tier
from kvcellar.tiers.wrappers import Metered

__all__ = ["main"]

REPORT_S = 0.5
FINDERS = 2
READERS = 16
"""More than most tiers profit from, so that a slow one does not keep the others waiting."""

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 18

_log = EventLog("kvcellar.tiers")


def main(line_fd: int, arena_fd: int, log_level: str) -> None:
    """Serve until the control process ends.

    Args:
        line_fd: socket to the control process; owned from here on.
        arena_fd: the arena's file; owned from here on.
        log_level: see `setup_logging`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    setup_logging(log_level)
    _TierProcess(socket.socket(fileno=line_fd), arena_fd).run()


class _TierProcess:
    def __init__(self, line: socket.socket, arena_fd: int) -> None:
        self._line = line
        self._arena_fd = arena_fd
        self._sending = threading.Lock()
        self._finders = ThreadPoolExecutor(FINDERS, "find")
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._changers = ThreadPoolExecutor(1, "change")
        self._jobs: Jobs | None = None
        self._facts: Callable[[], tuple[TierFacts, ...]] = tuple

    def run(self) -> None:
        """Read questions until the line ends, which is the control process's end."""
        reader = FrameReader()
        while data := self._line.recv(_RECEIVE_BYTES):
            for body in reader.feed(data):
                self._take(decode_question(body))
        # Not an orderly end: there is nobody left to answer.
        os._exit(0)

    def _take(self, question: TierQuestion) -> None:
        if isinstance(question, Configure):
            self._send(self._configure(question))
            return
        jobs = self._jobs
        assert jobs is not None, question
        match question:
            case Find():
                self._finders.submit(self._answer, lambda: jobs.find(question))
            case Touch():
                self._finders.submit(self._answer, lambda: jobs.touch(question))
            case Read():
                self._readers.submit(self._answer, lambda: jobs.read(question))
            case Write():
                self._changers.submit(self._answer, lambda: jobs.write(question))
            case Delete():
                self._changers.submit(self._answer, lambda: jobs.delete(question))
            case SetQuotas():
                self._changers.submit(self._answer, lambda: jobs.set_quotas(question))
            case Wipe():
                self._changers.submit(self._answer, lambda: jobs.wipe(question))

    def _configure(self, question: Configure) -> Ready | Refused:
        try:
            view = ArenaView(self._arena_fd, question.arena_bytes)
            adapters = [
                read_adapter(text, position=position)
                for position, text in enumerate(question.adapters)
            ]
            clock = SystemClock()
            tiers = [open_tier(adapter, clock) for adapter in adapters]
        except KVCellarError as error:
            return Refused(question.id, error.code, str(error))
        self._jobs = jobs = Jobs(tiers, view.view, clock)
        self._facts = lambda: tuple(
            _facts(adapter.kind, tier, jobs.limited)
            for adapter, tier in zip(adapters, tiers, strict=True)
        )
        threading.Thread(target=self._report, name="report", daemon=True).start()
        return Ready(question.id, self._facts())

    def _answer(self, job: Callable[[], TierAnswer]) -> None:
        try:
            self._send(job())
        except Exception as error:  # noqa: BLE001 - the process ends here, its parent goes on.
            _log.error("internal error", exception=error)
            os._exit(1)

    def _report(self) -> None:
        pause = threading.Event()
        while not pause.wait(REPORT_S):
            self._send(Report(0, self._facts()))

    def _send(self, news: TierNews) -> None:
        """Send as a whole; blocks while the control process does not read."""
        frame = encode(news)
        try:
            with self._sending:
                self._line.sendall(frame)
        except OSError:
            os._exit(0)


def _facts(kind: str, tier: Metered, limited: frozenset[str]) -> TierFacts:
    capabilities, usage, counts = tier.capabilities, tier.usage(), tier.statistics()
    return TierFacts(
        name=capabilities.name,
        kind=kind,
        is_persistent=capabilities.is_persistent,
        trouble=tier.trouble,
        is_complete=usage.is_complete,
        batch_max=capabilities.batch_max,
        used_bytes=usage.used_bytes,
        cap_bytes=usage.cap_bytes,
        chunks=usage.chunks,
        evicted=usage.evicted,
        damaged=usage.damaged,
        lookups=counts.lookups,
        asked_chunks=counts.asked_chunks,
        found_chunks=counts.found_chunks,
        read_chunks=counts.read_chunks,
        read_bytes=counts.read_bytes,
        read_s=counts.read_s.sum_s,
        written_chunks=counts.written_chunks,
        written_bytes=counts.written_bytes,
        write_s=counts.write_s.sum_s,
        full_chunks=counts.full_chunks,
        failures=int(counts.failures),
        tenant_bytes={name: size for name, size in usage.tenant_bytes.items() if name in limited},
    )
