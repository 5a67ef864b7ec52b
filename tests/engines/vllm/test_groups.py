"""Models of several KV groups in vLLM's real scheduler: what frees blocks is kept all the same.

As in `test_scheduling` each block of KV is compared before each use, in each group as far as its
layers see, so a block that was stored or loaded after vLLM had given it to another request would
show. Run again under other releases of vLLM by `test_releases`.
"""

import random
import zlib
from types import SimpleNamespace

import pytest
from tests.engines.vllm.cellar import Cellar
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.test_scheduling import clear, damage
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.engines.vllm.toy_play import look_back, play
from tests.engines.vllm.toy_worker import Delays

from kvcellar.clock import FakeClock
from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.headroom import HOLD_S, Headroom
from kvcellar.engines.vllm.versions import can_fail_whole_loads
from kvcellar.errors import UnsupportedModelError

pytestmark = pytest.mark.engine

FULL = {}
MODELS = {
    "window-below-a-chunk": (FULL, {"window": 17}),
    "window-over-chunks": ({"window": 75}, {"window": 75}, FULL),
    "two-windows": ({"window": 33}, FULL, {"window": 100}),
    "window-alone": ({"window": 50},),
    "two-full": (FULL, FULL),
    "local-spans-of-chunks": ({"local": 96}, FULL),
    "local-spans-in-chunks": (FULL, {"local": 16}),
}
MODES = {
    "plain": {},
    "async-second-runner-two-ranks": {"is_async": True, "is_second_runner": True, "ranks": 2},
}
needs_failures = pytest.mark.skipif(
    not can_fail_whole_loads(), reason="this vLLM cannot be told of loads that failed as a whole"
)


@pytest.fixture
def prompt(request):
    """Return a function from a length to new random tokens."""
    source = random.Random(zlib.crc32(request.node.nodeid.encode()))
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture(params=MODES.values(), ids=MODES)
def engine(request, toy, cellar):
    """Return a maker of engines; each is settled and checked at the test's end."""
    made = []

    def make(specs, **settings):
        one = ToyEngine(
            toy, cellar.port, specs=specs, **{"blocks": 120, **request.param, **settings}
        )
        made.append(one)
        one.wait_bound()
        return one

    yield make
    for one in made:
        with one:
            one.settle()
    held = cellar.status()["kvcellar"]
    assert (held["leases"], held["reservations"]) == (0, 0)


def freed(engine):
    """Return whether a group has given blocks of the running request away."""
    manager = engine.scheduler.kv_cache_manager
    (request,) = engine.scheduler.running
    return any(0 in table for table in manager.get_block_ids(request.request_id))


@needs_failures
class TestHits:
    @pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS)
    def test_a_prompt_comes_back_after_its_windows_blocks_were_freed(self, engine, prompt, specs):
        one, text = engine(specs, step_tokens=48), prompt(330)
        request = one.add(text, 40)
        one.run_until(lambda: len(one.asked[request].said) > 20)
        is_windowed = any({"window", "local"} & spec.keys() for spec in specs)
        assert freed(one) == is_windowed
        one.settle()
        one.reset()
        before = one.half.loads.failed_count
        said, loaded = one.ask(text)
        # Of a window alone no more than the window has to be loaded.
        assert loaded == (320 if FULL in specs else 64)
        assert (said, one.half.loads.failed_count) == (one.asked[request].said[:2], before)

    @pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS)
    def test_another_instance_finds_it(self, engine, prompt, specs):
        one, other, text = engine(specs), engine(specs), prompt(200)
        one.ask(text)
        one.settle()
        assert other.ask(text)[1] > 0

    def test_a_model_with_other_windows_finds_nothing(self, engine, prompt):
        one, other = engine((FULL, {"window": 50})), engine((FULL, {"window": 51}))
        text = prompt(200)
        one.ask(text)
        one.settle()
        assert other.ask(text)[1] == 0

    @pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 96])
    def test_a_token_is_left_over_for_windows(self, engine, prompt, length):
        """vLLM computes the last token of a full hit, which sees more than the window there."""
        one, text = engine((FULL, {"window": 17})), prompt(length)
        one.ask(text)
        one.reset()
        assert one.ask(text)[1] == (length - 1) // CHUNK_TOKENS * CHUNK_TOKENS

    def test_what_vllm_holds_is_not_loaded_again(self, engine, prompt):
        one, text = engine((FULL, {"window": 100})), prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text[:97], params={"kvcellar.skip_save": True})[1] == 96
        assert one.ask(text)[1] == 192 - 96

    def test_the_longest_end_is_hit_that_has_all_its_windows(self, engine, prompt, cellar):
        """A window that was damaged ends the hit before it; the full group still has it all."""
        one, text = engine((FULL, {"window": 30})), prompt(200)
        one.ask(text)
        one.settle()
        forget(cellar, one, text, group=1, chunk=5)
        one.reset()
        assert one.ask(text, params={"kvcellar.skip_save": True})[1] == 160
        # An end behind it needs only its own window.
        forget(cellar, one, text, group=1, chunk=3)
        one.reset()
        assert one.ask(text, params={"kvcellar.skip_save": True})[1] == 160
        one.reset()
        assert one.ask(text)[1] == 160
        one.reset()
        assert one.ask(text)[1] == 192

    def test_it_works_without_vllms_own_prefix_cache(self, engine, prompt):
        one, text = engine((FULL, {"window": 50}), prefix_caching=False), prompt(200)
        one.ask(text)
        one.settle()
        assert one.ask(text)[1] == 192


