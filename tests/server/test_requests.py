"""A bug behind a request is answered, told, and makes the server say that it is not well."""

import os

import pytest
from tests.server.running import CHUNK_TOKENS, SHARD_BYTES, keys, layout, namespace

from kvcellar.clock import FakeClock
from kvcellar.config.server import ServerConfig
from kvcellar.errors import MalformedError
from kvcellar.memory.slots import SlotAllocator
from kvcellar.protocol.frames import decode_reply, encode
from kvcellar.protocol.messages import (
    PROTOCOL_VERSION,
    Bind,
    Commit,
    Hello,
    Lookup,
    Reserve,
    Role,
    Status,
)
from kvcellar.server.node import ArenaShape, Node
from kvcellar.server.requests import Requests
from kvcellar.store.machine import Store
from kvcellar.store.policies import LRU

STEP_BYTES = 1 << 20


class NoDeaths:
    """Nobody dies in these tests."""

    def watch(self, client, on_death):
        pass

    def unwatch(self, client):
        pass


class Open:
    """A connection that cannot be lost."""

    def close(self):
        pass


class BrokenStore(Store):
    """A store whose books are wrong."""

    def lookup(self, *_, **__):
        raise AssertionError("two owners of one slot")


@pytest.fixture
def clock():
    return FakeClock()


def node(clock, store=Store):
    made = Node(
        ServerConfig(l1_bytes=2 * STEP_BYTES, eviction_policy="LRU", instance_id="here"),
        store(SlotAllocator(STEP_BYTES), LRU()),
        arena=ArenaShape(2 * STEP_BYTES, STEP_BYTES),
        deaths=NoDeaths(),
        clock=clock,
    )
    made.step_arrived(0, STEP_BYTES)
    return made


def client(made, role):
    hello = Hello(
        1,
        protocol_version=PROTOCOL_VERSION,
        role=role,
        client_id=os.urandom(16),
        instance_id="engine",
        pid=1,
        software="test",
        layouts=(layout(0),) if role == Role.WORKER else (),
    )
    return made.admit(hello, pidfd=None, connection=Open())[0]


def bound(made):
    requests = Requests(made)
    worker, scheduler = client(made, Role.WORKER), client(made, Role.SCHEDULER)
    requests.answer(scheduler, Bind(1, namespace(), CHUNK_TOKENS, (SHARD_BYTES,)))
    return requests, scheduler, worker


def test_a_bug_is_answered_logged_and_shown_as_unhealthy(clock, caplog):
    made = node(clock, BrokenStore)
    requests, scheduler, _ = bound(made)
    reply = requests.answer(scheduler, Lookup(5, keys(1)))
    assert (reply.id, reply.code) == (5, "error")
    assert "two owners of one slot" in reply.message
    assert "internal error request=lookup" in caplog.text
    assert "Traceback" in caplog.text
    page = requests.answer(scheduler, Status(6)).status
    assert page["is_healthy"] is False
    assert "restart the server" in page["kvcellar"]["parts"]["store"]
    assert page["metrics"]["kvcellar_healthy"]["store"] == 0
    assert page["metrics"]["kvcellar_error_replies_total"] == {"error": 1}


def test_a_broken_part_is_asked_for_each_page(clock):
    made = node(clock)
    requests, scheduler, _ = bound(made)
    reasons = [""]
    made.checks["arena"] = lambda: reasons[0]
    made.waits_for_bytes = lambda: 7
    assert requests.answer(scheduler, Status(1)).status["is_healthy"] is True
    reasons[0] = "growth failed"
    page = requests.answer(scheduler, Status(2)).status
    assert page["is_healthy"] is False
    assert page["storage_manager"]["l1_manager"]["is_healthy"] is False
    arena = {"steps_ready": 1, "steps": 2, "waits_for_bytes": 7, "ready_bytes": STEP_BYTES}
    assert page["kvcellar"]["arena"].items() >= arena.items()


def test_the_reported_copy_and_the_own_time_are_measured_apart(clock):
    made = node(clock)
    requests, scheduler, worker = bound(made)
    reserved = requests.answer(scheduler, Reserve(2, keys(1), b""))
    requests.answer(worker, Commit(3, reserved.reservation, 0, bytes(8), 0.25))
    assert made.meters.store_s.snapshot().sum_s == 0.25
    assert made.meters.commit_s.snapshot().sum_s == 0.0
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(MalformedError, match="copy_s"):
            requests.answer(worker, Commit(4, reserved.reservation, 0, bytes(8), seconds))


def test_a_status_stays_small_whatever_the_store_holds(clock):
    made = node(clock)
    requests, scheduler, worker = bound(made)
    before = len(encode(requests.answer(scheduler, Status(1))))
    reserved = requests.answer(scheduler, Reserve(2, keys(*range(200)), b""))
    requests.answer(worker, Commit(3, reserved.reservation, 0, bytes(8 * 200), 0.25))
    reply = requests.answer(scheduler, Status(4))
    assert reply.status["storage_manager"]["l1_manager"]["total_object_count"] == 200
    assert len(encode(reply)) < before + 100
    wire = decode_reply(encode(reply)[4:]).status
    assert wire["kvcellar"]["boot_id"] == made.boot_id.hex()
