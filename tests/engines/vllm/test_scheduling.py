"""The scheduler half in vLLM's real scheduler, before a real server, with a toy model behind it.

Every test also checks what `ToyEngine` checks: each block of KV before it is used, each answer,
and that no block, pin, lease or reservation is left. Run again under other releases of vLLM by
`test_releases`.
"""

import random
import zlib

import pytest
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY, kv_of
from tests.engines.vllm.toy_play import look_back, play
from tests.engines.vllm.toy_worker import Delays
from tests.server.running import eventually

pytestmark = pytest.mark.engine

MODES = {
    "plain": {},
    "async-second-runner-two-ranks": {"is_async": True, "is_second_runner": True, "ranks": 2},
}


@pytest.fixture
def prompt(request):
    """Return a function from a length to new random tokens."""
    source = random.Random(zlib.crc32(request.node.nodeid.encode()))
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture(params=MODES.values(), ids=MODES)
def engine(request, toy, cellar):
    """Return a maker of engines; each is settled and checked at the test's end."""
    made = []

    def make(**settings):
        one = ToyEngine(toy, cellar.port, **{**request.param, **settings})
        made.append(one)
        one.wait_bound()
        return one

    yield make
    for one in made:
        with one:
            one.settle()
    held = cellar.status()["kvcellar"]
    assert (held["leases"], held["reservations"]) == (0, 0)


def whole(token_count):
    return token_count // CHUNK_TOKENS * CHUNK_TOKENS


class TestHits:
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 200])
    def test_whole_chunks_come_back_after_a_reset(self, engine, prompt, length):
        one, text = engine(), prompt(length)
        assert one.ask(text)[1] == 0
        one.reset()
        assert one.ask(text)[1] == whole(length)

    def test_another_instance_finds_them(self, engine, prompt):
        one, other, text = engine(), engine(), prompt(200)
        one.ask(text)
        one.settle()
        assert other.ask(text)[1] == 192

    def test_one_copy_serves_all_ranks_that_hold_the_same(self, engine, prompt, cellar):
        one, texts = engine(ranks=2, is_shared=True), [prompt(200) for _ in range(4)]
        before = cellar.status()["storage_manager"]["l1_manager"]["total_object_count"]
        for text in texts:
            one.ask(text)
        one.settle()
        stored = cellar.status()["storage_manager"]["l1_manager"]["total_object_count"]
        assert stored - before == 4 * 6
        one.reset()
        assert [one.ask(text)[1] for text in texts] == [192] * 4

    def test_only_what_vllm_lacks_is_loaded(self, engine, prompt):
        """vLLM holds five blocks, so the load begins inside of the third chunk."""
        one, text = engine(), prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text[:80], params={"kvcellar.skip_save": True})[1] == 64
        assert one.ask(text)[1] == 192 - 80

    def test_nothing_is_loaded_where_vllm_has_it_all(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        assert one.ask(text)[1] == 0

    def test_a_prompt_is_found_as_far_as_it_is_the_same(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text[:100] + prompt(100))[1] == 96

    def test_a_burst_of_prompts_is_loaded_at_once(self, engine, prompt):
        one, texts = engine(blocks=200, running_max=8), [prompt(96) for _ in range(12)]
        for text in texts:
            one.ask(text)
        one.reset()
        before = one.loaded_tokens
        for text in texts:
            one.add(text)
        one.settle()
        assert one.loaded_tokens - before == 12 * 96

    def test_it_works_without_vllms_own_prefix_cache(self, engine, prompt):
        one, text = engine(prefix_caching=False), prompt(200)
        one.ask(text)
        one.settle()
        assert one.ask(text)[1] == 192

    def test_a_lookup_sent_at_arrival_finds_the_same(self, engine, prompt):
        one, text = engine(options={"kvcellar.eager_prefetch": True}), prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text)[1] == 192


