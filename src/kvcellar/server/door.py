"""The TCP door: the address that users know, where a client learns the Unix socket's.

One question, one answer, closed. Whoever asks for more over TCP is told how to come by the Unix
socket; whoever speaks another protocol is explained in the log. Nothing else can be done through
it, so it may face a network.
"""

import asyncio
import socket

from kvcellar.errors import KVCellarError, LimitError, MalformedError, NotLocalError
from kvcellar.protocol.frames import (
    LENGTH_BYTES,
    PREAMBLE,
    FrameReader,
    decode_request,
    encode,
)
from kvcellar.protocol.limits import HELLO_TIMEOUT_S
from kvcellar.protocol.messages import PROTOCOL_VERSION, ErrorReply, Hello, Locate, Located, Reply
from kvcellar.server.bounds import ARRIVALS_MAX, HELLO_MAX_BYTES
from kvcellar.server.node import Node, check_version
from kvcellar.server.strangers import FOREIGN_BYTES, Strangers, raise_if_other_version

__all__ = ["Door", "fix_for_address"]


def fix_for_address(address: str) -> str:
    """Return what to do where the Unix socket at `address` cannot be reached."""
    if address.startswith("@"):
        return (
            "the engine must share this host and its network namespace; otherwise start the "
            "server with --socket-dir DIR and mount DIR into the engine's container"
        )
    folder = address.rpartition("/")[0]
    return f"the engine must run on this host: mount {folder} into its container at the same path"


class Door:
    """Listens on TCP and answers `Locate`."""

    def __init__(self, node: Node, strangers: Strangers) -> None:
        self._node = node
        self._strangers = strangers
        self._servers: list[asyncio.Server] = []
        self._callers: dict[_Caller, None] = {}

    async def open(self, listeners: list[socket.socket]) -> None:
        """Begin to accept on listening sockets; the door owns them."""
        loop = asyncio.get_running_loop()
        for sock in listeners:
            self._servers.append(await loop.create_server(self._caller, sock=sock))

    def check(self) -> str:
        """Return what is wrong with the door, empty text where nothing is."""
        is_open = self._servers and all(server.is_serving() for server in self._servers)
        return "" if is_open else "the TCP port is closed"

    def close(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        for caller in list(self._callers):
            caller.end()

    def _caller(self) -> "_Caller":
        if len(self._callers) >= ARRIVALS_MAX:
            next(iter(self._callers)).crowd_out()
        caller = _Caller(self._node, self._strangers, self._callers)
        self._callers[caller] = None
        return caller


class _Caller(asyncio.Protocol):
    """One connection at the door."""

    def __init__(self, node: Node, strangers: Strangers, callers: dict["_Caller", None]) -> None:
        self._node = node
        self._strangers = strangers
        self._callers = callers
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HELLO_TIMEOUT_S, self._too_late)

    @property
    def peer(self) -> str:
        """Return who it is, for the log."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{name[0]}:{name[1]}" if name else "unknown"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_over:
            self._strangers.left()
        self._forget()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._received += data
        head = bytes(self._received[: len(PREAMBLE)])
        if not PREAMBLE.startswith(head):
            if len(head) >= FOREIGN_BYTES:
                self._strangers.foreign(head, peer=self.peer)
                self.end()
            return
        try:
            body = self._frame()
            if body is not None:
                self._finish(self._answer(body))
        except KVCellarError as error:
            self._strangers.refused(error, peer=self.peer)
            self._finish(ErrorReply(0, error.code, str(error)))

    def crowd_out(self) -> None:
        """Give its place to a newer connection."""
        self._strangers.crowded_out(peer=self.peer)
        self.end()

    def end(self) -> None:
        """Close at once."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        self._is_over = True
        self._deadline.cancel()
        self._callers.pop(self, None)

    def _too_late(self) -> None:
        self._strangers.silent(peer=self.peer)
        self.end()

    def _finish(self, reply: Reply) -> None:
        """Send the one reply and close after it."""
        assert self._transport is not None
        self._forget()
        self._transport.write(encode(reply))
        self._transport.close()

    def _frame(self) -> bytes | None:
        if len(self._received) > HELLO_MAX_BYTES + len(PREAMBLE) + LENGTH_BYTES:
            raise LimitError(f"a question over TCP exceeds {HELLO_MAX_BYTES} bytes")
        return next(FrameReader().feed(bytes(self._received[len(PREAMBLE) :])), None)

    def _answer(self, body: bytes) -> Reply:
        try:
            request = decode_request(body)
        except MalformedError:
            raise_if_other_version(body)
            raise
        address = self._node.address
        if isinstance(request, Hello):
            raise NotLocalError(
                f"a hello must come over the server's Unix socket {address}: "
                f"{fix_for_address(address)}"
            )
        if not isinstance(request, Locate):
            raise MalformedError("over TCP only `locate` is answered")
        check_version(request.protocol_version)
        return Located(
            request.id,
            address=address,
            boot_id=self._node.boot_id,
            protocol_version=PROTOCOL_VERSION,
            fix=fix_for_address(address),
        )
