"""The HTTP process's line to the control process: requests out, replies matched by id.

The line is an inherited socket pair that speaks the node's own protocol as a tool that has said
hello. Its end is the control process's end: then nobody is left to serve for, and `on_close` is
called. Made by `process`, used by `pages`.
"""

import asyncio
import socket
from collections.abc import Callable

from kvcellar.errors import PeerClosedError, TimeoutExpiredError, error_from_wire
from kvcellar.protocol.frames import FrameReader, decode_reply, encode
from kvcellar.protocol.messages import ErrorReply, Reply, Request

__all__ = ["ControlLine"]

PENDING_MAX = 256


class ControlLine(asyncio.Protocol):
    """One connection to the control loop, for any number of pages at once."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._reader = FrameReader()
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._transport: asyncio.Transport | None = None
        self._last_id = 0

    @classmethod
    async def open(cls, sock: socket.socket, on_close: Callable[[], None]) -> "ControlLine":
        """Take over a connected socket; the line owns it."""
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: cls(on_close), sock=sock)
        return line

    async def call(self, make: Callable[[int], Request], *, timeout_s: float) -> Reply:
        """Send the request that `make` builds for an id, and return its reply.

        Raises:
            TimeoutExpiredError: the control loop did not answer in time, or has too many
                questions open.
            PeerClosedError: the control process is gone.
            KVCellarError: what the control process answered.
        """
        if self._transport is None or self._transport.is_closing():
            raise PeerClosedError("the control process is gone")
        if len(self._pending) >= PENDING_MAX:
            raise TimeoutExpiredError(f"{PENDING_MAX} questions to the control loop are open")
        self._last_id += 1
        request_id = self._last_id
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answer
        try:
            self._transport.write(encode(make(request_id)))
            reply = await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise TimeoutExpiredError(
                f"the control loop did not answer within {timeout_s:g} s"
            ) from None
        finally:
            del self._pending[request_id]
        if isinstance(reply, ErrorReply):
            raise error_from_wire(reply.code, reply.message)
        return reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport; asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand each reply to whoever waits; a late one has nobody and is dropped."""
        for body in self._reader.feed(data):
            reply = decode_reply(body)
            answer = self._pending.get(reply.id)
            if answer is not None and not answer.done():
                answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everyone who waits, then say that the line has ended."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(PeerClosedError(f"the control process is gone: {exc}"))
        self._on_close()
