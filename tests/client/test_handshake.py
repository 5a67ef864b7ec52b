"""Getting connected, and every way in which it fails."""

import os
import socket
import threading

import msgspec
import pytest
from tests.client.conftest import SCHEDULER, WORKER
from tests.client.double import ARENA_BYTES, free_port, until
from tests.transport.open_files import open_fds

from kvcellar.client.handshake import greet
from kvcellar.client.options import ClientOptions
from kvcellar.client.tool import connect_tool
from kvcellar.clock import SystemClock
from kvcellar.errors import (
    ArenaMapError,
    ConfigError,
    KVCellarError,
    MalformedError,
    MismatchError,
    NotLocalError,
    PeerClosedError,
    TimeoutExpiredError,
)
from kvcellar.protocol.frames import LENGTH_BYTES, decode_reply, encode
from kvcellar.protocol.messages import PROTOCOL_VERSION, ErrorReply, Ping, Pong, Role


def test_the_server_learns_who_connected_and_gets_its_pidfd(connect, server):
    connect(WORKER)
    (hello,) = server.wait_for("hello")
    assert hello.role == Role.WORKER
    assert hello.layouts == WORKER.layouts
    assert hello.pid == os.getpid()
    assert len(hello.client_id) == 16
    assert server.pids == [os.getpid()]


def test_a_worker_gets_the_arena(connect, server):
    session = connect(WORKER)
    session.arena.view[:5] = b"bytes"
    assert session.arena.size_bytes == ARENA_BYTES
    assert os.pread(server._arena.fd, 5, 0) == b"bytes"
    session.close()
    assert bytes(session.arena.view[:5]) == b"bytes", "copies may still run"


def test_a_scheduler_gets_no_arena(connect, server):
    session = connect(SCHEDULER)
    assert session.arena is None
    assert session.boot_id == server.boot_id
    assert session.welcome.node == "double"


def test_a_tool_connects_asks_and_leaves(server):
    with connect_tool("tcp://127.0.0.1", str(server.port)) as session:
        assert session.call(Ping, timeout_s=5.0) == Pong(2, server.boot_id)
    server.wait_for("lost")
    (hello,) = server.seen("hello")
    assert hello.role == Role.TOOL


def test_a_tool_with_a_wrong_address_is_told():
    with pytest.raises(ConfigError, match="port="):
        connect_tool("localhost", "http")


def test_a_socket_that_was_inherited_needs_no_door():
    """The server's HTTP process speaks over the socket that it was started with."""
    ours, theirs = socket.socketpair()
    welcome = b""

    def other_side():
        nonlocal welcome
        with theirs:
            welcome = theirs.recv(4096)
            theirs.sendall(encode(ErrorReply(1, "not_registered", "who are you?")))

    thread = threading.Thread(target=other_side)
    thread.start()
    with ours, pytest.raises(KVCellarError, match="who are you"):
        greet(ours, ClientOptions(), SCHEDULER, client_id=bytes(16), clock=SystemClock())
    thread.join()
    assert welcome.startswith(b"KVCELLAR")


@pytest.fixture
def refused(connect, server):
    """Return a function that expects connecting to fail, and no descriptor to be left."""

    def check(error, match, identity=SCHEDULER, **options):
        server.settle()
        before = open_fds()
        with pytest.raises(error, match=match) as refusal:
            connect(identity, **options)
        server.wait_for("locate")
        # While somebody keeps the error, and with its traceback all that was on the stack.
        until(lambda: open_fds() == before)
        assert refusal.tb is not None

    return check


def located(server, **changes):
    usual = decode_reply(server._located()[LENGTH_BYTES:])
    return lambda: encode(msgspec.structs.replace(usual, **changes))


def welcomed(server, **changes):
    return lambda hello: msgspec.structs.replace(server._welcome(hello), **changes)


def test_another_version_at_the_door_is_said_with_both(refused, server):
    server.locate = located(server, protocol_version=77)
    refused(MismatchError, f"version 77 .* version {PROTOCOL_VERSION}")


def test_another_version_at_the_welcome_is_said_with_both(refused, server):
    server.welcome = welcomed(server, protocol_version=78)
    refused(MismatchError, f"version 78 .* version {PROTOCOL_VERSION}")


def test_the_servers_own_words_on_versions_are_kept(refused, server):
    server.locate = lambda: encode(ErrorReply(1, "mismatch", "I speak 3, you speak 1"))
    refused(MismatchError, "I speak 3, you speak 1")


@pytest.mark.parametrize("address", ["@kvcellar-test/nowhere", "/nowhere/5555.sock"])
def test_a_socket_out_of_reach_is_said_with_the_fix(refused, server, address):
    server.locate = located(server, address=address)
    refused(NotLocalError, f"{address}.*start the server with --socket-dir DIR")


def test_another_server_on_that_socket_is_not_mistaken_for_it(refused, server):
    """A client of a remote server meets the local one that has the same port."""
    server.locate = located(server, boot_id=bytes(16))
    refused(NotLocalError, "another server.*--socket-dir DIR", identity=WORKER)


def test_a_refused_hello_is_raised_as_its_class(refused, server):
    server.welcome = lambda hello: ErrorReply(hello.id, "mismatch", "rank 0 is taken")
    refused(MismatchError, "rank 0 is taken")


def test_a_server_that_ends_during_the_hello_is_gone(refused, server):
    server.welcome = lambda _hello: None
    refused(PeerClosedError, "closed")


def test_a_frozen_server_costs_the_timeout(connect, server):
    server.freeze()
    before = open_fds()
    with pytest.raises(TimeoutExpiredError, match="frozen, or another program"):
        connect(connect_timeout_s=0.05)
    assert open_fds() == before
    server.thaw()


@pytest.mark.parametrize("count", [0, 2])
def test_a_worker_without_exactly_one_arena_is_refused(refused, server, count):
    server.welcome_fds = [server._arena.fd] * count
    refused(MalformedError, f"not {count}", identity=WORKER)


def test_an_arena_of_another_size_is_refused(refused, server):
    server.welcome = welcomed(server, arena_bytes=ARENA_BYTES + 4096)
    refused(ArenaMapError, "bytes", identity=WORKER)


def test_a_descriptor_that_nobody_asked_for_is_closed(connect, server):
    server.welcome_fds = [server._arena.fd]
    connect().close()
    server.wait_for("lost")
    server.settle()
    before = open_fds()
    connect().close()
    until(lambda: open_fds() == before)


@pytest.mark.parametrize(
    "changes", [{"boot_id": b"short"}, {"boot_id": b""}, {"id": 2}], ids=["short", "empty", "id"]
)
def test_a_welcome_that_makes_no_sense_is_refused(refused, server, changes):
    server.welcome = welcomed(server, **changes)
    refused(MalformedError, "boot id", identity=WORKER)


def test_a_welcome_of_the_wrong_kind_is_refused(refused, server):
    server.locate = lambda: encode(Pong(1, bytes(16)))
    refused(MalformedError, "Pong")


FOREIGN = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": b"\x08\x00\x00\x00hey what",
    "nothing": b"",
}


@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN.keys())
def test_another_program_on_that_port_is_told_apart(refused, server, answer):
    server.locate = lambda: answer
    refused(PeerClosedError, f"{server.port} does not answer as a kvcellar server.*--http-port")


def test_nobody_at_the_address_is_said():
    port = free_port()
    with pytest.raises(PeerClosedError, match=f"tcp://127.0.0.1:{port}"):
        connect_tool("127.0.0.1", port)