@needs_failures
class TestStores:
    def test_what_the_server_lost_is_stored_again_as_far_as_it_is_still_there(
        self, engine, prompt, cellar
    ):
        """vLLM holds the prompt itself, of windows only the end; later ends have all they need."""
        one, text = engine((FULL, {"window": 50})), prompt(200)
        one.ask(text)
        one.settle()
        clear(cellar)
        longer = text + prompt(100)
        one.ask(longer)
        one.settle()
        one.reset()
        assert one.ask(longer)[1] == 288

    def test_windows_that_were_put_off_are_not_stored_from_freed_blocks(
        self, engine, prompt, monkeypatch
    ):
        monkeypatch.setattr("kvcellar.engines.vllm.stores.PUT_OFF_S", 0.0)
        one = engine((FULL, {"window": 20}), step_tokens=64)
        start, refused = one.half.stores._start, iter([True] * 3)

        def refuse(offer, replies):
            if next(refused, False):
                (line,), (reply,) = offer.bound.lines, replies
                states = b"\x03" * len(reply.states)
                one.half.stores._exchange.cancel(line, reply.reservation)
                replies = [type(reply)(reply.id, 0, states, b"")]
            return start(offer, replies)

        monkeypatch.setattr(one.half.stores, "_start", refuse)
        text = prompt(300)
        one.ask(text)
        one.settle()
        counts = one.half.stores.counts
        assert counts.full > 0
        # The full group's chunks are all offered again, of the window's only the last ones.
        assert 9 < counts.stored < 18
        look_back(one)

    def test_decoded_chunks_are_stored_when_they_fill(self, engine, prompt):
        one = engine((FULL, {"window": 20}), options={"kvcellar.save_decode_cache": True})
        text = prompt(40)
        said, _ = one.ask(text, 100)
        one.settle()
        one.reset()
        assert one.ask(text + said)[1] == 128

    def test_blocks_of_a_late_copy_are_given_to_nobody(self, engine, prompt):
        late = iter([12] * 40)
        one = engine((FULL, {"window": 50}), blocks=60, delays=Delays(store=lambda: next(late, 0)))
        text = prompt(200)
        one.ask(text)
        for _ in range(6):
            one.add(prompt(200))
        one.settle()
        one.reset()
        assert one.ask(text)[1] == 192


@needs_failures
class TestRoom:
    """vLLM counts what windows gave back as if it were there, and admits a load too many."""

    def burst(self, engine, prompt):
        """Have three prompts loaded at once that leave the first one too little to go on."""
        one = engine(({"window": 75}, {"window": 75}, FULL), blocks=72, step_tokens=64,
                     delays=Delays(load=lambda: 3))  # fmt: skip
        texts = [prompt(250), prompt(98), prompt(263)]
        for text in texts:
            one.ask(text, 1)
            one.settle()
        one.reset()
        for text in texts:
            one.add(text, 1)
        return one

    def test_loads_leave_room_for_one_another(self, engine, prompt):
        one = self.burst(engine, prompt)
        before = one.loaded_tokens
        one.settle()
        assert one.loaded_tokens - before == 224 + 96 + 256
        assert len(one.half._headroom) == 0

    def test_a_hit_waits_no_longer_than_is_bearable(self):
        clock, groups = FakeClock(), (KVGroup(0, 16), KVGroup(1, 16, window=40))
        free = [0]
        pins = SimpleNamespace(free=lambda: free[0])
        room = Headroom(groups, step_tokens=64, pins=pins, clock=clock)

        def admit(found=160, prompt=200):
            return room.admit("b", computed_tokens=0, found_tokens=found, prompt_tokens=prompt)

        assert admit() == 160
        room.begin("a", rest_tokens=40)
        # Ten blocks of the one group, three of the window; then four for each group's next step.
        free[0] = 13 + 8 + 8
        assert admit() == 160
        free[0] -= 1
        assert admit() is None
        clock.advance(HOLD_S)
        assert admit() == 0
        room.end("a")
        assert admit() == 160


