"""Whatever comes in by a socket ends at most its own connection; a good client never notices."""

import contextlib
import os
import random
import select
import socket
import struct
import time
from pathlib import Path

import msgspec
import pytest
from tests.server.running import WAIT_S, RunningServer, eventually, key, keys

from kvcellar.errors import MismatchError, error_from_wire
from kvcellar.protocol.frames import PREAMBLE, decode_reply, encode
from kvcellar.protocol.messages import (
    PROTOCOL_VERSION,
    ErrorReply,
    Goodbye,
    Hello,
    Locate,
    Located,
    Lookup,
    Ping,
    Pong,
    Release,
    Role,
    Status,
    Welcome,
)
from kvcellar.transport.sockets import dial_unix


@pytest.fixture
def good(server):
    """A client that works before and after, and whose lease survives."""
    with server.engine("good") as engine:
        engine.store(1, 2)
        lease = engine.lookup(1, 2).lease
        yield engine
        assert engine.lookup(1, 2).count == 2
        engine.call(lambda i: Release(i, (lease,)))
    eventually(lambda: server.status()["kvcellar"]["leases"] == 0)


def tcp(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def unix(server):
    address = server.status()["kvcellar"]["address"]
    sock = dial_unix(address, timeout_s=WAIT_S)
    sock.settimeout(WAIT_S)
    return sock


def hello(**changes):
    fields = {
        "id": 7,
        "protocol_version": PROTOCOL_VERSION,
        "role": Role.TOOL,
        "client_id": os.urandom(16),
        "instance_id": "",
        "pid": os.getpid(),
        "software": "hostile",
    }
    return Hello(**(fields | changes))


def send(sock, data):
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def read_all(sock):
    """Read until the server closes."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            received += data
    return bytes(received)


def replies(data):
    while data:
        length = int.from_bytes(data[:4], "little")
        yield decode_reply(data[4 : 4 + length])
        data = data[4 + length :]


def only_reply(data):
    (reply,) = replies(data)
    return reply


def framed(body):
    return len(body).to_bytes(4, "little") + body


def frame(*parts):
    return framed(msgspec.msgpack.encode(parts))


RUNAWAY = b"\x93\xa7release\x09\xdd" + struct.pack(">I", 31_000_000) + b"\x01" * 1000


@pytest.mark.parametrize("way", [tcp, unix])
@pytest.mark.parametrize(
    ("first_bytes", "explained"),
    [
        (b"\xff" + bytes(8) + b"\x7f", "LMCacheMPConnector"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "--http-port"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "TLS"),
        (b"hello, is there anybody?", "does not speak"),
    ],
)
def test_another_protocol_is_closed_and_explained_once(server, good, way, first_bytes, explained):
    for _ in range(3):
        with way(server) as sock:
            sock.sendall(first_bytes)
            assert read_all(sock) == b""
    line = server.wait_for_line(explained)
    assert "peer refused" in line
    # Two doors, so at most two strangers of a kind are named in a minute.
    assert server.log().count(line.split("reason=")[1].split(" peer=")[0]) <= 2


def test_a_real_zmq_client_is_closed_and_told_what_to_do(good, server):
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    monitor = dealer.get_monitor_socket(
        zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    dealer.linger = 0
    dealer.connect(f"tcp://127.0.0.1:{server.port}")
    dealer.send(b"x")
    assert monitor.poll(WAIT_S * 1000), "the connection stays open"
    assert dealer.poll(0) == 0
    dealer.disable_monitor()
    context.destroy(linger=0)
    assert "kv_connector_module_path" in server.wait_for_line("ZeroMQ")


def test_the_door_tells_where_the_socket_is_and_closes(server):
    with tcp(server) as sock:
        sock.sendall(PREAMBLE + encode(Locate(3, PROTOCOL_VERSION)))
        reply = only_reply(read_all(sock))
    assert isinstance(reply, Located)
    assert reply.id == 3
    assert reply.address == server.status()["kvcellar"]["address"]
    assert reply.boot_id.hex() == server.status()["kvcellar"]["boot_id"]
    assert "--socket-dir DIR" in reply.fix


def test_a_hello_over_tcp_is_told_to_come_by_the_socket(server):
    with tcp(server) as sock:
        sock.sendall(PREAMBLE + encode(hello()))
        reply = only_reply(read_all(sock))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "not_local"
    assert "--socket-dir" in reply.message


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (tcp, Locate(7, 99)),
        (unix, hello(protocol_version=99)),
        (unix, ("hello", 7, 99, {"a": "future"})),
        (tcp, ("locate", 7, 99.0 and 99, "more")),
        (tcp, ("hello", 7, 99, 1)),
    ],
    ids=["locate", "hello", "other hello", "other locate", "other hello over tcp"],
)
def test_another_version_is_told_both_versions(server, good, way, message):
    data = frame(*message) if isinstance(message, tuple) else encode(message)
    with way(server) as sock:
        sock.sendall(PREAMBLE + data)
        reply = only_reply(read_all(sock))
    assert isinstance(error_from_wire(reply.code, reply.message), MismatchError)
    assert "version 99" in reply.message
    assert f"speaks {PROTOCOL_VERSION}" in reply.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "king"}, "role"),
        ({"client_id": b"short"}, "client_id"),
        ({"role": Role.SCHEDULER}, "instance_id"),
        ({"role": Role.SCHEDULER, "instance_id": "x" * 5000}, "instance_id"),
        ({"role": Role.SCHEDULER, "instance_id": "x", "world_size": 0}, "world_size"),
        ({"role": Role.SCHEDULER, "instance_id": "x", "world_size": 10**6}, "world_size"),
        ({"role": Role.WORKER, "instance_id": "x", "rank": 1}, "rank"),
        ({"role": Role.WORKER, "instance_id": "x", "rank": -1}, "rank"),
        ({"role": Role.WORKER, "instance_id": "x"}, "layout"),
        ({"software": "x" * 5000}, "software"),
    ],
)
def test_a_hello_with_a_wrong_field_names_it(server, good, changes, named):
    with unix(server) as sock:
        sock.sendall(PREAMBLE + encode(hello(**changes)))
        reply = only_reply(read_all(sock))
    assert reply.id == 7
    assert reply.code == "malformed"
    assert named in reply.message


def test_a_first_message_other_than_hello_is_refused(server, good):
    with unix(server) as sock:
        sock.sendall(PREAMBLE + encode(Lookup(1, key(1))))
        assert "must be a hello" in only_reply(read_all(sock)).message


def test_what_is_sent_before_the_welcome_is_refused(server, good):
    with unix(server) as sock:
        sock.sendall(PREAMBLE + encode(hello()) + encode(Ping(8)))
        assert "between hello and welcome" in only_reply(read_all(sock)).message


def test_a_hello_in_single_bytes_is_welcome(server):
    with unix(server) as sock:
        for byte in PREAMBLE + encode(hello()):
            sock.sendall(bytes([byte]))
        reply = decode_reply(sock.recv(65536)[4:])
        assert isinstance(reply, Welcome)
        sock.sendall(encode(Ping(8)) + encode(Goodbye(9)))
        pong, ok = replies(read_all(sock))
        assert isinstance(pong, Pong)
        assert (pong.id, ok.id) == (8, 9)


@pytest.mark.parametrize("way", [tcp, unix])
def test_a_lying_length_is_refused_at_once(server, good, way):
    with way(server) as sock:
        sock.sendall(PREAMBLE + struct.pack("<I", 2**32 - 1))
        reply = only_reply(read_all(sock))
    assert reply.code == "limit"


def welcomed(server):
    sock = unix(server)
    sock.sendall(PREAMBLE + encode(hello()))
    assert isinstance(decode_reply(sock.recv(65536)[4:]), Welcome)
    return sock


@pytest.mark.parametrize(
    ("data", "code", "request_id"),
    [
        (struct.pack("<I", 2**31), "limit", 0),
        (frame("nonsense", 5), "malformed", 5),
        (frame("ping", "five"), "malformed", 0),
        (frame("lookup", 5, 1.5), "malformed", 5),
        (frame("release", 5, "abc"), "malformed", 5),
        (frame("release", 5, [None]), "malformed", 5),
        (b"\x03\x00\x00\x00\xc1\xc1\xc1", "malformed", 0),
        (b"\x00\x00\x00\x00", "malformed", 0),
        (frame(*([[]] * 3)), "malformed", 0),
        (framed(b"\x93\xa7release\x01"), "malformed", 0),
        (framed(RUNAWAY), "malformed", 0),
        (framed(b"\x91" * 20_000), "malformed", 0),
    ],
    ids=range(12),
)
def test_what_is_no_message_is_answered_and_closed(server, good, data, code, request_id):
    with welcomed(server) as sock:
        sock.sendall(encode(Ping(1)) + data)
        pong, error = replies(read_all(sock))
    assert isinstance(pong, Pong)
    assert (error.code, error.id) == (code, request_id)


@pytest.mark.parametrize("seed", range(4))
def test_noise_ends_only_its_own_connection(server, good, seed):
    source = random.Random(seed)
    valid = [
        encode(Ping(1)), encode(Status(2)), encode(Lookup(3, keys(1, 2))), PREAMBLE,
        encode(Release(4, (1, 2, 3))), encode(hello()), encode(Locate(1, 1)),
    ]  # fmt: skip
    for _ in range(40):
        data = b"".join(source.choices([*valid, source.randbytes(source.randrange(40))], k=4))
        if source.random() < 0.5:
            data = bytearray(data)
            for _ in range(3):
                data[source.randrange(len(data))] = source.randrange(256)
        way = source.choice([tcp, unix, welcomed])
        with way(server) as sock:
            start = b"" if way is welcomed else source.choice([b"", PREAMBLE])
            send(sock, start + data[: source.randrange(len(data) + 1)])
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            read_all(sock)
    assert good.lookup(1, 2).count == 2


def test_descriptors_that_come_uninvited_are_closed(server, good):
    before = server.descriptors()
    for count in (1, 4, 5, 60):
        with unix(server) as sock, Path(os.devnull).open("rb") as file:
            socket.send_fds(sock, [PREAMBLE + encode(hello())], [file.fileno()] * count)
            answer = sock.recv(65536)
            reply = decode_reply(answer[4:])
            assert isinstance(reply, Welcome if count <= 4 else ErrorReply)
    for _ in range(3):
        with unix(server) as sock, Path(os.devnull).open("rb") as file:
            socket.send_fds(sock, [PREAMBLE[:4]], [file.fileno()] * 2)
    eventually(lambda: server.descriptors() <= before)


def test_a_thousand_silent_connections_keep_nobody_out():
    with RunningServer() as server, server.engine("good") as engine:
        engine.store(1)
        crowd = [dial(server, number) for number in range(1000)]
        try:
            assert engine.lookup(1).count == 1
            with server.tool() as tool:
                assert isinstance(tool.call(Ping, timeout_s=WAIT_S), Pong)
            eventually(lambda: "crowded_out" in refused(server))
            assert server.descriptors() < 700
        finally:
            for sock in crowd:
                sock.close()
        assert engine.lookup(1).count == 1


def dial(server, number):
    if number % 2:
        return tcp(server)
    sock = socket.socket(socket.AF_UNIX)
    line = server.start_line.split("socket=")[1].split(" ")[0]
    sock.connect("\0" + line[1:])
    return sock


def refused(server):
    return server.status_metrics()["kvcellar_peers_refused_total"]


IMPATIENT = (
    "import sys; from kvcellar.protocol import limits; limits.HELLO_TIMEOUT_S = 0.5; "
    "from kvcellar.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_slow_hello_is_given_up_after_its_time():
    with RunningServer(command=("-c", IMPATIENT, "server")) as server:
        slow = [unix(server), tcp(server)]
        start_s = time.monotonic()
        try:
            for sock in slow:
                sock.sendall(PREAMBLE)
            assert select.select(slow, [], [], 0.25)[0] == []
            # A byte now and then buys no time.
            for sock in slow:
                sock.sendall(b"\x01")
            assert [read_all(sock) for sock in slow] == [b"", b""]
            assert 0.45 < time.monotonic() - start_s < WAIT_S
            assert refused(server)["silent"] == 2
        finally:
            for sock in slow:
                sock.close()


def test_a_client_that_does_not_read_is_disconnected_and_costs_bounded_memory():
    with RunningServer() as server, server.engine("good") as engine:
        engine.store(*range(100))
        with welcomed(server) as sock:
            sock.setblocking(False)
            page = encode(Status(1)) * 1000
            sent = 0
            end_s = time.monotonic() + WAIT_S * 3
            while time.monotonic() < end_s:
                try:
                    sent += sock.send(page)
                except BlockingIOError:
                    # Others are served while this one's requests wait.
                    assert engine.lookup(1).count == 1
                except (BrokenPipeError, ConnectionResetError):
                    break
            else:
                pytest.fail(f"still connected after {sent} bytes")
        assert server.rss_kb() < 250_000
        server.wait_for_line("client does not read")
        assert engine.lookup(1).count == 1


def test_out_of_descriptors_the_server_recovers():
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
        "from kvcellar.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with RunningServer(command=("-c", code, "server")) as server:
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        line = server.start_line.split("socket=")[1].split(" ")[0]
        with server.tool() as tool:
            for sock in crowd:
                sock.connect("\0" + line[1:])
            server.wait_for_line("cannot accept")
            tool.call(Ping, timeout_s=WAIT_S)
            for sock in crowd:
                sock.close()
            tool.call(Ping, timeout_s=WAIT_S)
        eventually(lambda: is_reachable(server))
        assert "Traceback" not in server.log()
        # It waits between tries, and neither spins nor fills the log.
        assert server.log().count("cannot accept") < 100


def is_reachable(server):
    with contextlib.suppress(Exception), server.tool() as tool:
        return isinstance(tool.call(Ping, timeout_s=WAIT_S), Pong)
    return False
