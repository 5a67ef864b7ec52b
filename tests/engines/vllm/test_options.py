"""What a user may write in `kv_connector_extra_config`, and what a mistake is answered with."""

from pathlib import Path

import pytest

from kvcellar.engines.vllm.options import _HOST, _PORT, OPTION_KEYS, ConnectorOptions, read_options
from kvcellar.errors import ConfigError
from kvcellar.transport.address import TcpAddress

pytestmark = pytest.mark.engine


def test_without_keys_a_server_on_this_host_is_looked_for():
    assert read_options({}).servers == (TcpAddress("localhost", 5555),)


def test_every_key_is_read():
    options = read_options(
        {
            "kvcellar.host": "tcp://10.0.0.7",
            "kvcellar.port": "6555",
            "kvcellar.timeout_s": 20,
            "kvcellar.heartbeat_s": 2.5,
            "kvcellar.lookup_timeout_s": 0.25,
            "kvcellar.fetch_timeout_s": 0,
            "kvcellar.eager_prefetch": True,
            "kvcellar.save_decode_cache": True,
            "kvcellar.load_failure_policy": "fail",
            "kvcellar.gate": False,
            "kvcellar.testing.copy_delay_s": 0,
        }
    )
    assert options == ConnectorOptions(
        servers=(TcpAddress("10.0.0.7", 6555),),
        timeout_s=20.0,
        heartbeat_s=2.5,
        lookup_timeout_s=0.25,
        fetch_timeout_s=0.0,
        eager_prefetch=True,
        save_decode_cache=True,
        load_failure_policy="fail",
        gate=False,
        copy_delay_s=0.0,
    )


@pytest.mark.parametrize(
    "value",
    [
        "tcp://a:1,tcp://b:2",
        " tcp://a:1 , b:2, ",
        ["tcp://a:1", "b:2"],
        ("a:1", "b:2"),
    ],
)
def test_several_servers_are_a_list_or_a_text_and_win_over_host_and_port(value):
    both = {"kvcellar.server_urls": value, "kvcellar.host": "c", "kvcellar.port": 3}
    assert read_options(both).servers == (TcpAddress("a", 1), TcpAddress("b", 2))


def test_several_servers_are_not_started_by_the_engine():
    both = {"kvcellar.server_urls": "a:1,b:2", "kvcellar.autostart": True}
    with pytest.raises(ValueError, match=r"autostart starts one server, .*server_urls names 2: "):
        read_options(both)
    assert read_options({**both, "kvcellar.server_urls": "a:1"}).autostart


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("kvcellar.prot", "kvcellar.port"),
        ("kvcellar.heartbeats", "kvcellar.heartbeat_s"),
        ("port", "kvcellar.port"),
        ("lmcache.mp.port", "kvcellar.port"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_the_one_that_was_meant(key, meant):
    with pytest.raises(ConfigError) as refusal:
        read_options({key: 1})
    assert repr(key) in str(refusal.value)
    assert f"did you mean {meant!r}?" in str(refusal.value)


def test_a_key_of_lmcache_is_sent_to_its_connector():
    with pytest.raises(ConfigError, match="LMCacheMPConnector"):
        read_options({"lmcache.mp.mq_timeout": 1})


def test_a_key_like_no_other_is_answered_with_all_there_are():
    with pytest.raises(ConfigError, match=r"known keys: kvcellar\.autostart, .*timeout_s"):
        read_options({"banana": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvcellar.host", 7),
        ("kvcellar.host", "a host"),
        ("kvcellar.host", "zmq://localhost"),
        ("kvcellar.port", "http"),
        ("kvcellar.port", 0),
        ("kvcellar.port", 70_000),
        ("kvcellar.port", True),
        ("kvcellar.port", 1.5),
        ("kvcellar.server_urls", ""),
        ("kvcellar.server_urls", []),
        ("kvcellar.server_urls", 5555),
        ("kvcellar.server_urls", ["tcp://a:1", 2]),
        ("kvcellar.server_urls", "tcp://a"),
        ("kvcellar.server_urls", "tcp://a:1,tcp://b:0"),
        ("kvcellar.server_urls", "http://a:1"),
        ("kvcellar.server_urls", "tcp://a:1,a:1"),
        ("kvcellar.timeout_s", "soon"),
        ("kvcellar.timeout_s", 0),
        ("kvcellar.timeout_s", -1),
        ("kvcellar.timeout_s", float("nan")),
        ("kvcellar.timeout_s", float("inf")),
        ("kvcellar.timeout_s", True),
        ("kvcellar.timeout_s", None),
        ("kvcellar.heartbeat_s", []),
        ("kvcellar.eager_prefetch", "true"),
        ("kvcellar.save_decode_cache", 1),
        ("kvcellar.load_failure_policy", "retry"),
        ("kvcellar.testing.copy_delay_s", -0.1),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_key(key, value):
    with pytest.raises(ConfigError) as refusal:
        read_options({key: value})
    assert key in str(refusal.value)
    assert str(value) in str(refusal.value) or repr(value) in str(refusal.value)


def test_a_host_and_a_port_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"kvcellar\.host and kvcellar\.port"):
        read_options({"kvcellar.host": "localhost:1", "kvcellar.port": 2})


def test_every_key_is_documented_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "connector.md").read_text(encoding="utf-8")
    for key, field in OPTION_KEYS.items():
        defaults = {"host": _HOST, "port": _PORT, "server_urls": ""}
        default = defaults[field] if field in defaults else getattr(ConnectorOptions(), field)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        cells = next(line for line in page.splitlines() if line.startswith(f"| `{key}` "))
        shown = {"False": "false", "True": "true", "": "none"}.get(shown, shown)
        assert cells.split("|")[2].strip(" `") == shown, key