@needs_failures
def test_a_hit_of_several_servers_is_what_they_agree_on(toy, prompt):
    """What one leases for its end is of no use at the other's; it is computed and stored again."""
    text, silent = prompt(200), {"kvcellar.skip_save": True}
    pair = [Cellar().start() for _ in range(2)]
    specs, ports = (FULL, {"window": 50}), [one.port for one in pair]
    try:
        with ToyEngine(toy, ports, ranks=2, specs=specs, blocks=120) as one:
            one.wait_bound()
            one.ask(text)
            one.settle()
            one.reset()
            assert one.ask(text)[1] == 192
            one.reset()
            forget(pair[1].server, one, text, group=1, chunk=5, part=1)
            one.reset()
            assert one.ask(text, params=silent)[1] == 0
            one.reset()
            one.ask(text)
            one.settle()
            one.reset()
            assert one.ask(text)[1] == 192
            one.settle()
        assert all(one.held() == (0, 0) for one in pair)
    finally:
        for one in pair:
            one.kill()


@needs_failures
class TestFailures:
    def test_a_failed_load_is_computed_from_the_start(self, engine, prompt):
        one = engine((FULL, {"window": 50}), delays=Delays(load_fails=lambda: True))
        text = prompt(200)
        one.ask(text)
        one.reset()
        assert one.ask(text)[1] == 0
        assert one.half.loads.failed_count == 1

    def test_a_load_that_fails_on_one_rank_only_is_computed(self, engine, prompt):
        fails = iter([False, True])
        one = engine(
            ({"window": 50},), ranks=2, delays=Delays(load_fails=lambda: next(fails, False))
        )
        text = prompt(200)
        one.ask(text)
        one.reset()
        one.ask(text)
        assert one.half.loads.failed_count == 1

    def test_a_damaged_chunk_is_recomputed_and_stored_again(self, engine, prompt):
        one, text = engine((FULL, {"window": 50})), prompt(200)
        one.ask(text)
        one.settle()
        damage(one, text, 64)
        one.reset()
        one.ask(text)
        assert one.half.loads.failed_count == 1
        one.reset()
        assert one.ask(text)[1] == 192

    def test_a_block_that_nothing_would_fill_fails_the_load(self, engine, prompt, monkeypatch):
        """Whatever a vLLM to come keeps beyond a window, it is never taken for loaded."""
        one, text = engine((FULL, {"window": 50})), prompt(200)
        one.ask(text)
        one.settle()
        one.reset()
        allocated = one.half.on_allocated

        def with_more(request, tables, tokens):
            if tokens:
                full, window = tables
                tables = (full, [7 if at == 1 else id_ for at, id_ in enumerate(window)])
            allocated(request, tables, tokens)

        monkeypatch.setattr(one.half, "on_allocated", with_more)
        assert one.ask(text)[1] == 0
        assert one.half.loads.failed_count == 1


@needs_failures
@pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_random_days_end_well(toy, cellar, seed, specs):
    assert play(toy, cellar.port, seed, actions=150, specs=specs).steps > 0


@pytest.mark.skipif(can_fail_whole_loads(), reason="only what cannot fail safely is refused")
def test_a_vllm_that_cannot_be_told_of_failures_is_refused(toy, cellar):
    with pytest.raises(UnsupportedModelError, match=r"KV group 1 \(SlidingWindowSpec"):
        ToyEngine(toy, cellar.port, specs=(FULL, {"window": 50}))


def forget(cellar, engine, text, *, group, chunk, part=0):
    """Delete one group's part of a chunk."""
    from kvcellar.protocol.messages import Delete

    request = engine.add(text, 1, params={"kvcellar.skip_save": True})
    state = engine.half._states[request]
    bound = engine.half._binder.current()
    chain = state.keys(bound, engine.half._adapters, token_count=len(text))
    key = bound.groups[group].keys(chain.key(chunk, part=part))
    engine.settle()
    with cellar.tool() as session:
        reply = session.call(lambda id_: Delete(id_, key), timeout_s=5.0)
    assert reply.states == b"\x01"
