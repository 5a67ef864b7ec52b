"""Mistakes in what a client is told are found before anything is dialled."""

import pytest
from tests.client.conftest import LAYOUT

from kvcellar.client.options import ClientOptions, Identity
from kvcellar.errors import ConfigError
from kvcellar.protocol.messages import PROTOCOL_VERSION, Hello
from kvcellar.transport.address import TcpAddress


def test_the_guides_form_of_an_address_is_understood():
    options = ClientOptions(host="tcp://localhost", port="5555")
    assert options.address == TcpAddress("localhost", 5555)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", "http://x"),
        ("port", "x"),
        ("heartbeat_s", 0),
        ("heartbeat_s", -1.0),
        ("heartbeat_s", 0.009),
        ("heartbeat_s", float("nan")),
        ("heartbeat_s", "10"),
        ("timeout_s", float("inf")),
        ("timeout_s", 86_401),
        ("connect_timeout_s", None),
        ("connect_timeout_s", True),
    ],
)
def test_a_wrong_option_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}="):
        ClientOptions(**{field: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "boss"}, "role="),
        ({"instance_id": "x" * 4097}, "instance_id"),
        ({"software": "x" * 4097}, "software"),
        ({"model": "x" * 4097}, "model"),
        ({"world_size": 0}, "world_size="),
        ({"world_size": 1025}, "world_size="),
        ({"rank": 1}, "rank=1"),
        ({"rank": -1}, "rank=-1"),
        ({"role": "worker"}, "layout"),
        ({"layouts": (LAYOUT,)}, "layout"),
    ],
)
def test_a_wrong_identity_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        Identity(**{"role": "scheduler", "instance_id": "i", "software": "s"} | fields)


def test_the_hello_says_who_the_client_is():
    identity = Identity("worker", "i", "s", model="m", rank=1, world_size=2, layouts=(LAYOUT,))
    assert identity.hello(7, client_id=b"c" * 16, pid=99) == Hello(
        7, PROTOCOL_VERSION, "worker", b"c" * 16, "i", 99, "s", "m", 1, 2, (LAYOUT,)
    )
