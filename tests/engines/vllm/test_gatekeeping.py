"""The gate in vLLM's real scheduler, with a clock that only the toy's steps move."""

import random

import httpx
import pytest
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.test_scheduling import MODES, prompt  # noqa: F401 - a fixture.
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import answer
from tests.engines.vllm.toy_play import play
from tests.engines.vllm.toy_worker import Delays
from tests.server.running import eventually

from kvcellar.clock import FakeClock
from kvcellar.engines.vllm.gate import Gate, Outcome, Verdict
from kvcellar.engines.vllm.gatekeeping import Gatekeeper
from kvcellar.engines.vllm.speeds import work_of

pytestmark = pytest.mark.engine

STEP_S = 0.01
TOKEN_S = 0.001
IDLE_S = 0.02


class TimedEngine(ToyEngine):
    """A step takes `STEP_S` and `TOKEN_S` a token, one without tokens takes `IDLE_S`."""

    def __init__(self, *args, gate=None, **settings):
        super().__init__(*args, **settings)
        self.clock = FakeClock()
        self.gate = gate or Gate(step_tokens=64, clock=self.clock)
        self.half.gatekeeper = Gatekeeper(self.gate, is_on=True, clock=self.clock)

    def _compute(self, output):
        tokens = output.total_num_scheduled_tokens
        self.clock.advance(STEP_S + TOKEN_S * tokens if tokens else IDLE_S)
        return super()._compute(output)


@pytest.fixture(params=MODES.values(), ids=MODES)
def engine(request, toy, cellar):
    made = []

    def make(**settings):
        one = TimedEngine(toy, cellar.port, **{**request.param, **settings})
        made.append(one)
        one.wait_bound()
        return one

    yield make
    for one in made:
        with one:
            one.settle()
            keeper = one.half.gatekeeper
            assert (keeper._waiting, keeper._verdicts, keeper._watched) == (set(), {}, {})
            assert len(one.gate.link) == 0
    held = cellar.status()["kvcellar"]
    assert (held["leases"], held["reservations"]) == (0, 0)


def test_prefill_is_measured_whatever_is_in_flight_and_however_long_it_was_idle(engine, prompt):  # noqa: F811
    one = engine(running_max=1)
    for length in (30, 200, 64, 100, 17, 250):
        one.ask(prompt(length), 20)
        one.settle()
        one.clock.advance(100.0)
    assert one.gate.prefill.predict_s(work_of(0, 60)) == pytest.approx(
        STEP_S + 60 * TOKEN_S, rel=0.01
    )
    assert one.gate.prefill.predict_s(work_of(0, 640)) == pytest.approx(
        10 * STEP_S + 640 * TOKEN_S, rel=0.05
    )


def test_a_hit_that_took_long_is_refused_the_next_time(engine, prompt, cellar):  # noqa: F811
    """Loads end fifty idle steps after they began: a second, where computing takes a quarter."""
    one = engine(delays=Delays(load=lambda: 50))
    texts = [prompt(200) for _ in range(3)]
    for text in texts:
        one.ask(text)
    one.reset()
    assert one.ask(texts[0])[1] == 192
    assert one.ask(texts[1])[1] == 0
    assert one.ask(texts[2] + prompt(5))[1] == 0
    one.settle()
    counts = one.gate.counts
    assert (counts.taken, counts.refused) == (1, 2)
    name = one.config.kv_transfer_config.engine_id
    line = f'kvcellar_gate_refused_hits_total{{instance="{name}"}} 2'
    eventually(lambda: line in httpx.get(f"{cellar.http}/metrics").text)


def test_a_hit_that_is_quick_is_taken_again(engine, prompt):  # noqa: F811
    one = engine()
    texts = [prompt(200) for _ in range(6)]
    for text in texts:
        one.ask(text)
    one.reset()
    assert [one.ask(text)[1] for text in texts] == [192] * 6
    assert (one.gate.counts.taken, one.gate.counts.refused) == (6, 0)


