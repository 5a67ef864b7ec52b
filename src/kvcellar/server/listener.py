"""The Unix socket: accept, check who it is, welcome, and hand over to a session.

Accepting is raw and bounded: arrivals that have not said hello have a limited number of places,
and a newer one takes the place of the one that waits longest, so that a crowd of silent
connections never keeps a client out. Out of descriptors, accepting pauses for a moment.
"""

import asyncio
import socket
from collections.abc import Callable

from kvcellar.errors import MismatchError, PeerClosedError
from kvcellar.protocol.frames import encode
from kvcellar.protocol.messages import Hello, Role
from kvcellar.server.bounds import ARRIVALS_MAX
from kvcellar.server.deaths import pidfd_of_peer
from kvcellar.server.handshake import Arrival
from kvcellar.server.instances import Client
from kvcellar.server.node import Node
from kvcellar.server.requests import Requests
from kvcellar.server.session import Session
from kvcellar.server.strangers import Strangers
from kvcellar.telemetry.logs import EventLog
from kvcellar.transport.credentials import peer_credentials

__all__ = ["UnixListener"]

_ACCEPTS_PER_TURN = 32
_PAUSE_S = 0.1

_log = EventLog("kvcellar.server")


class UnixListener:
    """Accepts clients on a listening Unix socket."""

    def __init__(
        self,
        sock: socket.socket,
        node: Node,
        strangers: Strangers,
        *,
        arena_fd: int,
        allowed_uids: frozenset[int],
    ) -> None:
        """Begin to accept on the running loop.

        Args:
            sock: listening and non-blocking; owned from here on.
            node: decides who comes in.
            strangers: notes who does not.
            arena_fd: what workers get with their welcome; stays the caller's.
            allowed_uids: users whose processes may connect.
        """
        self._sock = sock
        self._node = node
        self._strangers = strangers
        self._arena_fd = arena_fd
        self._allowed_uids = allowed_uids
        self._requests = Requests(node)
        self._arrivals: dict[Arrival, None] = {}
        self._attaching: set[asyncio.Task[None]] = set()
        self._sessions: set[Session] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._accept)
        self._is_closed = False

    def attach_child(
        self, sock: socket.socket, hello: Hello, on_lost: Callable[[], None]
    ) -> Client:
        """Serve an inherited socket pair as a client that has said hello already.

        Args:
            sock: connected and non-blocking; owned from here on.
            hello: what the child would have said.
            on_lost: called when its connection has ended.
        """

        def lost(session: Session) -> None:
            self._lost(session)
            on_lost()

        session = Session(self._requests, on_lost=lost)
        session.client, _ = self._node.admit(hello, pidfd=None, connection=session)
        self._hand_over(sock, session)
        return session.client

    def check(self) -> str:
        """Return what is wrong with the socket, empty text where nothing is."""
        return "the Unix socket is closed" if self._is_closed else ""

    def close(self) -> None:
        """Stop accepting and end every connection."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for arrival in list(self._arrivals):
            arrival.end(close=True)
        for session in list(self._sessions):
            session.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            sock.setblocking(False)
            self._node.meters.connections += 1
            arrival = Arrival(
                sock,
                peer_credentials(sock),
                self._strangers,
                on_hello=self._hello,
                on_end=self._arrived,
            )
            self._arrivals[arrival] = None
            if len(self._arrivals) > ARRIVALS_MAX:
                next(iter(self._arrivals)).crowd_out()

    def _pause(self, error: OSError) -> None:
        """Wait a moment: out of descriptors, the socket stays readable and nothing can be done."""
        _log.warning("cannot accept", reason=str(error), retry_s=_PAUSE_S)
        self._loop.remove_reader(self._sock)
        self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock, self._accept)

    def _arrived(self, arrival: Arrival) -> None:
        self._arrivals.pop(arrival, None)

    def _hello(self, arrival: Arrival, hello: Hello, fds: list[int]) -> None:
        """Welcome a client, or raise what is wrong with it."""
        uid = arrival.credentials.uid
        if uid not in self._allowed_uids:
            raise MismatchError(
                f"user {uid} may not connect to this server: start it with --client-uid {uid}"
            )
        session = Session(self._requests, on_lost=self._lost)
        pidfd = pidfd_of_peer(fds, arrival.credentials)
        session.client, welcome = self._node.admit(hello, pidfd=pidfd, connection=session)
        try:
            arrival.welcome(encode(welcome), [self._arena_fd] if hello.role == Role.WORKER else [])
        except PeerClosedError:
            self._node.connection_lost(session.client, session)
            raise
        arrival.end(close=False)
        self._hand_over(arrival.sock, session)

    def _hand_over(self, sock: socket.socket, session: Session) -> None:
        self._sessions.add(session)
        task = self._loop.create_task(self._attach(sock, session))
        # The loop keeps only a weak reference to a task.
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, sock: socket.socket, session: Session) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: session, sock)
        except OSError:
            sock.close()
            self._lost(session)

    def _lost(self, session: Session) -> None:
        self._sessions.discard(session)
        self._node.connection_lost(session.client, session)
