"""Programs are started, waited for and ended with all that they started."""

import os

import pytest

from kvcellar.bench.loads import rates
from kvcellar.bench.machine import memory_of
from kvcellar.bench.programs import BenchError, Programs, session_members
from kvcellar.clock import SystemClock


@pytest.fixture
def programs(tmp_path):
    started = Programs(tmp_path / "logs", SystemClock())
    yield started
    started.stop_all()


def test_a_run_gives_its_last_line_and_sees_its_environment(programs):
    words = ["sh", "-c", 'echo first; echo "$GREETING"']
    line = programs.run("greet", words, timeout_s=10, environment={"GREETING": "hello"})
    assert line == "hello"


def test_a_failed_run_shows_its_output_and_where_the_rest_is(programs):
    words = ["sh", "-c", "echo reading; echo no such thing; exit 3"]
    with pytest.raises(BenchError) as failed:
        programs.run("broken", words, timeout_s=10)
    assert failed.value.summary.startswith("broken ended: no such thing; /")
    assert failed.value.summary.endswith("logs/broken.log")
    assert "reading" in str(failed.value)


def test_a_run_that_takes_too_long_is_ended(programs):
    with pytest.raises(BenchError, match="took more than"):
        programs.run("sleeper", ["sleep", "60"], timeout_s=0.05)


def test_stopping_ends_also_what_the_program_started(programs):
    program = programs.start("parent", ["sh", "-c", "sleep 60 & trap '' TERM; wait; wait"])
    session = program.process.pid
    programs.wait_until(program, lambda: len(session_members(session)) > 1, timeout_s=10)
    program.process.kill()
    programs.stop_all()
    assert session_members(session) == []


def test_waiting_for_a_program_that_ended_shows_its_output(programs):
    program = programs.start("brief", ["sh", "-c", "echo gone"])
    with pytest.raises(BenchError, match="gone"):
        programs.wait_until(program, lambda: False, timeout_s=10)


def test_the_rates_of_a_load_are_told_from_its_log():
    assert rates("connected to server\n0.990\n1\n12.5 GB\n-3\n") == [0.99, 1.0]


def test_the_memory_of_a_process_is_read():
    memory = memory_of(os.getpid())
    assert 0 < memory["Private"] <= memory["Pss"] <= memory["Rss"]
    assert memory["Rss"] % 4096 == 0
