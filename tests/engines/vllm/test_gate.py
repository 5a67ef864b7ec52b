"""The gate by itself, and a simulated day of an engine under it and under simpler policies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.vllm.gate_world import Machine, arrivals, compare

from kvcellar.clock import FakeClock
from kvcellar.engines.vllm.estimates import EXPIRE_S
from kvcellar.engines.vllm.gate import EXPLORED_SHARE, MARGIN, MARGIN_S, Gate, Hit, Outcome, _Ways
from kvcellar.engines.vllm.speeds import Work, work_of

pytestmark = pytest.mark.engine

STEP_TOKENS = 2048
CHUNK_TOKENS = 256


def taught(*, step_s=0.01, token_s=3e-5, attended_s=1e-9, load_s=0.002, chunk_s=0.001, clock=None):
    """Return a gate that has seen a machine of these speeds."""
    clock = clock or FakeClock()
    gate = Gate(step_tokens=STEP_TOKENS, clock=clock)
    for tokens, computed in ((100, 0), (2048, 0), (2048, 2048), (2048, 20_000), (700, 300)) * 3:
        clock.advance(1.0)
        work = work_of(computed, computed + tokens)
        gate.prefill.observe(work, step_s + token_s * tokens + attended_s * work.attended)
    for job_id, chunks in enumerate((1, 40, 5, 100, 2) * 2):
        clock.advance(1.0)
        load(gate, clock, job_id, chunks, copy_s=chunks * chunk_s, extra_s=load_s)
    return gate


def load(gate, clock, job_id, chunks, *, copy_s, extra_s=0.0):
    gate.link.begin_load(job_id, chunks * CHUNK_TOKENS)
    clock.advance(copy_s + extra_s)
    gate.link.end(job_id, copy_s=copy_s, wait_s=0.0, size_bytes=1, is_good=True)


def hit(prompt_tokens, *, computed=0, chunks=None, waiting=0):
    stop = prompt_tokens // CHUNK_TOKENS if chunks is None else chunks
    return Hit(prompt_tokens, computed, stop, CHUNK_TOKENS, waiting)


class TestDecisions:
    def test_a_gate_that_knows_nothing_takes_every_hit(self):
        gate = Gate(step_tokens=STEP_TOKENS, clock=FakeClock())
        assert gate.weigh(hit(300)).outcome is Outcome.TAKEN

    def test_a_long_hit_is_taken_and_a_short_one_over_a_slow_link_is_not(self):
        gate = taught(load_s=0.05)
        long, short = gate.weigh(hit(20_000)), gate.weigh(hit(300))
        assert (long.outcome, long.stop_chunk) == (Outcome.TAKEN, 78)
        assert (short.outcome, short.stop_chunk) == (Outcome.REFUSED, 0)
        # A step each way: with 300 tokens, or with 44 and after the load.
        assert short.expected_s == pytest.approx(0.019, rel=0.1)
        assert short.other_s == pytest.approx(0.0623, rel=0.1)

    def test_one_bad_load_is_enough_to_refuse_the_next(self):
        clock = FakeClock()
        gate = Gate(step_tokens=STEP_TOKENS, clock=clock)
        for _ in range(3):
            clock.advance(1.0)
            gate.prefill.observe(work_of(0, 600), 0.03)
        assert gate.weigh(hit(600)).outcome is Outcome.TAKEN
        load(gate, clock, 1, 2, copy_s=0.001, extra_s=2.0)
        assert gate.weigh(hit(600)).outcome is Outcome.REFUSED

    def test_a_load_that_does_not_come_back_is_news_already(self):
        clock = FakeClock()
        gate = taught(clock=clock)
        gate.link.begin_load(99, 512)
        assert gate.weigh(hit(600)).outcome is Outcome.TAKEN
        clock.advance(1.0)
        assert gate.weigh(hit(600)).outcome is Outcome.REFUSED

    def test_a_busy_link_makes_the_difference(self):
        gate = taught()
        assert gate.weigh(hit(3000)).outcome is Outcome.TAKEN
        gate.link.begin_load(99, 1000 * CHUNK_TOKENS)
        assert gate.weigh(hit(3000)).outcome is Outcome.REFUSED

    def test_a_busy_engine_makes_the_difference(self):
        gate = taught(load_s=0.05)
        assert gate.weigh(hit(300)).outcome is Outcome.REFUSED
        gate.note_queue(0.2)
        assert gate.weigh(hit(300)).outcome is Outcome.TAKEN

    def test_those_behind_make_the_difference(self):
        gate = taught(load_s=0.05)
        assert gate.weigh(hit(1000)).outcome is Outcome.REFUSED
        assert gate.weigh(hit(1000, waiting=20)).outcome is Outcome.TAKEN

    def test_what_the_engine_computes_anyway_is_time_for_a_part_of_a_hit(self):
        """Loading costs more than computing here, but for 50 ms the engine is not free."""
        gate = taught(chunk_s=0.02)
        assert gate.weigh(hit(4096)).outcome is Outcome.REFUSED
        gate.note_queue(0.05)
        verdict = gate.weigh(hit(4096))
        assert (verdict.outcome, verdict.stop_chunk) == (Outcome.SHORTENED, 2)

    def test_stores_beside_a_load_count_once_it_has_felt_them(self):
        clock = FakeClock()
        gate = taught(clock=clock)
        alone_s = gate.link.predict_s(40 * CHUNK_TOKENS)
        for job_id in range(100, 120):
            gate.link.begin_store(-job_id, 100_000)
            load(gate, clock, job_id, 40, copy_s=0.12, extra_s=0.002)
            gate.link.end(-job_id, copy_s=1.0, wait_s=0.0, size_bytes=1, is_good=True)
            clock.advance(1.0)
            load(gate, clock, job_id, 40, copy_s=0.04, extra_s=0.002)
        gate.link.begin_store(1, 100_000)
        busy_s = gate.link.predict_s(40 * CHUNK_TOKENS)
        gate.link.end(1, copy_s=1.0, wait_s=0.0, size_bytes=1, is_good=True)
        assert busy_s == pytest.approx(0.122, rel=0.15)
        assert gate.link.predict_s(40 * CHUNK_TOKENS) == pytest.approx(alone_s, rel=0.15)

    @settings(deadline=None)
    @given(
        prompt=st.integers(2, 40_000),
        computed=st.integers(0, 20_000),
        found=st.integers(1, 160),
        speeds=st.fixed_dictionaries(
            {"load_s": st.floats(0.0, 0.1), "chunk_s": st.floats(1e-5, 0.05)}
        ),
        busy=st.tuples(st.floats(0.0, 1.0), st.integers(0, 30), st.integers(0, 200)),
    )
    def test_no_other_length_is_clearly_better(self, prompt, computed, found, speeds, busy):
        queue_s, waiting, backlog = busy
        stop = min(found, prompt // CHUNK_TOKENS)
        computed = min(computed, prompt - 1)
        if stop * CHUNK_TOKENS <= computed:
            return
        gate = taught(**speeds)
        gate.note_queue(queue_s)
        if backlog:
            gate.link.begin_load(99, backlog * CHUNK_TOKENS)
        one = hit(prompt, computed=computed, chunks=stop, waiting=waiting)
        verdict = gate.weigh(one)
        assert gate.weigh(one) == verdict
        ways = _Ways(one, gate.prefill.forecast(), gate.link.forecast(), gate.queue_s())
        costs_s = {at: ways.way(at).cost_s for at in range(one.first_chunk, stop + 1)}
        chosen_s = costs_s[verdict.stop_chunk or one.first_chunk]
        best_s = min(costs_s.values())
        assert chosen_s <= (best_s * (1 + MARGIN) + MARGIN_S) * (1 + MARGIN) + MARGIN_S


class TestLearning:
    def test_it_tries_again_and_loses_little_by_it(self):
        clock = FakeClock()
        gate = taught(load_s=0.2, clock=clock)
        computed_s = lost_s = 0.0
        for turn in range(2000):
            clock.advance(0.05)
            verdict = gate.weigh(hit(600))
            gate.settle(verdict)
            if verdict.outcome is Outcome.REFUSED:
                computed_s += verdict.expected_s
            else:
                assert verdict.outcome is Outcome.EXPLORED
                lost_s += verdict.expected_s - verdict.other_s
                load(gate, clock, 1000 + turn, 2, copy_s=0.002, extra_s=0.2)
        assert gate.counts.explored > 3
        assert lost_s <= EXPLORED_SHARE * computed_s

    def test_one_good_try_is_enough_to_take_hits_again(self):
        clock = FakeClock()
        gate = taught(load_s=0.2, clock=clock)
        while gate.weigh(hit(2000)).outcome is Outcome.REFUSED:
            gate.settle(gate.weigh(hit(2000)))
        load(gate, clock, 1000, 7, copy_s=0.007, extra_s=0.002)
        assert gate.weigh(hit(2000)).outcome is Outcome.TAKEN

    def test_what_is_old_is_tried_again_whatever_it_was(self):
        clock = FakeClock()
        gate = taught(load_s=10.0, clock=clock)
        assert gate.weigh(hit(300)).outcome is Outcome.REFUSED
        clock.advance(EXPIRE_S + 1)
        assert gate.weigh(hit(300)).outcome is Outcome.TAKEN

    def test_steps_that_mostly_decode_teach_nothing(self):
        gate = taught()
        before_s = gate.prefill.predict_s(work_of(0, 1000))
        for _ in range(20):
            work = work_of(0, 100)
            for _ in range(200):
                work.add(5000, 1)
            gate.prefill.observe(work, 9.0)
            gate.prefill.observe(Work(tokens=64, attended=1e5), 9.0)
        assert gate.prefill.predict_s(work_of(0, 1000)) == before_s

    def test_failed_loads_teach_nothing(self):
        clock = FakeClock()
        gate = taught(clock=clock)
        before_s = gate.link.predict_s(2560)
        gate.link.begin_load(99, 2560)
        clock.advance(5.0)
        gate.link.end(99, copy_s=0.0, wait_s=0.0, size_bytes=1, is_good=False)
        assert gate.link.predict_s(2560) == before_s

    def test_regret_is_what_the_other_way_would_have_saved(self):
        gate = taught()
        verdict = gate.weigh(hit(3000))
        gate.settle(verdict)
        gate.judge(verdict, verdict.other_s - 0.01)
        assert gate.counts.regret_s == 0.0
        gate.judge(verdict, verdict.other_s + 0.5)
        assert gate.counts.regret_s == pytest.approx(0.5)
        assert gate.counts.taken == 1


SHORT = {"count": 1000, "tokens": (260, 1500)}
MIXED = {"count": 500, "tokens": (260, 30_000)}
DAYS = {
    "fast-link-long-prompts": (Machine(), {"count": 200, "per_s": 1, "tokens": (2000, 40_000)}),
    "fast-link-short-prompts": (Machine(), SHORT | {"per_s": 8}),
    "loads-that-cost-60-ms": (Machine(load_s=0.06), SHORT | {"per_s": 4}),
    "loads-that-cost-2-s": (Machine(link_rate=1e9, load_s=2.0), SHORT | {"per_s": 2}),
    "slow-link": (Machine(link_rate=1e9), {"count": 500, "per_s": 1, "tokens": (260, 16_000)}),
    "middling-link": (Machine(link_rate=3e9, load_s=0.02), MIXED | {"per_s": 1, "found": 0.7}),
    "link-busy-every-other-minute": (
        Machine(link_factor=lambda now_s: 30.0 if now_s // 60 % 2 else 1.0),
        {"count": 1000, "per_s": 4, "tokens": (260, 8000)},
    ),
    "engine-slow-at-times": (
        Machine(link_rate=3e9, gpu_factor=lambda now_s: 3.0 if now_s // 100 % 2 else 1.0),
        {"count": 400, "per_s": 1, "tokens": (1000, 20_000)},
    ),
    "more-than-the-engine-can-do": (
        Machine(), {"count": 200, "per_s": 4, "tokens": (2000, 40_000), "found": 0.5},
    ),
    "burst": (Machine(), {"count": 64, "per_s": 1000, "tokens": (15_000, 17_000)}),
    "burst-over-a-slow-link": (
        Machine(link_rate=4e9), {"count": 64, "per_s": 1000, "tokens": (15_000, 17_000)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DAYS)
def test_it_is_never_slower_than_the_better_of_always_and_never(name, seed):
    """By more than a twentieth, and the two loads that nobody could have known to be slow."""
    machine, settings_ = DAYS[name]
    sums, world = compare(machine, arrivals(seed, **settings_), seed=seed)
    unknown_s = 2 * machine.load_s
    assert sums["gate"] <= 1.05 * min(sums["always"], sums["never"]) + unknown_s, (
        sums, world.gate.counts,
    )  # fmt: skip


def test_it_is_better_than_both_where_each_is_right_at_times():
    for name in ("middling-link", "link-busy-every-other-minute", "burst-over-a-slow-link"):
        machine, settings_ = DAYS[name]
        sums, _ = compare(machine, arrivals(0, **settings_))
        assert sums["gate"] < 0.85 * min(sums["always"], sums["never"]), (name, sums)
