"""The connector under LMCache's name: its keys, its wishes, its one line a request."""

import logging
import re

import pytest
from tests.engines.vllm.conftest import CHUNK_TOKENS, cellar, patience, toy  # noqa: F401
from tests.engines.vllm.toy_engine import WAIT_S, ToyEngine
from tests.engines.vllm.toy_model import kv_of

from kvcellar.errors import ConfigError

pytestmark = pytest.mark.engine

LINE = re.compile(
    r"\[req_id=(\S+)\] (?:Retrieved (\d+) tokens\. size: [\d.]+ gb, cost [\d.]+ ms, "
    r"throughput: [\d.]+ GB/s;)? ?(?:Stored (\d+) tokens\. size: [\d.]+ gb, cost [\d.]+ ms, "
    r"throughput: [\d.]+ GB/s;)?$"
)


def prompt(count, seed=1):
    return [int(value) % 997 for value in kv_of(range(seed, seed + count))]


@pytest.fixture
def engine(toy, cellar):  # noqa: F811
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": str(cellar.port),
            "lmcache.mp.heartbeat_interval": 0.2,
            "lmcache.mp.mp_transfer_mode": "auto",
            "kvcellar.lookup_timeout_s": WAIT_S,
        },
    }
    with ToyEngine(toy, cellar.port, connector=connector) as one:
        one.wait_bound()
        yield one
        one.settle()


def lines(caplog):
    found = [LINE.match(record.getMessage()) for record in caplog.records]
    return [match.groups() for match in found if match]


def test_it_stores_and_hits_and_says_so_in_one_line_a_request(engine, caplog):
    text = prompt(200)
    with caplog.at_level(logging.INFO, logger="vllm.kvcellar.lmcache"):
        engine.ask(text)
        engine.settle()
        assert [line[1:] for line in lines(caplog)] == [(None, "192")]
        engine.reset()
        caplog.clear()
        engine.ask(text + prompt(40, 7))
        engine.settle()
        assert [line[1:] for line in lines(caplog)] == [("192", str(CHUNK_TOKENS))]
        caplog.clear()
        engine.ask(prompt(10, 9))
        engine.settle()
        assert lines(caplog) == []


def test_requests_may_use_lmcaches_names_for_their_wishes(engine):
    text = prompt(200, 3)
    engine.ask(text, params={"lmcache.skip_save": True})
    engine.reset()
    assert engine.ask(text, params={"lmcache.max_offload_tokens": 64})[1] == 0
    engine.reset()
    assert engine.ask(text)[1] == 64


def test_it_says_who_serves_and_which_keys_mean_nothing(toy, cellar, caplog, request):  # noqa: F811
    with caplog.at_level(logging.INFO, logger="vllm.kvcellar.lmcache"):
        request.getfixturevalue("engine")
    assert caplog.text.count("LMCacheMPConnector is served by kvcellar") == 1
    assert caplog.text.count("lmcache.mp.mp_transfer_mode='auto' has no effect") == 1


def test_a_mistyped_key_ends_the_start(toy, cellar):  # noqa: F811
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {"lmcache.mp.prot": 6555},
    }
    with pytest.raises(ConfigError, match=r"did you mean 'lmcache\.mp\.port'"):
        ToyEngine(toy, cellar.port, connector=connector)


def test_it_is_found_by_its_module_path_too():
    """For those who cannot have the plug-in run (VLLM_PLUGINS is set)."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    asked = KVTransferConfig(
        kv_connector="LMCacheMPConnector",
        kv_role="kv_both",
        kv_connector_module_path="kvcellar.compat.vllm",
    )
    found = KVConnectorFactory.get_connector_class(asked)
    assert found.__module__ == "kvcellar.compat.vllm"
    assert KVConnectorFactory.supports_hma_config(asked)
