"""The worker half while servers die, freeze, are absent or hang up."""

import signal
import time

import pytest
from tests.engines.vllm.worker_rig import (
    SHARD_BYTES,
    WAIT_S,
    Gate,
    Rig,
    Scheduling,
    done,
    timeless,
    until,
)
from tests.server.running import RunningServer

from kvcellar.engines import shelf
from kvcellar.engines.copy_cpu import page_kernels
from kvcellar.engines.vllm import settlements
from kvcellar.engines.vllm.metadata import GroupLoad, GroupStore, JobResult, LoadJob, StoreJob
from kvcellar.errors import PeerClosedError

pytestmark = pytest.mark.engine

FAILED = JobResult(ranks_done=0, ranks_failed=1)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    page_kernels()  # Once in a process, and not in the time of the first test.


@pytest.fixture
def server():
    with RunningServer() as running:
        yield running


@pytest.fixture
def closing():
    """A list of things that are closed at the end."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


def started(server, closing, **options):
    rig = Rig(server.port, **options).start()
    closing.append(rig)
    scheduling = Scheduling(server.port).connect()
    closing.append(scheduling)
    rig.connected(scheduling.session.boot_id)
    return rig, scheduling


def store(rig, scheduling, numbers, blocks):
    job = scheduling.store_job(numbers, blocks)
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES * len(numbers))
    until(lambda: scheduling.lookup(*numbers).count == len(numbers))


def test_loads_that_wait_when_the_server_dies_are_served_from_its_arena(server, closing):
    rig, scheduling = started(server, closing)
    store(rig, scheduling, [1, 2], [1, 2, 3, 4])
    first = scheduling.load_job([1, 2], [11, 12, 13, 14], request="first")
    second = scheduling.load_job([1], [15, 16], request="second")
    gate = Gate(rig, closing)
    rig.step(loads=[first])
    server.kill()
    until(lambda: rig.link.session is None)
    rig.step(loads=[second])  # Granted before the death, handed over after it.
    gate.open()
    requests = set()
    while requests != {"first", "second"}:
        received, spoiled = rig.received()
        requests |= received
        assert spoiled == set()
    assert rig.blocks([11, 12, 13, 14, 15, 16]) == rig.blocks([1, 2, 3, 4, 1, 2])


def test_stores_of_a_dead_server_are_dropped_and_reported(server, closing):
    rig, scheduling = started(server, closing)
    job = scheduling.store_job([1], [1, 2])
    server.kill()
    until(lambda: rig.link.session is None)
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == FAILED


def test_a_new_server_is_met_without_restart_and_the_old_arena_goes(server, closing):
    rig, scheduling = started(server, closing)
    store(rig, scheduling, [1], [1, 2])
    old = scheduling.load_job([1], [11, 12])
    port, old_arena = server.port, rig.arena
    scheduling.close()
    server.kill()
    with RunningServer("--port", str(port)) as successor:
        scheduling = Scheduling(successor.port).connect()
        closing.append(scheduling)
        rig.connected(scheduling.session.boot_id)
        # Nothing reads the old arena any more, so its memory does not stay.
        until(lambda: old_arena.is_closed)
        rig.step(loads=[old])
        assert rig.received() == ({"load"}, {11, 12})
        store(rig, scheduling, [1], [5, 6])
        rig.step(loads=[scheduling.load_job([1], [13, 14])])
        assert rig.received() == ({"load"}, set())
        assert rig.blocks([13, 14]) == rig.blocks([5, 6])
        new_arena = rig.arena
        rig.close()
        assert new_arena.is_closed


def test_loads_that_wait_when_a_new_server_comes_still_end_on_the_old_arena(server, closing):
    rig, scheduling = started(server, closing)
    store(rig, scheduling, [1], [1, 2])
    job = scheduling.load_job([1], [11, 12])
    gate = Gate(rig, closing)
    rig.step(loads=[job])
    port, old = server.port, rig.boot_id
    server.kill()
    with RunningServer("--port", str(port)):
        until(lambda: rig.boot_id != old)
        gate.open()
        assert rig.received() == ({"load"}, set())
        assert rig.blocks([11, 12]) == rig.blocks([1, 2])


def test_loads_that_wait_too_long_lose_the_old_arena_and_are_computed(server, closing, monkeypatch):
    monkeypatch.setattr(shelf, "RETIRED_S", 0.1)
    rig, scheduling = started(server, closing)
    store(rig, scheduling, [1], [1, 2])
    jobs = [scheduling.load_job([1], [11, 12], request=f"r{n}") for n in range(2)]
    gate = Gate(rig, closing)
    rig.step(loads=jobs)
    port, old_arena = server.port, rig.arena
    server.kill()
    with RunningServer("--port", str(port)):
        # The memory is the new server's although jobs still wait for it.
        until(lambda: old_arena.is_closed)
        gate.open()
        assert [timeless(rig.result(job.job_id)) for job in jobs] == [FAILED, FAILED]
        rig.close()


def test_without_a_server_registration_returns_at_once_and_jobs_end_at_once(closing):
    with RunningServer() as probe:
        port = probe.port
    rig = Rig(port)
    closing.append(rig)
    started_s = time.monotonic()
    rig.start()
    assert time.monotonic() - started_s < 0.5
    rig.step(
        loads=[LoadJob(1, "r", bytes(16), 1, (GroupLoad(0, bytes(32), bytes(16), [3, 4]),))],
        stores=[
            StoreJob(2, "r", bytes(16), 1, (0,), (GroupStore(0, bytes(32), bytes(8), [1, 2], [0]),))
        ],
    )
    assert rig.worker.collect() == {"r"}
    assert rig.worker.load_errors() == {3, 4}
    assert rig.worker.report().jobs == {1: FAILED, 2: FAILED}
    with RunningServer("--port", str(port)) as server:
        scheduling = Scheduling(server.port).connect()
        closing.append(scheduling)
        rig.connected(scheduling.session.boot_id)
        store(rig, scheduling, [1], [1, 2])


def test_a_frozen_server_holds_up_no_report_and_learns_of_the_store_when_it_thaws(
    server, closing, monkeypatch
):
    monkeypatch.setattr(settlements, "ANSWER_TIMEOUT_S", 0.2)
    rig, scheduling = started(server, closing)
    job = scheduling.store_job([1], [1, 2])
    server.process.send_signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        rig.step(stores=[job])
        assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)
        assert time.monotonic() - started_s < 1.0
        # Three silent deadlines later nobody asks any more.
        until(lambda: rig.link.session is None)
    finally:
        server.process.send_signal(signal.SIGCONT)
    until(lambda: scheduling.lookup(1).count == 1)
    until(lambda: not rig.worker._copying._settlements.count)


def test_jobs_go_on_over_a_new_connection_to_the_same_server(server, closing):
    rig, scheduling = started(server, closing)
    good, bad = scheduling.store_job([1], [1, 2]), scheduling.store_job([2], [3, 99])
    gate = Gate(rig, closing)
    rig.step(stores=[good, bad])
    assert gate.reached.wait(WAIT_S)
    lost = rig.link.session
    lost.close()
    until(lambda: rig.link.session is not None and rig.link.session is not lost)
    gate.open()
    assert timeless(rig.result(good.job_id)) == done(SHARD_BYTES)
    assert timeless(rig.result(bad.job_id)) == FAILED
    until(lambda: scheduling.status()["kvcellar"]["reservations"] == 0)
    assert [scheduling.lookup(number).count for number in (1, 2)] == [1, 0]


@pytest.mark.parametrize("what", ["request", "answer"])
def test_a_commit_is_said_until_it_is_answered_and_counts_once(server, closing, monkeypatch, what):
    rig, scheduling = started(server, closing)
    session, calls = rig.link.session, []
    call = session.call

    def lose_the_first(make, **options):
        calls.append(make)
        if len(calls) > 1:
            return call(make, **options)
        if what == "answer":
            call(make, **options)
        session.close()
        raise PeerClosedError("lost on the way")

    monkeypatch.setattr(session, "call", lose_the_first)
    job = scheduling.store_job([1], [1, 2])
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)
    until(lambda: scheduling.lookup(1).count == 1)
    until(lambda: not rig.worker._copying._settlements.count)
    assert len(calls) == 1
    assert scheduling.status()["kvcellar"]["reservations"] == 0
