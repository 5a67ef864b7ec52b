"""One connection on the Unix socket, from its first byte to its welcome.

It runs on the raw socket, because the client's pidfd comes with the hello and the arena's
descriptor goes with the welcome, and asyncio's transports carry neither. What is read is bounded
in bytes and time; every way out closes every descriptor that came.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvcellar.errors import (
    KVCellarError,
    LimitError,
    MalformedError,
    PeerClosedError,
)
from kvcellar.protocol.frames import LENGTH_BYTES, PREAMBLE, decode_request, encode
from kvcellar.protocol.limits import HELLO_TIMEOUT_S
from kvcellar.protocol.messages import ErrorReply, Hello
from kvcellar.server.bounds import HELLO_MAX_BYTES
from kvcellar.server.strangers import FOREIGN_BYTES, Strangers, raise_if_other_version
from kvcellar.transport.credentials import Credentials
from kvcellar.transport.descriptors import FDS_MAX, close_fds, recv_fds, send_with_fds

__all__ = ["Arrival"]

_READ_BYTES = 65_536


class Arrival:
    """A connection that has not said hello yet. Owns its socket until `on_hello` takes it."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        strangers: Strangers,
        *,
        on_hello: Callable[["Arrival", Hello, list[int]], None],
        on_end: Callable[["Arrival"], None],
    ) -> None:
        """Begin to listen to it.

        Args:
            sock: connected and non-blocking.
            credentials: of its peer.
            strangers: notes it if it is refused.
            on_hello: called with the hello and the descriptors that came with it; the ones that
                it leaves in the list are closed. It may raise KVCellarError to refuse.
            on_end: called once when the arrival is over, however.
        """
        self.sock = sock
        self.credentials = credentials
        self._strangers = strangers
        self._on_hello = on_hello
        self._on_end = on_end
        self._received = bytearray()
        self._fds: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._deadline = self._loop.call_later(HELLO_TIMEOUT_S, self._too_late)

    @property
    def peer(self) -> str:
        """Return who it is, for the log."""
        return f"pid {self.credentials.pid} uid {self.credentials.uid}"

    def crowd_out(self) -> None:
        """Give its place to a newer connection."""
        self._strangers.crowded_out(peer=self.peer)
        self.end(close=True)

    def end(self, *, close: bool) -> None:
        """Stop listening to it; close its socket, unless somebody has taken it."""
        self._deadline.cancel()
        self._loop.remove_reader(self.sock)
        close_fds(self._fds)
        self._fds = []
        if close:
            self.sock.close()
        self._on_end(self)

    def welcome(self, frame: bytes, fds: list[int]) -> None:
        """Send the server's first message, with descriptors.

        Raises:
            PeerClosedError: the peer is gone.
        """
        send_with_fds(self.sock, frame, fds)

    def _too_late(self) -> None:
        self._strangers.silent(peer=self.peer)
        self.end(close=True)

    def _readable(self) -> None:
        try:
            body = self._read()
            if body is None:
                return
            self._hello(body)
        except PeerClosedError:
            self._strangers.left()
            self.end(close=True)
        except KVCellarError as error:
            self._refuse(error)

    def _read(self) -> bytes | None:
        """Read on; return the first frame's body when it is whole."""
        try:
            data, fds = recv_fds(self.sock, _READ_BYTES)
        except BlockingIOError:
            return None
        self._fds += fds
        if not data:
            raise PeerClosedError("the peer left without a hello")
        if len(self._fds) > FDS_MAX:
            raise MalformedError(f"more than {FDS_MAX} descriptors came with a hello")
        self._received += data
        head = bytes(self._received[: len(PREAMBLE)])
        if not PREAMBLE.startswith(head):
            if len(head) >= FOREIGN_BYTES:
                self._strangers.foreign(head, peer=self.peer)
                self.end(close=True)
            return None
        return self._frame()

    def _frame(self) -> bytes | None:
        start = len(PREAMBLE) + LENGTH_BYTES
        if len(self._received) < start:
            return None
        length = int.from_bytes(self._received[len(PREAMBLE) : start], "little")
        if length > HELLO_MAX_BYTES:
            raise LimitError(f"a hello of {length} bytes exceeds {HELLO_MAX_BYTES} bytes")
        if len(self._received) > start + length:
            raise MalformedError("something was sent between hello and welcome")
        return bytes(self._received[start:]) if len(self._received) == start + length else None

    def _hello(self, body: bytes) -> None:
        try:
            request = decode_request(body)
        except MalformedError:
            raise_if_other_version(body)
            raise
        if not isinstance(request, Hello):
            raise MalformedError("the first message on the Unix socket must be a hello")
        try:
            self._on_hello(self, request, self._fds)
        except PeerClosedError:
            raise
        except KVCellarError as error:
            self._refuse(error, request.id)

    def _refuse(self, error: KVCellarError, request_id: int = 0) -> None:
        self._strangers.refused(error, peer=self.peer)
        with contextlib.suppress(PeerClosedError):
            self.welcome(encode(ErrorReply(request_id, error.code, str(error))), [])
        self.end(close=True)
