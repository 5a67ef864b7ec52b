"""The configuration is made once, and every wrong value is refused with flag, value and fix."""

import json
import uuid

import msgspec
import pytest

from kvcellar.config.load import load_server
from kvcellar.config.server import ServerConfig, settings
from kvcellar.errors import ConfigError

NEEDED = ("--l1-size-gb", "2", "--eviction-policy", "LRU")


def load(*words):
    return load_server(words, program="test").config


def test_the_documented_defaults_are_the_defaults(monkeypatch):
    monkeypatch.delenv("KVCELLAR_LOG_LEVEL", raising=False)
    config = load(*NEEDED)
    assert uuid.UUID(config.instance_id).version == 4
    assert config == ServerConfig(
        l1_bytes=2 << 30,
        eviction_policy="LRU",
        host="localhost",
        port=5555,
        http_host="127.0.0.1",
        http_port=8080,
        chunk_tokens=256,
        instance_id=config.instance_id,
        socket_dir=None,
        client_uids=(),
        log_level="INFO",
    )


def test_of_a_flag_that_is_given_twice_the_last_counts():
    assert load(*NEEDED, "--port", "1", "--port", "2").port == 2


def test_two_starts_have_two_names():
    assert load(*NEEDED).instance_id != load(*NEEDED).instance_id


