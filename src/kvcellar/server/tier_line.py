"""The control loop's line to the tier process: questions out, answers matched by id.

An `asyncio.Protocol`, so that nothing here ever waits: a question that finds the line full, or the
tier process silent, is not asked, and whoever wanted to ask goes on without. Each question gets
exactly one answer or `None`, which means that none will come. Made by `tiers` for each life of the
process.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvcellar.errors import LimitError, MalformedError
from kvcellar.protocol.frames import FrameReader, encode
from kvcellar.protocol.tier_messages import (
    Report,
    TierAnswer,
    TierNews,
    TierQuestion,
    decode_news,
)
from kvcellar.telemetry.logs import EventLog
from kvcellar.units import MIB

__all__ = ["TierAsker", "TierLine"]

BACKLOG_MAX_BYTES = 8 * MIB
"""Questions that the tier process has not read yet; more are not asked."""

_log = EventLog("kvcellar.server")

OnAnswer = Callable[[TierAnswer | None], None]


class TierAsker(Protocol):
    """Whoever passes questions on to the tier process.

    Attributes:
        batch_max: chunks that one question may carry.
    """

    @property
    def batch_max(self) -> int:
        """See the class."""
        ...

    def ask(self, make: Callable[[int], TierQuestion], on_answer: OnAnswer) -> bool:
        """Ask; see `TierLine.ask`."""
        ...


class TierLine(asyncio.Protocol):
    """One connection to one life of the tier process."""

    def __init__(self, *, on_report: Callable[[Report], None], on_lost: Callable[[], None]) -> None:
        """Prepare.

        Args:
            on_report: is given what the process reports unasked.
            on_lost: called once, when the line has ended for whatever reason; every question has
                had its answer or `None` then.
        """
        self._on_report = on_report
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, OnAnswer] = {}
        self._last_id = 0

    def ask(self, make: Callable[[int], TierQuestion], on_answer: OnAnswer) -> bool:
        """Send a question, or return False where it cannot be sent now.

        Args:
            make: makes it from its id.
            on_answer: called once, later, on the loop, with the answer or with `None`.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > BACKLOG_MAX_BYTES:
            return False
        self._last_id += 1
        try:
            frame = encode(make(self._last_id))
        except LimitError as error:
            _log.warning("question to the tiers is too large", reason=str(error))
            return False
        self._waiting[self._last_id] = on_answer
        transport.write(frame)
        return True

    def close(self) -> None:
        """End the line at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport; asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand each answer to whoever asked; asyncio calls it."""
        try:
            for body in self._reader.feed(data):
                self._take(decode_news(body))
        except (LimitError, MalformedError) as error:
            _log.error("tier process sent what is no message", reason=str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everyone who waits that nothing comes any more; asyncio calls it."""
        self._transport = None
        waiting, self._waiting = self._waiting, {}
        for on_answer in waiting.values():
            on_answer(None)
        self._on_lost()

    def _take(self, news: TierNews) -> None:
        if isinstance(news, Report):
            self._on_report(news)
            return
        on_answer = self._waiting.pop(news.id, None)
        if on_answer is None:
            raise MalformedError(f"nobody asked for answer {news.id}")
        on_answer(news)