class TestStores:
    def test_chunks_are_stored_while_a_long_prompt_is_still_computed(self, engine, prompt):
        one = engine(step_tokens=40)
        one.add(prompt(320), 1)
        one.run_until(lambda: one.half.stores.counts.stored >= 2)
        assert one.scheduler.running[0].num_computed_tokens < 320

    def test_what_vllm_holds_and_the_server_lost_is_stored_again(self, engine, prompt, cellar):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.settle()
        clear(cellar)
        assert one.ask(text[:190])[1] == 0
        one.reset()
        assert one.ask(text)[1] == 160

    def test_generated_tokens_are_not_stored_by_default(self, engine, prompt):
        one, text = engine(), prompt(40)
        said, _ = one.ask(text, 60)
        one.reset()
        assert one.ask(text + said)[1] == 32

    def test_generated_tokens_are_stored_on_demand(self, engine, prompt):
        """The last one's KV is never computed, so the chunk that it would fill is not stored."""
        one, text = engine(options={"kvcellar.save_decode_cache": True}), prompt(40)
        said, _ = one.ask(text, 56)
        one.reset()
        assert one.ask(text + said)[1] == 64
        one.reset()
        assert one.ask(text + said + [7])[1] == 96

    def test_a_request_can_ask_to_be_left_out(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text, params={"kvcellar.skip_save": True})
        one.reset()
        assert one.ask(text, params={"kvcellar.max_offload_tokens": 100})[1] == 0
        one.reset()
        assert one.ask(text)[1] == 96

    def test_a_copy_that_fails_leaves_no_chunk(self, engine, prompt):
        one = engine(delays=Delays(store_fails=lambda: True))
        text = prompt(200)
        one.ask(text)
        one.settle()
        assert one.half.stores.counts.failed == 6
        one.reset()
        assert one.ask(text)[1] == 0

    def test_blocks_of_a_late_copy_are_given_to_nobody(self, engine, prompt):
        """Later prompts want the whole pool while the first one's copies have not begun."""
        late = iter([12] * 40)
        one = engine(blocks=30, delays=Delays(store=lambda: next(late, 0)))
        text = prompt(200)
        one.ask(text)
        for _ in range(6):
            one.add(prompt(200))
        one.settle()
        one.reset()
        assert one.ask(text)[1] == 192

    def test_no_more_than_half_of_the_pool_is_pinned(self, engine, prompt):
        one = engine(blocks=40, running_max=8, delays=Delays(store=lambda: 30))
        for _ in range(10):
            one.add(prompt(150))
        most = 0
        while not all(asked.is_over for asked in one.asked.values()):
            one.step()
            most = max(most, one.half.pins.count)
        assert 0 < most <= 20
        assert one.half.stores.counts.crowded > 0


class TestEnds:
    def test_requests_that_vllm_preempts_end_right(self, engine, prompt):
        one = engine(blocks=26, running_max=6, options={"kvcellar.save_decode_cache": True})
        for _ in range(6):
            one.add(prompt(100), 60)
        one.settle()
        assert one.preemptions > 0
        look_back(one)
        assert one.loaded_tokens > 0

    def test_an_abort_during_a_load_frees_everything(self, engine, prompt):
        one, text = engine(delays=Delays(load=lambda: 3)), prompt(200)
        one.ask(text)
        one.reset()
        request_id = one.add(text)
        one.run_until(lambda: len(one.half.loads) == 1)
        one.abort(request_id)
        one.settle()
        assert one.ask(text)[1] == 192

    def test_an_abort_during_a_store_ends_the_store_and_no_more(self, engine, prompt):
        one, text = engine(delays=Delays(store=lambda: 5)), prompt(200)
        request_id = one.add(text, 500)
        one.run_until(lambda: one.half.stores.counts.offered == 6)
        one.abort(request_id)
        one.settle()
        one.reset()
        assert one.ask(text)[1] == 192

    def test_requests_that_wait_hold_their_lease_and_then_load(self, engine, prompt, cellar):
        """No room for the second until the first has ended; its lease lives on by heartbeats."""
        one, text = engine(blocks=40, running_max=2), prompt(300)
        one.ask(text)
        one.settle()
        one.reset()
        first = one.add(prompt(500), 120)
        one.run_until(lambda: one.scheduler.running)
        second = one.add(text)
        one.run_until(lambda: one.held()[0] == 1, pace_s=0.01)
        for _ in range(3):
            seen = one.half.parts[0].link.last_heartbeat
            eventually(lambda seen=seen: one.half.parts[0].link.last_heartbeat is not seen)
        assert cellar.status()["kvcellar"]["leases"] == 1
        assert not one.asked[first].is_over
        one.settle()
        assert one.asked[second].is_over
        assert one.loaded_tokens == 288

    def test_an_aborted_request_gives_its_lease_back(self, engine, prompt, cellar):
        one, text = engine(blocks=40, running_max=2), prompt(300)
        one.ask(text)
        one.settle()
        one.reset()
        one.add(prompt(500), 120)
        one.run_until(lambda: one.scheduler.running)
        second = one.add(text)
        one.run_until(lambda: one.held()[0] == 1, pace_s=0.01)
        one.abort(second)
        eventually(lambda: cellar.status()["kvcellar"]["leases"] == 0, timeout_s=1.0)


