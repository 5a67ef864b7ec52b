"""Who was asleep blames nobody for it: a server that was suspended kills none of its processes."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import pytest
from tests.server.disk import DiskServer
from tests.server.running import eventually, is_running

from kvcellar.clock import FakeClock
from kvcellar.server.awake import AwakeClock
from kvcellar.server.http_watch import HttpWatch
from kvcellar.server.tiers import HANG_S
from kvcellar.server.unused import UnusedWatch


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def awake(clock):
    return AwakeClock(clock)


def live(clock, awake, seconds):
    """Let time pass while the process runs: its ticks come."""
    for _ in range(int(seconds * 4)):
        clock.advance(0.25)
        awake.tick()


class TestTheClock:
    def test_it_goes_with_the_other_while_it_ticks(self, clock, awake):
        start_s = awake.monotonic_s()
        live(clock, awake, 30)
        clock.advance(0.2)
        assert awake.monotonic_s() - start_s == pytest.approx(30.2)

    def test_a_suspension_counts_as_a_second(self, clock, awake):
        start_s = awake.monotonic_s()
        live(clock, awake, 2)
        clock.advance(3600)
        assert awake.monotonic_s() - start_s == pytest.approx(3)
        awake.tick()
        live(clock, awake, 2)
        assert awake.monotonic_s() - start_s == pytest.approx(5)


class TestTheHttpProcess:
    @pytest.fixture
    def killed(self):
        return []

    @pytest.fixture
    def watch(self, awake, killed):
        child = SimpleNamespace(check=lambda: "", kill=lambda: killed.append(True))
        watch = HttpWatch(child, awake)
        watch.attached(SimpleNamespace(heard_s=awake.monotonic_s()))
        return watch

    def look(self, watch):
        async def once():
            watch.start()
            watch._look()
            watch.stop()

        asyncio.run(once())

    def test_one_that_is_silent_is_replaced(self, clock, awake, watch, killed):
        live(clock, awake, 10)
        assert "has been silent for 10 s" in watch.check()
        live(clock, awake, 11)
        self.look(watch)
        assert killed

    def test_it_is_not_blamed_for_what_was_slept_through(self, clock, awake, watch, killed):
        live(clock, awake, 1)
        clock.advance(60)
        awake.tick()
        self.look(watch)
        assert watch.check() == ""
        assert not killed


def test_a_server_that_slept_gives_its_engines_the_time_to_come_back(clock, awake):
    ended = []

    async def sleep_and_look(seconds):
        watch = UnusedWatch(5, lambda: False, lambda: ended.append(True), clock=awake)
        watch.start()
        clock.advance(seconds)
        awake.tick()
        watch._look()
        watch.stop()

    asyncio.run(sleep_and_look(600))
    assert not ended
    live(clock, awake, 4)
    asyncio.run(sleep_and_look(0.5))
    assert not ended


def test_a_suspended_server_keeps_its_processes(tmp_path):
    with DiskServer(tmp_path / "tier") as server, server.engine() as engine:
        engine.put(1)
        server.wait_written(1)
        children = server.children()
        assert len(children) == 2
        for pid in (server.process.pid, *children):
            os.kill(pid, signal.SIGSTOP)
        until_s = time.monotonic() + HANG_S + 1.5
        try:
            eventually(lambda: time.monotonic() > until_s, timeout_s=HANG_S + 10)
        finally:
            # Its own process before the others, as a scheduler may have it: it looks at them first.
            os.kill(server.process.pid, signal.SIGCONT)
            assert [engine.lookup(1).count for _ in range(2)] == [1, 1]
            for pid in children:
                os.kill(pid, signal.SIGCONT)
        eventually(lambda: server.status()["is_healthy"])
        assert all(is_running(pid) for pid in children)
        assert server.status_metrics()["kvcellar_tier_restarts_total"] == 0
        assert engine.look(1)[0] == 1
