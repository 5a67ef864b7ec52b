"""The link and the real server in its own process, which is killed, frozen and restarted."""

import os
import signal
import threading
import time

import pytest
from tests.client.conftest import LAYOUT
from tests.client.double import free_port, until
from tests.server.running import RunningServer

from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
from kvcellar.errors import PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.messages import Bind, Lookup, Ping, Pong, Reserve, Role

NAMESPACE = bytes(range(32))
KEYS = bytes(64)


class Engine:
    """Both halves of an instance with one rank."""

    def __init__(self, port, heartbeat_s=10.0):
        options = ClientOptions(host="localhost", port=port, heartbeat_s=heartbeat_s)
        self.leases, self.reservations = set(), set()
        self.boots = []
        self.worker = Link(
            options,
            Identity(Role.WORKER, "engine", "test", layouts=(LAYOUT,)),
            clock=SystemClock(),
        )
        self.scheduler = Link(
            options,
            Identity(Role.SCHEDULER, "engine", "test"),
            clock=SystemClock(),
            on_session=lambda session: self.boots.append(session.boot_id),
            held=lambda: (tuple(self.leases), tuple(self.reservations)),
        )

    def __enter__(self):
        self.worker.start()
        self.scheduler.start()
        return self

    def __exit__(self, *_):
        self.scheduler.close()
        self.worker.close()

    def bind(self):
        """Wait until both halves are known and memory is there, and bind the namespace."""
        self.worker.wait_ready(10.0)
        session = self.scheduler.wait_ready(10.0)

        def is_known():
            self.scheduler.poke()
            beat = self.scheduler.last_heartbeat
            return beat is not None and beat.layouts and beat.steps_ready

        until(is_known, 10.0)
        session.call(lambda i: Bind(i, NAMESPACE, 16, (LAYOUT.shard_bytes(1),)), timeout_s=5.0)
        return session

    def reserve(self, session):
        reply = session.call(lambda i: Reserve(i, KEYS[:32], b""), timeout_s=5.0)
        assert reply.states == b"\x01"
        return reply.reservation


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def start(port):
    """Return a function that starts a server on the same port each time."""
    running = []

    def start_one():
        server = RunningServer("--port", str(port))
        running.append(server)
        return server.__enter__()

    yield start_one
    for server in running:
        server.__exit__()


def test_both_halves_find_each_other_through_the_server(start, port):
    server = start()
    with Engine(port) as engine:
        session = engine.bind()
        assert engine.scheduler.last_heartbeat.layouts == (LAYOUT,)
        assert engine.worker.session.arena.size_bytes == session.welcome.arena_bytes
        assert isinstance(session.call(Ping, timeout_s=5.0), Pong)
    until(lambda: server.status_metrics()["kvcellar_instances"] == 0)


def test_a_heartbeat_gives_back_what_is_not_in_use_any_more(start, port):
    server = start()
    with Engine(port) as engine:
        reservation = engine.reserve(engine.bind())
        engine.reservations.add(reservation)
        engine.scheduler.poke()
        engine.scheduler.session.call(Ping, timeout_s=5.0)
        assert server.status_metrics()["kvcellar_reservations"] == 1
        engine.reservations.clear()
        engine.scheduler.poke()
        until(lambda: server.status_metrics()["kvcellar_reservations"] == 0)


def test_a_killed_and_restarted_server_is_found_within_a_second(start, port):
    server = start()
    with Engine(port) as engine:
        old = engine.bind()
        server.process.send_signal(signal.SIGKILL)
        assert until(lambda: engine.scheduler.session is None) < 1.0
        with pytest.raises(PeerClosedError):
            old.call(Ping, timeout_s=5.0)
        start()
        new = engine.bind()
        assert engine.boots == [old.boot_id, new.boot_id]
        assert engine.worker.session.arena is not None


def test_a_server_frozen_in_the_middle_of_calls_comes_back(start, port):
    """SIGSTOP while one thread waits for a reply and another wants to send."""
    server = start()
    with Engine(port, heartbeat_s=0.1) as engine:
        session = engine.bind()
        os.kill(server.process.pid, signal.SIGSTOP)
        silent = []

        def ask():
            for _ in range(3):
                try:
                    session.call(lambda i: Lookup(i, KEYS), timeout_s=0.05)
                except TimeoutExpiredError:
                    silent.append(1)
                    engine.scheduler.note_silence()

        threads = [threading.Thread(target=ask) for _ in range(2)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)
        assert time.monotonic() - started < 2.0
        assert len(silent) == 6
        assert engine.scheduler.session is None
        os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: engine.scheduler.session is session)
        assert session.call(lambda i: Lookup(i, KEYS), timeout_s=5.0).count == 0
        assert engine.boots == [session.boot_id]


def test_a_link_that_closes_frees_all_it_held_at_once(start, port):
    server = start()
    with Engine(port) as engine:
        engine.reservations.add(engine.reserve(engine.bind()))
        assert server.status_metrics()["kvcellar_reservations"] == 1
    until(lambda: server.status_metrics()["kvcellar_reservations"] == 0, 1.0)
