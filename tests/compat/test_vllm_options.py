"""LMCache's keys, as its documents write them."""

import pytest

from kvcellar.compat.vllm_options import read_lmcache_options
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.errors import ConfigError
from kvcellar.transport.address import TcpAddress

pytestmark = pytest.mark.engine


def test_the_guides_keys_are_translated():
    options, notes = read_lmcache_options(
        {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": "6555",
            "lmcache.mp.mq_timeout": 60,
            "lmcache.mp.heartbeat_interval": 5.0,
            "lmcache.mp.eager_prefetch": True,
            "lmcache.mp.save_decode_cache": True,
        }
    )
    assert notes == ()
    assert options == ConnectorOptions(
        servers=(TcpAddress("localhost", 6555),),
        timeout_s=60.0,
        heartbeat_s=5.0,
        eager_prefetch=True,
        save_decode_cache=True,
    )


def test_our_own_keys_may_stand_beside_them():
    options, _ = read_lmcache_options(
        {"lmcache.mp.port": 1, "kvcellar.load_failure_policy": "fail", "kvcellar.port": "1"}
    )
    assert (options.servers[0].port, options.load_failure_policy) == (1, "fail")


def test_two_keys_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"lmcache\.mp\.port=1 and kvcellar\.port=2"):
        read_lmcache_options({"lmcache.mp.port": 1, "kvcellar.port": 2})


def test_a_mistyped_key_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match=r"'lmcache\.mp\.prot'.*mean 'lmcache\.mp\.port'\?"):
        read_lmcache_options({"lmcache.mp.prot": 6555})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lmcache.mp.mp_transfer_mode", "auto"),
        ("lmcache.mp.hash_algorithm", "blake3"),
        ("lmcache.mp.lazy_offload", True),
        ("lmcache_rpc_port", "producer1"),
    ],
)
def test_a_key_that_means_nothing_here_gets_one_line(key, value):
    options, (note,) = read_lmcache_options({key: value})
    assert options == ConnectorOptions()
    assert note.startswith(f"{key}={value!r} has no effect: ")


@pytest.mark.parametrize("value", ["tcp://a:1,tcp://b:2", ["tcp://a:1", "tcp://b:2"]])
def test_several_servers_win_over_host_and_port(value):
    options, notes = read_lmcache_options(
        {"lmcache.mp.host": "c", "lmcache.mp.port": "3", "lmcache.mp.server_urls": value}
    )
    assert (options.servers, notes) == ((TcpAddress("a", 1), TcpAddress("b", 2)), ())


def test_a_list_of_one_server_is_its_address():
    options, _ = read_lmcache_options({"lmcache.mp.server_urls": "tcp://somewhere:6555,"})
    assert options == ConnectorOptions(servers=(TcpAddress("somewhere", 6555),))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("lmcache.mp.server_urls", "", "names no server"),
        ("lmcache.mp.server_urls", "tcp://a:1,tcp://a:1", "names tcp://a:1 twice"),
        ("lmcache.mp.server_urls", "tcp://a", "write the port too"),
        ("lmcache.mp.server_urls", 5555, "write addresses"),
        ("lmcache.mp.autostart", 1, "write true or false"),
        ("lmcache.mp.save_decode_cache", "true", "write true or false"),
        ("lmcache.mp.port", "http", "write a port"),
        ("lmcache.mp.mq_timeout", "soon", "write seconds"),
        ("lmcache.mp.host", 7, "write a text, as in 'localhost'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_key_and_the_reason(key, value, reason):
    with pytest.raises(ConfigError) as refusal:
        read_lmcache_options({key: value})
    assert str(refusal.value).startswith(key)
    assert reason in str(refusal.value)


def test_an_autostart_under_lmcaches_name_starts_lmcaches_server():
    assert read_lmcache_options({"lmcache.mp.autostart": False}) == (ConnectorOptions(), ())
    keys = {
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": "--l1-size-gb 20 --max-workers 2",
        "lmcache.mp.autostart.wait_timeout": 30,
    }
    expected = ConnectorOptions(
        autostart=True,
        autostart_server_args="--l1-size-gb 20 --max-workers 2",
        autostart_wait_s=30.0,
        server_module="kvcellar.compat.lmcache_cli",
    )
    assert read_lmcache_options(keys) == (expected, ())
