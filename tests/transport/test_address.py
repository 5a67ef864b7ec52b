"""The address as users write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import ConfigError
from kvcellar.transport.address import TcpAddress, parse_server_address


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("localhost", 5555, TcpAddress("localhost", 5555)),
        ("tcp://localhost", "5555", TcpAddress("localhost", 5555)),
        ("TCP://cache-node_1.local/", " 5555 ", TcpAddress("cache-node_1.local", 5555)),
        ("tcp://10.0.0.7:6000", 6000, TcpAddress("10.0.0.7", 6000)),
        ("::1", 1, TcpAddress("::1", 1)),
        ("[::1]", 65535, TcpAddress("::1", 65535)),
        ("tcp://[::1]:5555", 5555, TcpAddress("::1", 5555)),
        ("0:0:0:0:0:0:0:1", 5555, TcpAddress("::1", 5555)),
        (" 127.0.0.1 ", 5555, TcpAddress("127.0.0.1", 5555)),
        ("node7", "5555", TcpAddress("node7", 5555)),
    ],
)
def test_what_people_write_is_understood(host, port, expected):
    assert parse_server_address(host, port) == expected


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("", "host='' is not a host"),
        ("   ", "is not a host"),
        ("http://localhost", "only tcp://"),
        ("ipc:///tmp/x", "only tcp://"),
        ("tcp://", "is not a host"),
        ("*", "0.0.0.0"),
        ("a b", "is not a host"),
        ("-x", "is not a host"),
        ("a..b", "is not a host"),
        ("a/b", "is not a host"),
        ("x" * 64, "is not a host"),
        (".".join(["x" * 60] * 5), "is not a host"),
        ("bücher", "is not a host"),
        ("256.1.1.1", "is not an IP address"),
        ("127.1", "is not an IP address"),
        (":::1", "is not an IP address"),
        ("[::1", "odd brackets"),
        ("[localhost]", "odd brackets"),
        ("[::1]5555", "odd brackets"),
        ("localhost:6000", "says port 6000 but port=5555"),
        ("localhost:", "host='localhost:' has no port"),
        ("localhost:x", "has no port"),
        (None, "is not text"),
        (5555, "is not text"),
    ],
)
def test_a_wrong_host_is_named_with_the_fix(host, says):
    with pytest.raises(ConfigError) as refusal:
        parse_server_address(host, 5555)
    assert says in str(refusal.value)
    assert "host=" in str(refusal.value)


@pytest.mark.parametrize(
    "port",
    [0, -1, 65536, "0", "", "x", "5555.0", "555555", "\u0665\u0665", True, None, 5.5, [5555]],
    ids=repr,
)
def test_a_wrong_port_is_named_with_the_fix(port):
    with pytest.raises(ConfigError, match=r"^port=.*from 1 to 65535"):
        parse_server_address("localhost", port)


def test_any_free_port_is_allowed_only_where_one_listens():
    assert parse_server_address("localhost", "0", port_min=0) == TcpAddress("localhost", 0)


@pytest.mark.parametrize("host", ["localhost", "10.0.0.7", "::1"])
def test_an_address_shown_is_an_address_accepted(host):
    address = TcpAddress(host, 5555)
    assert parse_server_address(str(address), 5555) == address


@given(st.text(max_size=30), st.text(max_size=6) | st.integers())
def test_nonsense_is_refused_in_one_way_only(host, port):
    try:
        address = parse_server_address(host, port)
    except ConfigError:
        return
    assert parse_server_address(str(address), address.port) == address
