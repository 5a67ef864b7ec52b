"""Whose a chunk is: a salt that vLLM's real scheduler saw, on the books of a real server."""

import random

import pytest
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.server.running import WAIT_S, RunningServer, eventually

from kvcellar.protocol.messages import Quotas, SetQuota

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cellar():
    flags = ("--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "IsolatedLRU")
    with RunningServer(*flags) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        yield server
        assert "Traceback" not in server.log()


@pytest.fixture
def engine(toy, cellar):
    one = ToyEngine(toy, cellar.port)
    one.wait_bound()
    yield one
    with one:
        one.settle()


def used_bytes(cellar, salt):
    with cellar.tool() as session:
        (facts,) = session.call(lambda i: Quotas(i, salt), timeout_s=WAIT_S).quotas
    return facts.used_bytes


def test_two_salts_with_quotas_keep_to_them_and_find_what_is_theirs(cellar, engine):
    source = random.Random(3)

    def prompt():
        return [source.randrange(VOCABULARY) for _ in range(6 * CHUNK_TOKENS + 8)]

    kept = prompt()
    engine.ask(kept, cache_salt="alice")
    engine.settle()
    chunk_bytes = used_bytes(cellar, "alice") // 6
    assert chunk_bytes > 0
    with cellar.tool() as session:
        for salt, chunks in (("alice", 6), ("bob", 9)):
            session.call(lambda i, s=salt, n=chunks: SetQuota(i, s, n * chunk_bytes), timeout_s=5)
    others = [prompt() for _ in range(4)]
    for text in others:
        engine.ask(text, cache_salt="bob")
        engine.settle()
        assert used_bytes(cellar, "bob") <= 9 * chunk_bytes
    engine.ask(prompt())
    engine.settle()
    assert used_bytes(cellar, "alice") == 6 * chunk_bytes
    assert used_bytes(cellar, "bob") == 9 * chunk_bytes
    assert used_bytes(cellar, "") == 6 * chunk_bytes

    engine.reset()
    assert engine.ask(kept, cache_salt="alice")[1] == 6 * CHUNK_TOKENS
    assert engine.ask(others[-1], cache_salt="bob")[1] == 6 * CHUNK_TOKENS
    assert engine.ask(others[0], cache_salt="bob")[1] == 0


def test_a_salt_that_is_too_long_for_a_name_is_stored_under_its_digest(cellar, engine):
    text = [7] * (CHUNK_TOKENS + 8)
    engine.ask(text, cache_salt="x" * 1000)
    engine.settle()
    assert used_bytes(cellar, "x" * 1000) > 0
    engine.reset()
    assert engine.ask(text, cache_salt="x" * 1000)[1] == CHUNK_TOKENS
    assert engine.ask(text, cache_salt="x" * 999)[1] == 0