def test_a_hit_is_tried_again_and_then_taken(engine, prompt):  # noqa: F811
    steps = [16]
    one = engine(delays=Delays(load=lambda: steps[0]))
    texts = [prompt(200) for _ in range(2)]
    for text in texts:
        one.ask(text)
    one.reset()
    assert [one.ask(text)[1] for text in texts] == [192, 0]
    steps[0] = 0
    one.reset()
    for _ in range(200):
        if one.ask(texts[0])[1]:
            break
        one.reset()
    assert one.gate.counts.explored == 1
    one.reset()
    assert [one.ask(text)[1] for text in texts] == [192, 192]


def test_regret_is_measured_from_admission_to_the_whole_prompt(engine, prompt):  # noqa: F811
    steps = [0]
    one = engine(delays=Delays(load=lambda: steps[0]))
    texts = [prompt(200) for _ in range(4)]
    for text in texts:
        one.ask(text)
    one.reset()
    for text in texts[:3]:
        one.ask(text)
    steps[0] = 100
    before_s, began_s = one.gate.counts.regret_s, one.clock.monotonic_s()
    request_id = one.add(texts[3], 1)
    one.run_until(lambda: one.asked[request_id].is_over)
    took_s = one.clock.monotonic_s() - began_s
    computing_s = 4 * STEP_S + 200 * TOKEN_S
    regret_s = one.gate.counts.regret_s - before_s
    # Two idle steps at most pass before it is admitted and after its prompt is there.
    assert took_s - computing_s - 2 * IDLE_S <= regret_s <= took_s - 0.8 * computing_s


class Fixed(Gate):
    """Decides as it is told."""

    def __init__(self, decide):
        super().__init__(step_tokens=64, clock=FakeClock())
        self.decide = decide

    def weigh(self, hit):
        return self.decide(hit)


def test_a_part_of_a_hit_is_loaded_and_the_rest_computed(engine, prompt):  # noqa: F811
    one = engine(gate=Fixed(lambda hit: Verdict(Outcome.SHORTENED, hit.stop_chunk - 2, 1.0, 2.0)))
    text = prompt(200)
    one.ask(text)
    one.reset()
    assert one.ask(text)[1] == 192 - 2 * CHUNK_TOKENS
    # vLLM holds five blocks, so the load begins inside of the third chunk.
    one.reset()
    one.ask(text[:80], params={"kvcellar.skip_save": True})
    assert one.ask(text)[1] == 128 - 80


class Broken(Fixed):
    """Fails once vLLM has made room for what was promised."""

    def settle(self, verdict):
        raise ValueError("broken")


def test_a_fault_in_the_gate_ends_caching_and_loads_what_was_promised(toy, cellar, prompt):  # noqa: F811
    gate = Broken(lambda hit: Verdict(Outcome.SHORTENED, hit.stop_chunk - 2, 1.0, 2.0))
    with TimedEngine(toy, cellar.port, gate=gate) as one:
        one.wait_bound()
        text = prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text) == (answer(text, 2), 192 - 2 * CHUNK_TOKENS)
        assert isinstance(one.half.fuse.blown, ValueError)
        assert len(one.half.loads) == 0


def test_a_switch_turns_it_off(toy, cellar, prompt):  # noqa: F811
    with ToyEngine(toy, cellar.port, delays=Delays(load=lambda: 20)) as one:
        one.wait_bound()
        texts = [prompt(200) for _ in range(3)]
        for text in texts:
            one.ask(text)
        one.reset()
        assert [one.ask(text)[1] for text in texts] == [192] * 3
        one.settle()
        assert one.half.gatekeeper.gate.counts.taken == 0


def test_random_verdicts_end_well(toy, cellar, monkeypatch):
    chance = random.Random(0)

    def weigh(self, hit):
        stop = chance.choice([0, chance.randint(hit.first_chunk + 1, hit.stop_chunk)])
        outcome = Outcome.TAKEN if stop else Outcome.REFUSED
        return Verdict(outcome, stop, 1.0, 2.0)

    monkeypatch.setattr(Gate, "weigh", weigh)
    gates = [
        play(toy, cellar.port, seed, options={"kvcellar.gate": True}).half.gatekeeper.gate
        for seed in range(4)
    ]
    assert sum(gate.counts.refused for gate in gates) > 0
    assert sum(gate.counts.taken for gate in gates) > 0
