"""The scheduler half and a server with a disk: what only the disk has is waited for, in bounds.

vLLM's real scheduler, a real server with a real tier process and real files, a toy model. Every
test also checks what `ToyEngine` checks.
"""

import os
import random
import signal
import time
import zlib

import pytest
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.server.disk import DiskServer
from tests.server.running import eventually

from kvcellar.engines.vllm.versions import can_fail_whole_loads
from kvcellar.protocol.messages import Clear

pytestmark = pytest.mark.engine


@pytest.fixture
def prompt(request):
    source = random.Random(zlib.crc32(request.node.nodeid.encode()))
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


def serve(folder):
    return DiskServer(folder, "--chunk-size", str(CHUNK_TOKENS))


@pytest.fixture
def texts(prompt):
    """Two prompts of six chunks each."""
    return prompt(200), prompt(200)


@pytest.fixture
def cellar(tmp_path, toy, texts):
    """A server that has just started, with a disk that has the texts' chunks."""
    with serve(tmp_path) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        with ToyEngine(toy, server.port) as engine:
            engine.wait_bound()
            for text in texts:
                engine.ask(text)
            engine.settle()
        server.wait_written(12)
    with serve(tmp_path) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        yield server
        assert "Traceback" not in server.log()


@pytest.fixture
def start(toy, cellar):
    made = []

    def start(**options):
        named = {f"kvcellar.{name}": value for name, value in options.items()}
        engine = ToyEngine(toy, cellar.port, options={"kvcellar.fetch_timeout_s": 20.0, **named})
        made.append(engine)
        engine.wait_bound()
        return engine

    yield start
    for engine in made:
        with engine:
            engine.settle()
    # What was computed is on its way to the disk.
    eventually(lambda: cellar.status()["kvcellar"]["leases"] == 0)
    assert cellar.status()["kvcellar"]["reservations"] == 0


def fetches(cellar):
    return cellar.status_metrics()["kvcellar_tier_fetches_total"]


@pytest.mark.parametrize("eager", [False, True])
def test_what_only_the_disk_has_is_loaded(cellar, start, texts, eager):
    engine = start(eager_prefetch=eager)
    assert engine.ask(texts[0])[1] == 192
    assert cellar.status_metrics()["kvcellar_tier_fetched_chunks_total"] == 6


def test_an_eager_fetch_begins_when_the_request_arrives(cellar, start, texts):
    engine = start(eager_prefetch=True)
    engine.add(texts[0])
    assert eventually(lambda: fetches(cellar)) == 1
    assert engine.steps == 0


def test_others_are_served_while_one_waits_for_a_frozen_disk(cellar, start, texts, prompt):
    engine = start(fetch_timeout_s=1.0)
    pid = cellar.tier_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        waiting = engine.add(texts[0])
        engine.step()
        other = engine.add(prompt(20))
        engine.run_until(lambda: engine.asked[other].is_over)
        assert not engine.asked[waiting].is_over
        engine.run_until(lambda: engine.asked[waiting].is_over)
        assert 1.0 <= time.monotonic() - start_s < 10
        assert engine.loaded_tokens == 0
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_aborted_request_gives_back_what_was_fetched_for_it(cellar, start, texts):
    engine = start()
    pid = cellar.tier_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting = engine.add(texts[0])
        engine.step()
        engine.abort(waiting)
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: cellar.status_metrics()["kvcellar_tier_fetched_chunks_total"] == 6)
    eventually(lambda: cellar.status()["kvcellar"]["leases"] == 0)


def test_a_server_that_dies_meanwhile_costs_nothing_but_the_hit(cellar, start, texts):
    engine = start()
    os.kill(cellar.tier_pid(), signal.SIGSTOP)
    waiting = engine.add(texts[0])
    engine.step()
    os.kill(cellar.tier_pid(), signal.SIGKILL)
    engine.run_until(lambda: engine.asked[waiting].is_over)
    eventually(lambda: cellar.tier().get("is_healthy"))
    assert engine.ask(texts[1])[1] == 192


def test_what_vllm_holds_itself_is_not_fetched(cellar, start, texts):
    engine = start()
    engine.ask(texts[0], params={"kvcellar.skip_save": True})
    with cellar.tool() as tool:
        tool.call(Clear, timeout_s=20)
    before = fetches(cellar)
    assert engine.ask(texts[0])[1] == 0
    assert fetches(cellar) == before


def test_where_only_memory_counts_nothing_is_fetched(cellar, start, texts):
    engine = start(fetch_timeout_s=0)
    assert engine.ask(texts[0])[1] == 0
    assert fetches(cellar) == 0


@pytest.mark.skipif(not can_fail_whole_loads(), reason="this vLLM keeps no windows")
@pytest.mark.parametrize("specs", [({}, {"window": 50}), ({"window": 75}, {}, {"local": 96})])
def test_windows_come_back_from_a_disk_after_the_servers_restart(tmp_path, toy, prompt, specs):
    """Six chunks of each group were written; of windows only what the end needs is read."""
    text = prompt(200)
    with serve(tmp_path) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        with ToyEngine(toy, server.port, specs=specs, blocks=120) as engine:
            engine.wait_bound()
            engine.ask(text)
            engine.settle()
        server.wait_written(6 * len(specs))
    with serve(tmp_path) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        options = {"kvcellar.fetch_timeout_s": 20.0}
        with ToyEngine(toy, server.port, specs=specs, blocks=120, options=options) as engine:
            engine.wait_bound()
            assert engine.ask(text)[1] == 192
            engine.settle()
        assert server.status()["kvcellar"]["chunks"] < 6 * len(specs)
        eventually(lambda: server.status()["kvcellar"]["leases"] == 0)
