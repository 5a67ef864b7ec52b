"""Send and receive file descriptors together with bytes over a Unix socket.

The client's pidfd and the arena's memfd travel this way. A descriptor that arrived is a resource
that nobody else closes, so every way out of here either hands it to the caller or closes it. Used
by the handshake on both sides: the client blocks until a deadline, the server takes the raw
non-blocking piece.
"""

import array
import contextlib
import os
import select
import socket
from collections.abc import Iterable, Sequence

from kvcellar.errors import LimitError, MalformedError, PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.frames import LENGTH_BYTES
from kvcellar.protocol.limits import FRAME_MAX_BYTES
from kvcellar.transport.deadline import Deadline

__all__ = ["FDS_MAX", "close_fds", "recv_fds", "recv_frame_with_fds", "send_with_fds"]

FDS_MAX = 4
"""Descriptors that one read accepts; the protocol sends one."""

_INT_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * _INT_BYTES)
_PIECE_BYTES = 65_536


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors; one that is closed already is no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send all of `data`; the descriptors travel with its first byte.

    The caller keeps its descriptors (the receiver gets duplicates). Blocks as `sock` does; on a
    non-blocking socket `data` must fit into the socket's buffer, which a handshake's first
    message always does.

    Raises:
        PeerClosedError: the peer is gone, or does not take the bytes in time.
    """
    assert data, "descriptors need a byte to travel with"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        if sent < len(data):
            sock.sendall(memoryview(data)[sent:], socket.MSG_NOSIGNAL)
    except OSError as error:
        raise PeerClosedError(f"the peer does not take a message: {error}") from error


def recv_fds(sock: socket.socket, size_max: int, *, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive what there is, up to `size_max` bytes, and the descriptors that came with it.

    The caller owns the descriptors, which are closed on exec. Empty bytes mean that the peer
    closed. Blocks as `sock` does.

    Raises:
        BlockingIOError: nothing is there yet (non-blocking sockets).
        PeerClosedError: the connection broke.
        MalformedError: more than `FDS_MAX` descriptors came; all are closed.
    """
    try:
        data, ancillary, message_flags, _ = sock.recvmsg(
            size_max, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise PeerClosedError(f"the connection broke: {error}") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
    if message_flags & socket.MSG_CTRUNC or len(fds) > FDS_MAX:
        close_fds(fds)
        raise MalformedError(f"the peer sent more than {FDS_MAX} descriptors with one message")
    return data, fds.tolist()


def recv_frame_with_fds(sock: socket.socket, *, deadline: Deadline) -> tuple[bytes, list[int]]:
    """Receive exactly one frame and the descriptors that came with it.

    Reads not a byte beyond the frame. The caller owns the descriptors; on every error all that
    arrived are closed. Blocks until `deadline`, whatever the socket's own mode is.

    Returns:
        The frame's body, and the descriptors in the order in which they were sent.

    Raises:
        TimeoutExpiredError: the frame was not complete at the deadline.
        PeerClosedError: the peer closed or the connection broke.
        LimitError: the frame announces more than `FRAME_MAX_BYTES`.
        MalformedError: more than `FDS_MAX` descriptors came.
    """
    fds: list[int] = []
    complete = False
    try:
        head = _recv_exactly(sock, LENGTH_BYTES, fds, deadline)
        length = int.from_bytes(head, "little")
        if length > FRAME_MAX_BYTES:
            raise LimitError(f"a frame announces {length} bytes, over {FRAME_MAX_BYTES}")
        body = _recv_exactly(sock, length, fds, deadline)
        complete = True
        return body, fds
    finally:
        if not complete:
            close_fds(fds)


def _recv_exactly(
    sock: socket.socket, size_bytes: int, fds: list[int], deadline: Deadline
) -> bytes:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    received = bytearray()
    while len(received) < size_bytes:
        if not poller.poll(deadline.remaining_ms()):
            raise TimeoutExpiredError("the peer's message did not arrive in time")
        try:
            data, more = recv_fds(
                sock,
                min(size_bytes - len(received), _PIECE_BYTES),
                flags=socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            continue
        fds += more
        if not data:
            raise PeerClosedError("the peer closed the connection")
        if len(fds) > FDS_MAX:
            raise MalformedError(f"the peer sent more than {FDS_MAX} descriptors with one frame")
        received += data
    return bytes(received)
