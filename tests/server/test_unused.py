"""A server that is to stop when nobody uses it: not a moment before, and without being told."""

import time

import pytest
from tests.server.running import WAIT_S, RunningServer, eventually
from tests.server.test_lifecycle import refused


def test_it_stops_in_order_when_no_engine_came():
    with RunningServer("--stop-when-unused", "0.3") as server:
        assert server.process.wait(WAIT_S) == 0
        assert "no engine uses this server" in server.log()
        assert " stopped " in server.log()


def test_an_engine_keeps_it_and_its_end_begins_the_wait():
    with RunningServer("--stop-when-unused", "0.4") as server:
        with server.engine() as engine:
            engine.store(1)
            used_until_s = time.monotonic() + 1.0
            eventually(lambda: time.monotonic() > used_until_s)
            assert server.process.poll() is None
            left_s = time.monotonic()
        assert server.process.wait(WAIT_S) == 0
        assert time.monotonic() - left_s >= 0.3


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_a_time_that_is_none_is_refused(text):
    assert f"--stop-when-unused {text}: write seconds" in refused(
        "--l1-size-gb", "1", f"--stop-when-unused={text}"
    )
