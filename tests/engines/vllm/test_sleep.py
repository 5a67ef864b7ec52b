"""An engine that falls asleep gives its pages away, and no copy may touch them until it wakes."""

import threading

import pytest
from tests.engines.vllm.worker_rig import SHARD_BYTES, WAIT_S, Rig, Scheduling, done, timeless
from tests.server.running import RunningServer

from kvcellar.engines.access import PageAccess
from kvcellar.engines.vllm import copying
from kvcellar.engines.vllm.metadata import JobResult
from kvcellar.errors import TimeoutExpiredError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running
        assert "Traceback" not in running.log()


@pytest.fixture
def closing():
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def pair(server, closing, request):
    """A worker half and the scheduler's part of its jobs."""
    rig = Rig(server.port, instance=request.node.name)
    scheduling = Scheduling(server.port, instance=request.node.name)
    closing.extend([rig, scheduling])
    rig.start()
    scheduling.connect()
    rig.connected(scheduling.session.boot_id)
    return rig, scheduling


def test_jobs_end_without_a_copy_until_the_engine_wakes_up(pair):
    rig, scheduling = pair
    kept = scheduling.store_job([1], [1, 2])
    rig.step(stores=[kept])
    assert timeless(rig.result(kept.job_id)) == done(SHARD_BYTES)
    load, store = scheduling.load_job([1], [11, 12]), scheduling.store_job([2], [3, 4])
    before = rig.blocks(range(24))
    for _ in range(2):
        rig.worker.leave_pages()

    rig.step(loads=[load], stores=[store])
    assert rig.received() == ({"load"}, {11, 12})
    for job in (load, store):
        assert timeless(rig.result(job.job_id)) == JobResult(ranks_failed=1)
    assert rig.blocks(range(24)) == before

    for _ in range(2):
        rig.worker.enter_pages()
    again = scheduling.load_job([1], [11, 12])
    rig.step(loads=[again])
    assert rig.received() == ({"load"}, set())
    assert rig.blocks([11, 12]) == rig.blocks([1, 2])


def test_falling_asleep_waits_for_the_copy_that_runs(pair):
    rig, scheduling = pair
    job = scheduling.store_job([11], [1, 2])
    (copier,), entered, left = (
        rig.worker._copying._copies._copiers,
        threading.Event(),
        threading.Event(),
    )
    gate, copy = threading.Event(), copier.store

    def held_up(*args, **options):
        entered.set()
        assert gate.wait(WAIT_S)
        return copy(*args, **options)

    copier.store = held_up
    rig.step(stores=[job])
    assert entered.wait(WAIT_S)
    sleeper = threading.Thread(target=lambda: (rig.worker.leave_pages(), left.set()))
    sleeper.start()
    assert not left.wait(0.05)
    gate.set()
    assert left.wait(WAIT_S)
    sleeper.join()
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)


def test_pages_that_a_copy_does_not_leave_are_not_given_away(pair, monkeypatch):
    rig, _ = pair
    monkeypatch.setattr(copying, "LEAVE_TIMEOUT_S", 0.01)
    with rig.worker._copying._pages.using(), pytest.raises(TimeoutExpiredError, match="KV cache"):
        rig.worker.leave_pages()
    rig.worker.leave_pages()


def test_who_comes_while_the_pages_are_closed_is_told_and_not_waited_for():
    pages = PageAccess()
    assert pages.close(timeout_s=0)
    with pages.using() as is_open:
        assert not is_open
        assert pages.close(timeout_s=0)
    pages.open()
    with pages.using() as is_open:
        assert is_open
