"""Order, bounds and ends of the copy threads."""

import threading

from kvcellar.engines.lane import Lane

WAIT_S = 10.0


def test_jobs_run_in_order_on_one_thread_with_a_tick_after_each():
    done, over = [], threading.Event()

    def run(job):
        done.append((job, threading.current_thread().name))
        if job == 3:
            over.set()

    ticks = []
    lane = Lane("a lane", run, depth_max=8, tick=lambda: ticks.append(len(done)))
    assert [lane.offer(job) for job in (1, 2, 3)] == [True, True, True]
    assert over.wait(WAIT_S)
    lane.stop()
    assert lane.join(WAIT_S)
    assert done == [(1, "a lane"), (2, "a lane"), (3, "a lane")]
    assert {1, 2} <= set(ticks)


def test_a_full_lane_refuses_at_once():
    busy, go = threading.Event(), threading.Event()

    def run(_job):
        busy.set()
        go.wait(WAIT_S)

    lane = Lane("a lane", run, depth_max=2)
    lane.offer("running")
    assert busy.wait(WAIT_S)
    assert [lane.offer(job) for job in "abc"] == [True, True, False]
    go.set()
    lane.stop()
    assert lane.join(WAIT_S)


def test_a_job_that_fails_is_logged_and_the_next_one_runs(caplog):
    done = threading.Event()

    def run(job):
        if job == "bad":
            raise ValueError("what went wrong")
        done.set()

    lane = Lane("a lane", run, depth_max=2)
    lane.offer("bad")
    lane.offer("good")
    assert done.wait(WAIT_S)
    lane.stop()
    assert lane.join(WAIT_S)
    assert "what went wrong" in caplog.text


def test_a_stopped_lane_drops_what_waits_and_takes_no_more():
    busy, go, done = threading.Event(), threading.Event(), []

    def run(job):
        done.append(job)
        busy.set()
        go.wait(WAIT_S)

    lane = Lane("a lane", run, depth_max=2)
    lane.offer("running")
    assert busy.wait(WAIT_S)
    lane.offer("waiting")
    lane.stop()
    assert not lane.join(0.0)
    assert not lane.offer("late")
    go.set()
    assert lane.join(WAIT_S)
    assert done == ["running"]


def test_an_idle_lane_ends_at_once():
    lane = Lane("a lane", lambda _job: None, depth_max=1)
    lane.stop()
    assert lane.join(0.2)
    lane.stop()
