"""The scheduler half while the server is absent, frozen, killed or started again."""

import random
import time

import pytest
from tests.engines.vllm.cellar import Cellar
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.engines.vllm.toy_play import Day, play
from tests.engines.vllm.toy_worker import Delays
from tests.server.running import eventually

from kvcellar.protocol.messages import ChunkState, ReserveReply

pytestmark = pytest.mark.engine

HEARTBEAT_S = 0.2


@pytest.fixture
def cellar():
    one = Cellar()
    yield one
    if one.server is not None:
        one.thaw()
        one.kill()


@pytest.fixture(autouse=True)
def eagerness(patience, monkeypatch):
    monkeypatch.setattr("kvcellar.engines.vllm.stores.PUT_OFF_S", 0.05)


@pytest.fixture
def impatience(patience, monkeypatch):
    """Have deadlines as short as tests about them need."""
    monkeypatch.setattr("kvcellar.engines.vllm.stores.RESERVE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("tests.engines.vllm.toy_worker.WAIT_S", 0.2)


@pytest.fixture
def prompt():
    source = random.Random(5)
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


def test_an_engine_serves_before_there_is_a_server_and_hits_once_there_is(toy, cellar, prompt):
    text = prompt(200)
    with ToyEngine(toy, cellar.port) as engine:
        assert engine.ask(text)[1] == 0
        engine.settle()
        cellar.start()
        engine.wait_bound()
        engine.reset()
        assert engine.ask(text)[1] == 0
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_killed_server_fails_no_request_and_its_successor_is_used(toy, cellar, prompt, is_async):
    text = prompt(200)
    delays = Delays(load=lambda: 3, store=lambda: 3)
    cellar.start()
    with ToyEngine(toy, cellar.port, is_async=is_async, delays=delays) as engine:
        engine.keep(text)
        # One loads and one stores while the server dies.
        engine.load_beside_a_store(text, prompt(100))
        cellar.kill()
        engine.settle()
        cellar.start()
        engine.wait_bound()
        engine.reset()
        assert engine.ask(text)[1] == 0
        engine.settle()
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()
        assert cellar.held() == (0, 0)


def test_chunks_that_found_no_memory_are_stored_when_there_is_some(
    toy, cellar, prompt, monkeypatch
):
    """A server answers before its memory is there."""
    cellar.start()
    with ToyEngine(toy, cellar.port) as engine:
        engine.wait_bound()
        offers = engine.half.stores
        start, is_full = offers._start, iter([True, True])

        def say_full(offer, replies):
            if next(is_full, False):
                (reply,), (line,) = replies, offer.bound.lines
                engine.half._exchange.cancel(line, reply.reservation)
                none = bytes([ChunkState.FULL]) * len(reply.states)
                replies = [ReserveReply(reply.id, 0, none, b"")]
            return start(offer, replies)

        monkeypatch.setattr(offers, "_start", say_full)
        engine.add(prompt(200), 400)
        engine.run_until(lambda: engine.half.stores.counts.stored == 6)
        assert engine.half.stores.counts.full > 0


def test_a_request_that_runs_stores_everything_anew_at_the_next_server(toy, cellar, prompt):
    text = prompt(200)
    cellar.start()
    with ToyEngine(toy, cellar.port) as engine:
        engine.wait_bound()
        request_id = engine.add(text, 400)
        engine.run_until(lambda: engine.half.stores.counts.stored == 6)
        cellar.kill()
        cellar.start()
        engine.wait_bound()
        engine.run_until(lambda: engine.half.stores.counts.stored == 12)
        assert not engine.asked[request_id].is_over
        engine.settle()
        engine.reset()
        assert engine.ask(text)[1] == 192


def test_what_a_dead_server_answered_is_not_loaded_from_its_successor(toy, cellar, prompt):
    """The second request has its answer and waits for room while the server is replaced."""
    text = prompt(300)
    cellar.start()
    with ToyEngine(toy, cellar.port, blocks=40, running_max=2) as engine:
        engine.keep(text)
        engine.add(prompt(500), 120)
        engine.run_until(lambda: engine.scheduler.running)
        engine.add(text)
        engine.run_until(lambda: engine.held()[0] == 1, pace_s=0.01)
        cellar.kill()
        cellar.start()
        eventually(lambda: engine.half.parts[0].link.session)
        engine.settle()
        assert (engine.loaded_tokens, engine.half.loads.failed_count) == (0, 0)


def test_an_answer_that_is_late_but_in_time_is_still_a_hit(toy, cellar, prompt):
    text = prompt(200)
    cellar.start()
    options = {"kvcellar.lookup_timeout_s": 5}
    with ToyEngine(toy, cellar.port, options=options) as engine:
        engine.keep(text)
        cellar.freeze()
        request_id = engine.add(text)
        for _ in range(5):
            engine.step()
        assert not engine.asked[request_id].said
        cellar.thaw()
        engine.settle()
        assert engine.loaded_tokens == 192


def test_an_answer_that_comes_too_late_is_given_back_at_once(toy, cellar, prompt):
    """Long before the heartbeat that would do it as well."""
    text = prompt(100)
    cellar.start()
    options = {"kvcellar.lookup_timeout_s": 0.1, "kvcellar.heartbeat_s": 60}
    with ToyEngine(toy, cellar.port, options=options) as engine:
        engine.keep(text)
        cellar.freeze()
        assert engine.ask(text, params={"kvcellar.skip_save": True})[1] == 0
        cellar.thaw()
        granted = "kvcellar_lookup_hit_chunks_total"
        eventually(lambda: cellar.server.status()["metrics"][granted] == 3)
        eventually(lambda: cellar.held() == (0, 0), timeout_s=2.0)


@pytest.mark.usefixtures("impatience")
def test_a_frozen_server_costs_a_request_its_deadline_and_then_nothing(toy, cellar, prompt):
    texts = [prompt(100) for _ in range(6)]
    cellar.start()
    options = {"kvcellar.lookup_timeout_s": 0.5}
    with ToyEngine(toy, cellar.port, options=options) as engine:
        engine.wait_bound()
        for text in texts:
            engine.ask(text)
        engine.settle()
        engine.reset()
        cellar.freeze()
        for text in texts:
            longest_s = slowest_step(engine, text)
            assert longest_s < 0.25, "a step waited for the server"
        assert engine.half.lookups.overdue_count >= 1
        assert engine.half.parts[0].link.session is None
        assert engine.loaded_tokens == 0
        engine.settle()
        cellar.thaw()
        eventually(lambda: engine.half.parts[0].link.session)
        eventually(lambda: cellar.held() == (0, 0), timeout_s=2.0)
        engine.reset()
        assert engine.ask(texts[0])[1] == 96
        engine.settle()


@pytest.mark.usefixtures("impatience")
def test_offers_to_a_frozen_server_are_withdrawn(toy, cellar, prompt):
    cellar.start()
    with ToyEngine(toy, cellar.port) as engine:
        engine.wait_bound()
        request_id = engine.add(prompt(200), 3)
        engine.run_until(lambda: engine.scheduler.running)
        cellar.freeze()
        engine.run_until(lambda: engine.asked[request_id].is_over)
        engine.settle()
        assert engine.half.stores.counts.lost > 0
        cellar.thaw()
        eventually(lambda: cellar.held() == (0, 0), timeout_s=2.0)


def slowest_step(engine, text):
    request_id, longest_s = engine.add(text), 0.0
    while not engine.asked[request_id].is_over:
        start_s = time.monotonic()
        engine.step()
        longest_s = max(longest_s, time.monotonic() - start_s)
        time.sleep(0.0005)
    return longest_s


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("seed", range(2))
def test_random_days_with_a_server_that_comes_and_goes_end_well(toy, cellar, seed):
    cellar.start()
    chance = Day(seed).chance

    def disturb():
        what = chance.random()
        if what < 0.02:
            cellar.freeze()
        elif what < 0.06:
            cellar.thaw()
        elif what < 0.065:
            cellar.kill()
            cellar.start(has_memory=False)

    options = {"kvcellar.lookup_timeout_s": 0.05}
    play(toy, cellar.port, seed, actions=150, disturb=disturb, options=options)
    cellar.thaw()
    eventually(lambda: cellar.held() == (0, 0), timeout_s=2.0)
