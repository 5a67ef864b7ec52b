"""Log lines have a constant event and unambiguous fields, no secrets, and no floods."""

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.clock import FakeClock
from kvcellar.telemetry.logs import EventLog, OncePer, format_fields, speak_through


def test_an_event_and_its_fields_make_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="kvcellar.test"):
        EventLog("kvcellar.test").info("started", port=5555, l1="1.50 GiB", ratio=0.1234567, x=None)
    assert caplog.messages == ['started port=5555 l1="1.50 GiB" ratio=0.123457 x=None']


@pytest.fixture
def loggers():
    """Restore the loggers that a test sets up."""
    touched = [logging.getLogger(name) for name in ("kvcellar", "host")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in touched]
    yield touched
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_guests_lines_look_like_its_hosts_and_name_their_file(loggers):
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(message)s"))
    host = loggers[1]
    host.addHandler(handler)
    host.setLevel(logging.INFO)
    speak_through("host")
    speak_through("host")

    EventLog("kvcellar.test").info("connected", port=1)
    EventLog("kvcellar.test").debug("detail")

    assert output.getvalue() == "INFO test_logs.py connected port=1\n"


def test_a_host_without_handlers_changes_nothing(loggers):
    speak_through("host")
    assert loggers[0].propagate
    assert loggers[0].handlers == []


def test_a_level_that_is_off_costs_no_formatting(caplog):
    class Costly:
        def __str__(self):
            raise AssertionError("formatted")

    with caplog.at_level(logging.INFO, logger="kvcellar.test"):
        EventLog("kvcellar.test").debug("detail", value=Costly())
    assert caplog.messages == []


def test_secrets_are_masked_by_their_name():
    assert format_fields({"cache_salt": "tenant", "token_ids": [1], "password": "x"}) == (
        "cache_salt=*** token_ids=*** password=***"
    )


@given(st.text(max_size=40))
def test_no_value_breaks_out_of_its_line_or_its_quotes(text):
    line = format_fields({"a": text, "b": 1})
    assert line.endswith(" b=1")
    value = line.removeprefix("a=").removesuffix(" b=1")
    assert value.isprintable()
    quoted = value.startswith('"') and value.endswith('"') and '"' not in value[1:-1]
    assert quoted or not set(value) & set(' "=')


def test_an_event_that_a_peer_can_cause_passes_once_an_interval():
    clock = FakeClock()
    once = OncePer(clock, 60.0)
    assert [once.admit("zmq") for _ in range(4)] == [0, None, None, None]
    assert once.admit("http") == 0
    clock.advance(60.0)
    assert once.admit("zmq") == 3
    assert once.admit("zmq") is None


def test_the_number_of_subjects_is_bounded():
    clock = FakeClock()
    once = OncePer(clock, 60.0, subjects_max=2)
    for name in ("a", "b", "c"):
        assert once.admit(name) == 0
        clock.advance(1.0)
    assert once.admit("c") is None
    assert once.admit("b") is None
    assert once.admit("a") == 0
