"""One welcomed connection: bytes in, requests answered in order, bytes out.

An `asyncio.Protocol`, since streams and tasks cost a lookup more than the store does. A peer that
sends what is no message gets an error reply, if one can still be sent, and loses its connection;
nobody else notices. A peer that sends faster than it is served is read no further (its own socket
fills), and one that does not read its replies is disconnected.
"""

import asyncio
from collections.abc import Callable, Iterator

from kvcellar.errors import FatalError, LimitError, MalformedError
from kvcellar.protocol.frames import FrameReader, decode_request, encode
from kvcellar.protocol.messages import ErrorReply, Goodbye, Reply
from kvcellar.server.bounds import OUTGOING_MAX_BYTES, REQUESTS_PER_TURN
from kvcellar.server.instances import Client
from kvcellar.server.requests import Requests
from kvcellar.server.strangers import request_id_of
from kvcellar.telemetry.logs import EventLog

__all__ = ["Session"]

_log = EventLog("kvcellar.server")


class Session(asyncio.Protocol):
    """Serves one client over one connection."""

    client: Client
    """Who is at the other end; set before the first byte is read."""

    def __init__(self, requests: Requests, *, on_lost: Callable[["Session"], None]) -> None:
        """Prepare.

        Args:
            requests: answers.
            on_lost: called once, when the connection has ended for whatever reason.
        """
        self._requests = requests
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._bodies: Iterator[bytes] | None = None
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport; asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_closing:
            transport.abort()

    def close(self) -> None:
        """End the connection at once; what was not sent yet is lost."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def push(self, reply: Reply) -> None:
        """Send a reply that could not be given when its request came; lost if it has ended."""
        if self._is_closing or self._transport is None:
            return
        self._transport.write(self._encoded(reply))
        self._drop_who_does_not_read(self._transport)

    def data_received(self, data: bytes) -> None:
        """Answer what arrived; asyncio calls it."""
        if self._is_closing:
            return
        assert self._bodies is None, "read while a turn is being continued"
        self._serve(self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that the connection has ended; asyncio calls it."""
        self._is_closing = True
        self._transport = None
        self._bodies = None
        self._on_lost(self)

    def _serve(self, bodies: Iterator[bytes]) -> None:
        transport = self._transport
        assert transport is not None
        replies: list[bytes] = []
        is_over = False
        try:
            for body in bodies:
                replies.append(self._answer(body))
                if self._is_closing or len(replies) == REQUESTS_PER_TURN:
                    break
            else:
                is_over = True
        except LimitError as error:
            replies.append(self._refuse(error, 0))
        if replies:
            transport.write(b"".join(replies))
        if self._is_closing:
            transport.close()
        elif not self._drop_who_does_not_read(transport) and not is_over:
            self._pause(transport, bodies)

    def _drop_who_does_not_read(self, transport: asyncio.Transport) -> bool:
        if transport.get_write_buffer_size() <= OUTGOING_MAX_BYTES:
            return False
        _log.warning("client does not read", pid=self.client.hello.pid)
        self.close()
        return True

    def _pause(self, transport: asyncio.Transport, bodies: Iterator[bytes]) -> None:
        """Let the others have a turn before this peer's next requests."""
        self._bodies = bodies
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        bodies, self._bodies = self._bodies, None
        if self._is_closing or bodies is None:
            return
        assert self._transport is not None
        self._transport.resume_reading()
        self._serve(bodies)

    def _answer(self, body: bytes) -> bytes:
        try:
            request = decode_request(body)
        except MalformedError as error:
            return self._refuse(error, request_id_of(body))
        try:
            reply = self._requests.answer(self.client, request)
        except MalformedError as error:
            return self._refuse(error, request.id)
        if isinstance(request, Goodbye):
            self._is_closing = True
        # A reply that comes later is pushed then.
        return self._encoded(reply) if reply is not None else b""

    def _encoded(self, reply: Reply) -> bytes:
        try:
            return encode(reply)
        except LimitError as error:
            return encode(ErrorReply(reply.id, error.code, f"the reply is too large: {error}"))

    def _refuse(self, error: FatalError, request_id: int) -> bytes:
        self._is_closing = True
        self._requests.count_refusal(error)
        _log.warning(
            "peer sent what is no message",
            pid=self.client.hello.pid,
            role=self.client.hello.role,
            reason=str(error),
        )
        return encode(ErrorReply(request_id, error.code, str(error)))
