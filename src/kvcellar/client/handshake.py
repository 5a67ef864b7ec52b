"""From an address that users know to a session: the TCP door, the Unix socket, the hello.

Every way in which this goes wrong has its own message, because it is what an operator sees when a
cache does not work: nobody there, another program on that port, a container that does not see the
socket, two versions. Called by `link` on its thread and by `tool`; the server's own HTTP process
calls `greet` on the socket that it inherited.
"""

import contextlib
import os
import socket

from kvcellar.client.options import ClientOptions, Identity
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.errors import (
    LimitError,
    MalformedError,
    MismatchError,
    NotLocalError,
    PeerClosedError,
    TimeoutExpiredError,
    error_from_wire,
)
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.frames import PREAMBLE, decode_reply, encode
from kvcellar.protocol.messages import (
    PROTOCOL_VERSION,
    ErrorReply,
    Locate,
    Located,
    Reply,
    Role,
    Welcome,
)
from kvcellar.transport.deadline import Deadline
from kvcellar.transport.descriptors import close_fds, recv_frame_with_fds, send_with_fds
from kvcellar.transport.pidfd import open_own_pidfd
from kvcellar.transport.sockets import dial_tcp, dial_unix

__all__ = ["greet", "locate", "open_session"]

BOOT_ID_BYTES = 16
_FIRST_ID = 1


def open_session(
    options: ClientOptions, identity: Identity, *, client_id: bytes, clock: Clock
) -> Session:
    """Find the server, say hello and return the session; the caller closes it.

    Blocks for at most three times `options.connect_timeout_s`.

    Args:
        options: where and how long.
        identity: who says hello.
        client_id: 16 bytes, made once and the same whenever this client connects again.
        clock: for deadlines; the session goes on using it.

    Raises:
        PeerClosedError: nobody is there, or it is no kvcellar server.
        TimeoutExpiredError: the server does not answer in time.
        MismatchError: the two do not fit together; both versions are named.
        NotLocalError: the server's Unix socket cannot be reached; the message has the fix.
        KVCellarError: the server's own refusal, as its class.
    """
    located = locate(options, clock=clock)
    try:
        sock = dial_unix(located.address, timeout_s=options.connect_timeout_s)
    except PeerClosedError as error:
        raise NotLocalError(
            f"the server at {options.address} is alive, but from here: {error}; {located.fix}"
        ) from error
    try:
        session = greet(sock, options, identity, client_id=client_id, clock=clock)
    except BaseException:
        sock.close()
        raise
    if session.boot_id != located.boot_id:
        session.close()
        if session.arena is not None:
            session.arena.close()
        raise NotLocalError(
            f"another server than the one at {options.address} answers on the Unix socket "
            f"{located.address}: it restarted just now, or it runs on another host; {located.fix}"
        )
    return session


def locate(options: ClientOptions, *, clock: Clock) -> Located:
    """Ask the TCP door where the server's Unix socket is.

    Blocks for at most twice `options.connect_timeout_s`.

    Raises:
        PeerClosedError, TimeoutExpiredError, MismatchError, KVCellarError: see `open_session`.
    """
    address = options.address
    deadline = Deadline(clock, options.connect_timeout_s)
    with dial_tcp(address, timeout_s=options.connect_timeout_s) as sock:
        sock.settimeout(options.connect_timeout_s)
        try:
            send_with_fds(sock, PREAMBLE + encode(Locate(_FIRST_ID, PROTOCOL_VERSION)), [])
            reply, _ = _receive_reply(sock, deadline)
        except (MalformedError, LimitError, PeerClosedError) as error:
            raise PeerClosedError(
                f"what listens at {address} does not answer as a kvcellar server does: {error}; "
                "is that its --port, and not its --http-port or another program's?"
            ) from error
    _check_version(reply.protocol_version if isinstance(reply, Located) else PROTOCOL_VERSION)
    if not isinstance(reply, Located):
        raise _unexpected(reply)
    return reply


def greet(
    sock: socket.socket,
    options: ClientOptions,
    identity: Identity,
    *,
    client_id: bytes,
    clock: Clock,
) -> Session:
    """Say hello on a connected Unix socket and return the session, which then owns the socket.

    Blocks for at most `options.connect_timeout_s`. On an error the socket stays the caller's.

    Raises:
        TimeoutExpiredError, PeerClosedError, MismatchError, KVCellarError: see `open_session`.
        ArenaMapError: the server sent no arena, or not the one that it promised.
    """
    deadline = Deadline(clock, options.connect_timeout_s)
    hello = identity.hello(_FIRST_ID, client_id=client_id, pid=os.getpid())
    pidfd = open_own_pidfd()
    try:
        sock.settimeout(options.connect_timeout_s)
        send_with_fds(sock, PREAMBLE + encode(hello), [] if pidfd is None else [pidfd])
        sock.settimeout(None)
    finally:
        if pidfd is not None:
            os.close(pidfd)
    reply, fds = _receive_reply(sock, deadline)
    try:
        if not isinstance(reply, Welcome):
            raise _unexpected(reply)
        _check_version(reply.protocol_version)
        if reply.id != _FIRST_ID or len(reply.boot_id) != BOOT_ID_BYTES:
            raise MalformedError("the server's welcome has no boot id, or is not for this hello")
        arena = _map_arena(reply, fds) if identity.role == Role.WORKER else None
    finally:
        close_fds(fds)
    return Session(sock, reply, arena=arena, clock=clock, timeout_max_s=options.timeout_s)


def _receive_reply(sock: socket.socket, deadline: Deadline) -> tuple[Reply, list[int]]:
    try:
        body, fds = recv_frame_with_fds(sock, deadline=deadline)
    except TimeoutExpiredError as error:
        raise TimeoutExpiredError(
            "the server takes connections but does not answer in time: it is frozen, or another "
            "program (LMCache's own server?) listens there"
        ) from error
    with contextlib.ExitStack() as on_error:
        on_error.callback(close_fds, fds)
        reply = decode_reply(body)
        on_error.pop_all()
    return reply, fds


def _map_arena(welcome: Welcome, fds: list[int]) -> ArenaView:
    if len(fds) != 1:
        raise MalformedError(f"a worker's welcome carries one descriptor, and not {len(fds)}")
    return ArenaView(fds[0], welcome.arena_bytes)


def _check_version(server_version: int) -> None:
    if server_version != PROTOCOL_VERSION:
        raise MismatchError(
            f"the server speaks protocol version {server_version} and this client version "
            f"{PROTOCOL_VERSION}: install the same kvcellar release on both sides"
        )


def _unexpected(reply: Reply) -> Exception:
    """Return the error for a reply that is not the one asked for."""
    if isinstance(reply, ErrorReply):
        return error_from_wire(reply.code, reply.message)
    return MalformedError(f"the server answered with {type(reply).__name__} during the handshake")
