"""The configuration is shown by its flags, in LMCache's groups, and without a secret."""

import json

from kvcellar.config.load import load_server
from kvcellar.config.server import settings
from kvcellar.config.shown import config_page, without_secrets

NEEDED = ("--l1-size-gb", "1", "--eviction-policy", "LRU")


def page(*words):
    return config_page(load_server([*NEEDED, *words], program="test").config)


def test_every_setting_is_shown_once_where_lmcache_shows_it():
    shown = page("--port", "7", "--chunk-size", "512", "--log-misses")
    assert set(shown) == {"mp", "storage_manager", "observability", "http", "coordinator"}
    assert sum(len(group) for group in shown.values()) == len(settings())
    assert (shown["mp"]["port"], shown["mp"]["chunk_size"]) == (7, 512)
    assert shown["storage_manager"]["l1_size_bytes"] == 1 << 30
    assert shown["storage_manager"]["eviction_policy"] == "LRU"
    assert shown["http"]["http_port"] == 8080
    assert shown["observability"]["log_misses"] is True
    assert json.loads(json.dumps(shown)) == shown


def test_secrets_are_masked_wherever_they_stand():
    found = without_secrets(
        {
            "password": "p1",
            "base_path": "/data",
            "nested": [{"aws_secret_access_key": "p2", "url": "redis://user:p3@host:1/0"}],
        }
    )
    assert found == {
        "password": "***",
        "base_path": "/data",
        "nested": [{"aws_secret_access_key": "***", "url": "redis://***@host:1/0"}],
    }


def test_an_adapter_is_shown_without_its_secret():
    shown = page("--l2-adapter", '{"type": "fs", "base_path": "/data", "auth_token": "p4"}')
    assert shown["storage_manager"]["l2_adapter"] == [
        {"type": "fs", "base_path": "/data", "auth_token": "***"}
    ]
