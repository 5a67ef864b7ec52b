"""A foreign client is recognised by its first bytes and told what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.protocol.frames import PREAMBLE, FrameReader, encode, explain_foreign
from kvcellar.protocol.messages import Lookup, Ping

ZMQ_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL"


def test_a_zmq_greeting_is_told_which_plugin_to_use():
    assert "kv_connector_module_path" in explain_foreign(ZMQ_GREETING)
    assert "ZeroMQ" in explain_foreign(ZMQ_GREETING[:8])


@pytest.mark.parametrize("method", [b"GET / HTTP/1.1", b"POST /x ", b"PUT /xyz", b"HEAD /ab"])
def test_an_http_client_is_told_the_http_port(method):
    assert "--http-port" in explain_foreign(method)


def test_a_tls_client_is_told_that_the_protocol_is_plain():
    assert "plain" in explain_foreign(b"\x16\x03\x01\x02\x00\x01\x00\x01")


@given(st.binary(max_size=40))
def test_any_first_bytes_get_an_explanation(first_bytes):
    assert explain_foreign(first_bytes)


def test_the_preamble_is_none_of_the_foreign_greetings():
    assert explain_foreign(PREAMBLE) == explain_foreign(b"anything else")


def test_a_frame_that_is_taken_first_does_not_disturb_the_next():
    """A session answers one request and may be closed before it takes the next."""
    reader = FrameReader()
    first, second = encode(Ping(1)), encode(Lookup(2, b"k" * 32))
    bodies = reader.feed(first + second)
    assert next(bodies) == first[4:]
    bodies.close()
    assert list(reader.feed(b"")) == [second[4:]]
