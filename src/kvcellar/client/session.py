"""A live connection to one life of the server: requests out, replies in, straight from any thread.

The scheduler's thread of an engine calls this in every step, so there is no thread, queue or event
loop between the caller and the socket: a call sends, waits and reads by itself (about 20 µs). A
reply that comes late is never lost and never taken for another: every request has an id, and what
was granted by a reply that nobody waits for any more can be handed back. Made by `handshake`, kept
alive by `link`, used directly by tools.
"""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvcellar.clock import Clock
from kvcellar.errors import (
    KVCellarError,
    LimitError,
    MalformedError,
    PeerClosedError,
    TimeoutExpiredError,
    error_from_wire,
)
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.frames import FrameReader, decode_reply, encode
from kvcellar.protocol.messages import ErrorReply, Reply, Request, Welcome
from kvcellar.transport.deadline import Deadline

__all__ = ["PENDING_MAX", "Session"]

PENDING_MAX = 4_096
"""Requests that may be without a reply; a server so far behind gets no more of them."""

_NO_REQUEST_ID = 0
"""Of the server's refusal of bytes in which it found no request."""
_READ_BYTES = 262_144
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_POST_TIMEOUT_S = 0.01
_CLOSE_TIMEOUT_S = 0.5


class _Forgotten:
    """Marks a request whose reply nobody waits for."""

    __slots__ = ("on_late",)

    def __init__(self, on_late: Callable[[Reply], None] | None) -> None:
        self.on_late = on_late