class TestFailures:
    def test_a_failed_load_is_computed_and_not_tried_again(self, engine, prompt):
        one = engine(delays=Delays(load_fails=lambda: True))
        text = prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text)[1] == 0
        assert one.half.loads.failed_count == 1

    def test_a_load_that_fails_on_one_rank_only_is_computed(self, engine, prompt):
        fails = iter([False, False, True])
        one = engine(ranks=2, delays=Delays(load_fails=lambda: next(fails, False)))
        text = prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text)[1] == 192
        one.reset()
        one.ask(text)
        assert one.half.loads.failed_count == 1

    def test_a_damaged_chunk_is_recomputed_and_stored_again(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.settle()
        damage(one, text, 64)
        one.reset()
        one.ask(text)
        assert one.half.loads.failed_count == 1
        one.reset()
        assert one.ask(text)[1] == 192
        assert one.half.loads.failed_count == 1

    def test_a_rank_that_never_reports_does_not_keep_the_engine_awake(
        self, engine, prompt, monkeypatch
    ):
        monkeypatch.setattr("kvcellar.engines.vllm.stores.QUIET_S", 0.05)
        late = iter([10_000])
        one = engine(delays=Delays(store=lambda: next(late, 0)))
        one.ask(prompt(32))
        one.run_until(lambda: not one.scheduler.has_requests())
        assert one.half.pins.count == 2
        for worker in one.workers:
            for job in worker.jobs:
                job.steps = 0
        one.ask(prompt(8))


class TestResets:
    def test_a_reset_of_the_connector_ends_every_hit(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.reset(connector=True)
        one.wait_bound()
        assert one.ask(text)[1] == 0
        one.reset()
        assert one.ask(text)[1] == 192

    def test_a_server_that_keeps_the_chunks_makes_no_difference(self, engine, prompt, monkeypatch):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.settle()
        monkeypatch.setattr(one.half, "_clear", lambda left: None)
        one.reset(connector=True)
        one.wait_bound()
        assert one.ask(text)[1] == 0

    def test_it_clears_what_the_server_held(self, engine, prompt, cellar):
        clear(cellar)
        one, text = engine(), prompt(200)
        one.ask(text)
        one.settle()
        assert cellar.status()["kvcellar"]["chunks"] == 6
        one.reset(connector=True)
        assert cellar.status()["kvcellar"]["chunks"] == 0

    @pytest.mark.parametrize("by", ["the server", "this engine"])
    def test_a_clear_while_a_load_runs_takes_nothing_from_under_it(
        self, engine, prompt, cellar, by
    ):
        one, text = engine(delays=Delays(load=lambda: 20)), prompt(200)
        one.ask(text)
        one.reset()
        loaded, request = one.loaded_tokens, one.add(text)
        one.run_until(lambda: len(one.half.loads))
        clear(cellar) if by == "the server" else one.half.reset_cache()
        # Whoever comes next would get the slots, if they were free.
        one.wait_bound()
        for other in [prompt(200) for _ in range(3)]:
            one.add(other)
        one.run_until(lambda: one.asked[request].is_over)
        assert one.loaded_tokens - loaded == 192
        one.settle()
        one.reset()
        assert one.ask(text)[1] == 0

    def test_what_was_computed_before_is_not_stored_after(self, engine, prompt):
        """The weights may be others now; the request that runs still holds KV of the old ones."""
        one, text = engine(), prompt(40)
        one.add(text, 60)
        one.run_until(lambda: one.scheduler.running)
        assert one.half.reset_cache()
        one.settle()
        one.reset()
        assert one.ask(text)[1] == 0


class TestSkips:
    def test_a_hand_off_by_another_connector_goes_first(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text, params={"do_remote_prefill": True})[1] == 0

    def test_a_request_whose_prompt_must_be_computed_is_not_loaded(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text)
        one.reset()
        request_id = one.add(text)
        request = one.scheduler.requests[request_id]
        request.skip_reading_prefix_cache = True
        assert one.half.matched_tokens(request, 0) == (0, False)
        one.settle()
        assert one.loaded_tokens == 0

    def test_tenants_do_not_share(self, engine, prompt):
        one, text = engine(), prompt(200)
        one.ask(text, cache_salt="a")
        one.reset()
        assert one.ask(text, cache_salt="b")[1] == 0
        one.reset()
        assert one.ask(text, cache_salt="a")[1] == 192

    def test_a_session_that_may_take_tokens_back_is_left_alone(self, engine, prompt):
        one, text = engine(), prompt(200)
        request_id = one.add(text, 50)
        one.scheduler.requests[request_id].resumable = True
        one.run_until(lambda: len(one.asked[request_id].said) > 2)
        one.abort(request_id)
        assert one.half.stores.counts.offered == 0

    @pytest.mark.parametrize(
        ("role", "loads", "stores"), [("kv_producer", 0, 6), ("kv_consumer", 0, 0)]
    )
    def test_a_role_does_its_half(self, engine, prompt, role, loads, stores):
        one, text = engine(connector={"kv_role": role}), prompt(200)
        one.ask(text)
        one.settle()
        one.reset()
        assert one.ask(text)[1] == loads
        assert one.half.stores.counts.stored == stores

    def test_a_consumer_loads_what_others_stored(self, engine, prompt):
        text = prompt(200)
        one, other = engine(), engine(connector={"kv_role": "kv_consumer"})
        one.ask(text)
        one.settle()
        assert other.ask(text)[1] == 192


@pytest.mark.parametrize("seed", range(8))
def test_random_days_end_well(toy, cellar, seed):
    assert play(toy, cellar.port, seed).steps > 0


def clear(cellar):
    from kvcellar.protocol.messages import Clear

    with cellar.tool() as session:
        session.call(Clear, timeout_s=5.0)


def damage(engine, text, start):
    """Flip a bit in the arena, where the KV of the chunk that begins at `start` lies."""
    arena = engine.workers[0].arenas[-1]
    kv = kv_of(text)[start : start + CHUNK_TOKENS].tobytes()
    at = arena._mapping.find(kv)
    assert at >= 0, "the chunk is not in the arena"
    arena.view[at + 100] ^= 4
