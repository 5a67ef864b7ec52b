"""The other side of the wire, for faults that a real server does not commit on demand.

It speaks the real frames over real sockets from a thread of its own, answers as a server would,
and can be told to freeze, lie, hang up or say nothing. What it cannot show is that the real server
behaves: `test_real_server` does that.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
import uuid

from kvcellar.errors import PeerClosedError
from kvcellar.memory.arena import Arena
from kvcellar.protocol.frames import LENGTH_BYTES, PREAMBLE, FrameReader, decode_request, encode
from kvcellar.protocol.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Located,
    Lookup,
    LookupReply,
    Ok,
    Ping,
    Pong,
    Welcome,
)
from kvcellar.transport.address import TcpAddress
from kvcellar.transport.descriptors import close_fds, recv_fds, send_with_fds
from kvcellar.transport.pidfd import pidfd_pid
from kvcellar.transport.sockets import listen_tcp, listen_unix

ARENA_BYTES = 65_536


class Peer(asyncio.Protocol):
    """One client's connection after its hello."""

    def __init__(self, server):
        self.server = server
        self.reader = FrameReader()

    def connection_made(self, transport):
        self.transport = transport
        self.server.peers.append(self)
        self.server.note(("peer", self))

    def data_received(self, data):
        for body in self.reader.feed(data):
            self.server.take(decode_request(body), self)

    def connection_lost(self, _error):
        self.server.note(("lost", None))

    def send(self, *replies):
        self.transport.write(b"".join(encode(reply) for reply in replies))

    def send_raw(self, data):
        self.transport.write(data)

    def hang_up(self):
        self.transport.close()


class ServerDouble:
    """A server of one boot; `answers` maps request classes to `(request, peer) -> None`."""

    def __init__(self, port=0):
        self.boot_id = os.urandom(16)
        self.fix = "start the server with --socket-dir DIR"
        self.answers = {}
        self.locate = self._located
        self.welcome = self._welcome
        self.welcome_fds = None
        self.events = []
        self.pids = []
        self.peers = []
        self._tasks = []
        self._arrivals = []
        self._changed = threading.Condition()
        self._thaw = threading.Event()
        self._arena = Arena.create(ARENA_BYTES, ARENA_BYTES)
        self._arena.grow_step(0)
        self.address = f"@kvcellar-test/{uuid.uuid4().hex}"
        self._unix = listen_unix(self.address)
        (self._tcp,) = listen_tcp(TcpAddress("127.0.0.1", port))
        self.port = self._tcp.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thaw.set()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def stop(self):
        """End as a killed server does: everything is closed, nothing is said."""
        self.__exit__()

    def _run(self):
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.add_reader(self._tcp, self._accept, self._tcp, self._show_in)
        loop.add_reader(self._unix, self._accept, self._unix, self._take_in)
        loop.run_forever()
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        for peer in self.peers:
            peer.transport.abort()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        for sock in (self._unix, self._tcp, *self._arrivals):
            sock.close()
        self._arena.close()

    def _accept(self, listener, serve):
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._arrivals.append(connection)
            self._tasks.append(self._loop.create_task(serve(connection)))

    async def _show_in(self, connection):
        with connection, contextlib.suppress(OSError):
            await self._loop.sock_recv(connection, 4096)
            self.note(("locate", None))
            await self._loop.sock_sendall(connection, self.locate())

    async def _take_in(self, connection):
        try:
            is_welcome = await self._greet(connection)
        except (OSError, PeerClosedError):
            is_welcome = False
        if not is_welcome:
            connection.close()
            return
        await self._loop.connect_accepted_socket(lambda: Peer(self), connection)

    async def _greet(self, connection):
        received = b""
        while len(received) < 12 or len(received) < 12 + int.from_bytes(received[8:12], "little"):
            try:
                data, fds = recv_fds(connection, 65_536)
            except BlockingIOError:
                await asyncio.sleep(0.001)
                continue
            self.pids += [pidfd_pid(fd) for fd in fds]
            close_fds(fds)
            if not data:
                return False
            received += data
        assert received[:8] == PREAMBLE
        hello = decode_request(received[8 + LENGTH_BYTES :])
        assert isinstance(hello, Hello)
        self.note(("hello", hello))
        reply = self.welcome(hello)
        if reply is None:
            return False
        fds = [self._arena.fd] if hello.role == "worker" else []
        send_with_fds(
            connection, encode(reply), fds if self.welcome_fds is None else self.welcome_fds
        )
        return isinstance(reply, Welcome)

    def _located(self):
        return encode(Located(1, self.address, self.boot_id, PROTOCOL_VERSION, self.fix))

    def _welcome(self, hello):
        return Welcome(
            hello.id,
            PROTOCOL_VERSION,
            self.boot_id,
            "double",
            256,
            "exact",
            ARENA_BYTES,
            ARENA_BYTES,
        )

    def take(self, request, peer):
        self.note((type(request).__name__.lower(), request))
        answer = self.answers.get(type(request))
        if answer is not None:
            answer(request, peer)
        elif isinstance(request, Heartbeat):
            peer.send(HeartbeatReply(request.id, self.boot_id, 0, 1))
        elif isinstance(request, Ping):
            peer.send(Pong(request.id, self.boot_id))
        elif isinstance(request, Lookup):
            # The count tells whose reply it is.
            peer.send(LookupReply(request.id, len(request.keys), request.id, b""))
        else:
            peer.send(Ok(request.id))
            if isinstance(request, Goodbye):
                peer.hang_up()

    def note(self, event):
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def seen(self, name):
        """Return what came under this name: request classes in lower case, 'locate', 'lost'."""
        with self._changed:
            return [value for kind, value in self.events if kind == name]

    def wait_for(self, name, count=1, timeout_s=5.0):
        """Return the first `count` events of a name once they are there."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: sum(kind == name for kind, _ in self.events) >= count, timeout_s
            )
            assert found, f"no {count} x {name} within {timeout_s} s: {self.events}"
        return self.seen(name)[:count]

    def freeze(self):
        """Stop answering, as SIGSTOP does: sockets stay open, nothing is read."""
        frozen = threading.Event()

        def hold():
            frozen.set()
            self._thaw.wait()

        self._thaw.clear()
        self._loop.call_soon_threadsafe(hold)
        assert frozen.wait(5.0)

    def thaw(self):
        self._thaw.set()

    def run(self, function):
        """Run a function on the double's own thread and wait for it."""
        done = threading.Event()

        def go():
            try:
                function()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(go)
        assert done.wait(5.0)

    def say(self, *replies):
        """Send replies that nobody waits for, on the newest connection."""
        self.wait_for("peer")
        self.run(lambda: self.peers[-1].send(*replies))

    def settle(self):
        """Wait until the double has done what it had begun, such as closing its end."""
        self.run(lambda: None)


def silent(_request, _peer):
    """Answer nothing."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def until(condition, timeout_s=5.0):
    """Wait for what no event tells; returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - started