class Session:
    """One connection, from `Welcome` to its end; thread-safe; of no use in a forked child.

    Attributes:
        welcome: what the server said at the start.
        boot_id: 16 bytes: this life of the server.
        arena: the mapped arena for a worker, else None. It belongs to whoever uses the session:
            closing the session does not unmap it, because copies may still run.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Welcome,
        *,
        arena: ArenaView | None,
        clock: Clock,
        timeout_max_s: float,
    ) -> None:
        """Take over a socket on which the handshake is complete.

        Args:
            sock: the connection; the session owns and closes it.
            welcome: the handshake's reply; its id is the last that was used.
            arena: for `arena`.
            clock: for deadlines.
            timeout_max_s: the longest that any call waits.
        """
        self.welcome = welcome
        self.boot_id = welcome.boot_id
        self.arena = arena
        self._sock = sock
        self._clock = clock
        self._timeout_max_s = timeout_max_s
        self._pid = os.getpid()
        self._reader = FrameReader()
        # One buffer for all reads: a new one of this size costs more than the whole round trip.
        self._incoming = memoryview(bytearray(_READ_BYTES))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._ready = select.poll()
        self._ready.register(sock, select.POLLIN | select.POLLOUT)
        # The I/O lock is held while its owner waits for the socket; the state lock never is.
        self._io = threading.Lock()
        self._state = threading.Lock()
        self._unsent = memoryview(b"")
        self._last_id = welcome.id
        self._pending: dict[int, _Forgotten | None] = {}
        self._kept: dict[int, Reply] = {}
        self._late: list[tuple[Callable[[Reply], None], Reply]] = []
        self._loss: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent, as far as is known."""
        return self._loss is None and os.getpid() == self._pid

    def call(
        self,
        make: Callable[[int], Request],
        *,
        timeout_s: float,
        record: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Send a request and return its reply.

        Blocks for at most `timeout_s`, which includes the wait for other threads' calls. A reply
        that comes after that is dropped; what it granted ends at the next heartbeat.

        Args:
            make: makes the request from its id; called at once, on this thread.
            timeout_s: cut to the client's `timeout_s`.
            record: is given the reply before it counts as seen, so that a heartbeat of another
                thread cannot give back what the reply granted before the caller has noted it.

        Raises:
            TimeoutExpiredError: no reply in time; the server may still act on the request.
            PeerClosedError: the connection is lost; the message says why.
            KVCellarError: the server's own refusal, as its class.
            LimitError: the request is larger than a frame may be; nothing was sent.
        """
        deadline = Deadline(self._clock, min(timeout_s, self._timeout_max_s))
        self._enter(deadline)
        try:
            request_id = self._send(make, deadline)
            is_here = self._wait_for(request_id, deadline)
        finally:
            self._io.release()
        self._hand_over_late()
        if not is_here:
            self.forget(request_id)
            raise TimeoutExpiredError(f"the server did not answer within {timeout_s:g} s")
        return self._deliver(request_id, record)

    def post(self, make: Callable[[int], Request], *, timeout_s: float = _POST_TIMEOUT_S) -> int:
        """Send a request and return its id, for `collect` or `forget`, one of which must follow.

        Blocks only while another thread's call or a full socket is in the way, for at most
        `timeout_s`.

        Raises:
            TimeoutExpiredError: it could not be sent; nothing was.
            PeerClosedError: the connection is lost; the message says why.
            LimitError: the request is larger than a frame may be; nothing was sent.
        """
        deadline = Deadline(self._clock, min(timeout_s, self._timeout_max_s))
        self._enter(deadline)
        try:
            request_id = self._send(make, deadline)
        finally:
            self._io.release()
        self._hand_over_late()
        return request_id

    def collect(
        self,
        request_id: int,
        *,
        timeout_s: float,
        record: Callable[[Reply], None] | None = None,
    ) -> Reply | None:
        """Return the reply to a posted request, or None when it has not come yet.

        Each reply is given once. Blocks for at most `timeout_s`; 0 reads what is there.

        Args:
            request_id: from `post`; not yet collected or forgotten.
            timeout_s: cut to the client's `timeout_s`.
            record: see `call`.

        Raises:
            PeerClosedError: the connection was lost before the reply came.
            KVCellarError: the server's refusal, as its class.
        """
        assert request_id in self._pending, f"request {request_id} has no reply to collect"
        deadline = Deadline(self._clock, min(timeout_s, self._timeout_max_s))
        if request_id not in self._kept:
            try:
                self._enter(deadline)
            except TimeoutExpiredError:
                # Whoever reads the socket instead may have read this reply too.
                pass
            else:
                try:
                    self._wait_for(request_id, deadline)
                finally:
                    self._io.release()
            self._hand_over_late()
            if request_id not in self._kept:
                return None
        return self._deliver(request_id, record)

    def forget(self, request_id: int, on_late: Callable[[Reply], None] | None = None) -> None:
        """Stop waiting for a reply; returns at once.

        Args:
            request_id: from `post`; not yet collected.
            on_late: is given the reply when it comes after all (now, if it is here already), on
                whichever thread reads it, with no lock held; it may post a release. What it
                cannot do because the connection ended is nothing to worry about: the server ends
                everything then. Without it the reply is dropped.
        """
        with self._state:
            reply = self._kept.pop(request_id, None)
            if reply is None:
                if request_id in self._pending:
                    self._pending[request_id] = _Forgotten(on_late)
                return
            del self._pending[request_id]
        if on_late is not None:
            with contextlib.suppress(KVCellarError):
                on_late(reply)

    def seen(self) -> int:
        """Return the highest request id such that this and all earlier replies were processed.

        Ask before gathering what is in use, never after: a reply that is recorded in between
        then counts as not yet seen.
        """
        with self._state:
            return next(iter(self._pending), self._last_id + 1) - 1

    def fileno(self) -> int:
        """Return the socket's descriptor, for `poll`; -1 after `close`."""
        return self._sock.fileno()

    def check_open(self) -> None:
        """Raise `PeerClosedError`, which says why, if the connection is known to be gone."""
        if self._loss is not None:
            raise PeerClosedError(f"the connection to the server is gone: {self._loss}")

    def drain(self) -> None:
        """Read what has come, without waiting, and notice the end of the connection."""
        if self._io.acquire(blocking=False):
            try:
                while self._loss is None and self._readable.poll(0):
                    self._read()
            finally:
                self._io.release()
            self._hand_over_late()

    def close(self) -> None:
        """End the connection; every thread that waits on it gets `PeerClosedError` at once.

        May be called twice and from any thread; blocks for at most half a second. In a forked
        child it only drops the child's descriptor and leaves the parent's connection alone.
        """
        if os.getpid() != self._pid:
            self._sock.close()
            return
        self._lose("it was closed on this side")
        if self._io.acquire(timeout=_CLOSE_TIMEOUT_S):
            try:
                self._sock.close()
            finally:
                self._io.release()

    def _enter(self, deadline: Deadline) -> None:
        """Take the I/O lock of an open session, or raise without it."""
        if os.getpid() != self._pid:
            raise PeerClosedError("this process is a fork of the one that is connected")
        # The lock is nearly always free, and then this form takes half the time.
        if self._io.acquire(blocking=False):
            return
        if not self._io.acquire(timeout=deadline.remaining_s()):
            raise TimeoutExpiredError("another thread's call to the server takes too long")

    def _send(self, make: Callable[[int], Request], deadline: Deadline) -> int:
        """Send the next request; when this returns it is on its way as a whole, or will be."""
        self.check_open()
        # Replies that nobody waits for stay in the socket until somebody reads.
        while len(self._pending) >= PENDING_MAX:
            if not self._progress(deadline):
                raise TimeoutExpiredError(f"the server owes {PENDING_MAX} replies")
            self.check_open()
        # A frame whose first part is out must be finished before another may begin.
        while self._unsent:
            if not self._progress(deadline):
                raise TimeoutExpiredError("the server takes no requests")
            self.check_open()
        request_id = self._last_id + 1
        message = make(request_id)
        assert message.id == request_id, (message, request_id)
        frame = encode(message)
        # Before the first byte is out, for the reply may come while the last ones still wait.
        with self._state:
            self._last_id = request_id
            self._pending[request_id] = None
        self._unsent = memoryview(frame)
        self._write()
        while len(self._unsent) == len(frame) and self._loss is None:
            if not self._progress(deadline):
                self._unsent = memoryview(b"")
                with self._state:
                    del self._pending[request_id]
                raise TimeoutExpiredError("the server takes no requests")
        self.check_open()
        return request_id

    def _wait_for(self, request_id: int, deadline: Deadline) -> bool:
        """Read until a reply is here; False at the deadline."""
        while request_id not in self._kept:
            self.check_open()
            if not self._progress(deadline):
                return False
        return True

    def _progress(self, deadline: Deadline) -> bool:
        """Wait for the socket, then read or write what it allows; False at the deadline."""
        poller = self._ready if self._unsent else self._readable
        events = poller.poll(deadline.remaining_ms())
        if not events:
            return False
        flags = events[0][1]
        if flags & select.POLLOUT and self._unsent:
            self._write()
        if flags & ~select.POLLOUT:
            self._read()
        return True

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent, _SEND_FLAGS)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection broke: {error}")
            return
        self._unsent = self._unsent[sent:]

    def _read(self) -> None:
        try:
            size_bytes = self._sock.recv_into(self._incoming, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection broke: {error}")
            return
        if not size_bytes:
            self._lose("the server closed it, or ended")
            return
        try:
            for body in self._reader.feed(self._incoming[:size_bytes]):
                reply = decode_reply(body)
                if isinstance(reply, ErrorReply) and reply.id == _NO_REQUEST_ID:
                    self._lose(f"the server ends it: {reply.message}")
                    return
                self._keep(reply)
        except (MalformedError, LimitError) as error:
            self._lose(f"the server sent what is no reply: {error}")

    def _keep(self, reply: Reply) -> None:
        with self._state:
            if reply.id not in self._pending or reply.id in self._kept:
                raise MalformedError(f"nobody asked for reply {reply.id}")
            forgotten = self._pending[reply.id]
            if forgotten is None:
                self._kept[reply.id] = reply
                return
            del self._pending[reply.id]
            if forgotten.on_late is not None:
                self._late.append((forgotten.on_late, reply))

    def _hand_over_late(self) -> None:
        """Give late replies to whom they concern; called without locks, for they may send."""
        while self._late:
            with self._state:
                late, self._late = self._late, []
            for on_late, reply in late:
                with contextlib.suppress(KVCellarError):
                    on_late(reply)

    def _deliver(self, request_id: int, record: Callable[[Reply], None] | None) -> Reply:
        with self._state:
            reply = self._kept.pop(request_id)
        try:
            if isinstance(reply, ErrorReply):
                raise error_from_wire(reply.code, reply.message)
            if record is not None:
                record(reply)
        finally:
            with self._state:
                del self._pending[request_id]
        return reply

    def _lose(self, reason: str) -> None:
        """Note the end of the connection and wake everyone who waits on it."""
        if self._loss is None:
            self._loss = reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