def test_every_flag_is_heard(tmp_path):
    config = load(
        *("--l1-size-gb", "0.5", "--eviction-policy", "noop", "--host", "tcp://0.0.0.0"),
        *("--port", "6555", "--http-host", "::1", "--http-port", "8090", "--chunk-size", "128"),
        *("--instance-id", "prefiller", "--socket-dir", str(tmp_path), "--log-level", "debug"),
        *("--client-uid", "1000", "--client-uid", "1001", "--l1-codec", "int8"),
        *("--stop-when-unused", "2.5"),
        *("--disk-path", str(tmp_path), "--disk-size-gb", "2", "--l2-adapter", '{"type":"a"}'),
        *("--l2-adapter", '{"type":"b"}', "--l2-store-policy", "skip_l1"),
        *("--l2-prefetch-policy", "retain", "--l2-prefetch-max-in-flight", "3"),
    )
    assert [json.loads(text) for text in config.tier_adapters()] == [
        {"type": "fs", "base_path": str(tmp_path), "max_capacity_gb": 2.0},
        {"type": "a"},
        {"type": "b"},
    ]
    assert (
        msgspec.structs.asdict(config).items()
        >= {
            "disk_path": str(tmp_path),
            "disk_bytes": 2 << 30,
            "l2_adapters": ('{"type":"a"}', '{"type":"b"}'),
            "l2_store_policy": "skip_l1",
            "l2_prefetch_policy": "retain",
            "l2_prefetches_max": 3,
            "l1_bytes": 1 << 29,
            "eviction_policy": "noop",
            "host": "0.0.0.0",
            "port": 6555,
            "http_host": "::1",
            "http_port": 8090,
            "chunk_tokens": 128,
            "l1_codec": "int8",
            "instance_id": "prefiller",
            "socket_dir": str(tmp_path),
            "client_uids": (1000, 1001),
            "stop_when_unused_s": 2.5,
            "log_level": "DEBUG",
        }.items()
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--l1-size-gb", "2"), ["--eviction-policy is missing", "LRU"]),
        (("--eviction-policy", "LRU"), ["--l1-size-gb is missing", "--l1-size-gb 20"]),
        ((*NEEDED, "--l1-size-gb", "lots"), ["--l1-size-gb lots", "number"]),
        (("--l1-size-gb", "lots", "--eviction-policy", "LRU"), ["--l1-size-gb lots", "number"]),
        (("--l1-size-gb", "nan", "--eviction-policy", "LRU"), ["--l1-size-gb nan"]),
        (("--l1-size-gb", "inf", "--eviction-policy", "LRU"), ["--l1-size-gb inf"]),
        (("--l1-size-gb", "1e300", "--eviction-policy", "LRU"), ["--l1-size-gb 1e300", "number"]),
        (("--l1-size-gb", "0", "--eviction-policy", "LRU"), ["more than 0"]),
        (("--l1-size-gb", "-1", "--eviction-policy", "LRU"), ["--l1-size-gb -1", "more than 0"]),
        (("--l1-size-gb", "2", "--eviction-policy", "lru"), ["did you mean LRU?"]),
        (("--l1-size-gb", "2", "--eviction-policy", "x"), ["choose LRU or IsolatedLRU or noop"]),
        (("--l1-size-gb", "2", "--eviction-policy", "ARC"), ["not yet", "use LRU"]),
        ((*NEEDED, "--port", "65536"), ["--port 65536", "1 to 65535"]),
        ((*NEEDED, "--port", "x"), ["--port x"]),
        ((*NEEDED, "--http-port", "-1"), ["--http-port -1"]),
        ((*NEEDED, "--host", "a b"), ["--host a b", "host name"]),
        ((*NEEDED, "--host", "1.2.3.4:5"), ["--host 1.2.3.4:5", "without a port"]),
        ((*NEEDED, "--http-host", ""), ["--http-host"]),
        ((*NEEDED, "--l1-codec", "int9"), ["--l1-codec int9", "raw or int8"]),
        ((*NEEDED, "--disk-size-gb", "2"), ["--disk-size-gb", "--disk-path"]),
        ((*NEEDED, "--disk-path", ""), ["--disk-path", "folder"]),
        ((*NEEDED, "--l2-adapter", "{type:fs}"), ["--l2-adapter", "JSON", '"type":"fs"']),
        ((*NEEDED, "--l2-adapter", "{}"), ["--l2-adapter", '"type"']),
        ((*NEEDED, "--l2-store-policy", "x"), ["--l2-store-policy x", "default or skip_l1"]),
        ((*NEEDED, "--l2-prefetch-policy", "x"), ["--l2-prefetch-policy x", "default or retain"]),
        ((*NEEDED, "--l2-prefetch-max-in-flight", "0"), ["--l2-prefetch-max-in-flight 0"]),
        ((*NEEDED, "--chunk-size", "0"), ["--chunk-size 0", "from 1"]),
        ((*NEEDED, "--chunk-size", "2.5"), ["--chunk-size 2.5"]),
        ((*NEEDED, "--instance-id", "a\nb"), ["--instance-id", "printable"]),
        ((*NEEDED, "--client-uid", "root"), ["--client-uid root", "id -u"]),
        ((*NEEDED, "--socket-dir", ""), ["--socket-dir", "folder"]),
        ((*NEEDED, "--log-level", "warn"), ["--log-level warn", "did you mean WARNING?"]),
        ((*NEEDED, "--host", "127.0.0.1", "--port", "80", "--http-port", "80"), ["choose two"]),
    ],
)
def test_a_wrong_value_names_flag_value_and_fix(words, parts):
    with pytest.raises(ConfigError) as caught:
        load(*words)
    for part in parts:
        assert part in str(caught.value)


def test_the_log_level_may_come_from_the_environment_and_a_flag_wins(monkeypatch):
    monkeypatch.setenv("KVCELLAR_LOG_LEVEL", "error")
    assert load(*NEEDED).log_level == "ERROR"
    assert load(*NEEDED, "--log-level", "DEBUG").log_level == "DEBUG"
    monkeypatch.setenv("KVCELLAR_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="KVCELLAR_LOG_LEVEL loud"):
        load(*NEEDED)


def test_every_setting_says_what_it_does_and_when_to_change_it():
    assert [setting.field for setting in settings()] == [
        field.name for field in msgspec.structs.fields(ServerConfig)
    ]
    for setting in settings():
        assert setting.description.endswith(".")
        assert setting.change.endswith(".")
        assert setting.flag.startswith("--")
