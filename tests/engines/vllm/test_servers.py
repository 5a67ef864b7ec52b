"""One engine with several servers: vLLM's real scheduler and real servers of divided ranks.

Every rank's KV is its own number in the toy model, so a shard that came from another part's server
is seen when it is read.
"""

import os
import random
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.engines.vllm.cellar import Cellar
from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.engines.vllm.toy_play import Day, play
from tests.engines.vllm.toy_worker import Delays
from tests.engines.vllm.worker_rig import SHARD_BYTES as RIG_SHARD_BYTES
from tests.engines.vllm.worker_rig import Rig, Scheduling, done, timeless, until
from tests.server.disk import DiskServer
from tests.server.running import SHARD_BYTES, WAIT_S, RunningServer, eventually

from kvcellar.engines.vllm.lookups import Answer
from kvcellar.engines.vllm.options import read_options
from kvcellar.engines.vllm.parts import Split
from kvcellar.protocol.messages import Clear, Delete, Explain, LookupReply, Objects
from kvcellar.units import GIB

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def eagerness(patience, monkeypatch):
    monkeypatch.setattr("kvcellar.engines.vllm.stores.PUT_OFF_S", 0.05)


@pytest.fixture
def prompt(request):
    source = random.Random(request.node.name)
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def calm():
    """Two servers that stay."""
    both = [Cellar().start() for _ in range(2)]
    yield both
    for one in both:
        assert "Traceback" not in one.server.log()
        one.kill()


@pytest.fixture
def pair(calm):
    """Two servers that stay, empty."""
    for one in calm:
        eventually(lambda one=one: one.held() == (0, 0))
        ask(one, Clear)
    return calm


@pytest.fixture
def shaky():
    """Two servers that the test starts and ends."""
    both = [Cellar() for _ in range(2)]
    yield both
    for one in both:
        if one.server is not None:
            one.thaw()
            one.kill()


def ask(cellar, make):
    with cellar.server.tool() as session:
        return session.call(make, timeout_s=WAIT_S)


def ports(cellars):
    return [one.port for one in cellars]


def keys(cellar):
    """Return the keys of all chunks of a server."""
    return {each["key"] for each in ask(cellar, lambda id_: Objects(id_, 0, 5_000)).objects}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_each_server_keeps_the_shards_of_its_ranks_and_each_rank_loads_its_own(
    toy, pair, prompt, is_shared, is_async
):
    text = prompt(200)
    with ToyEngine(toy, ports(pair), ranks=4, is_shared=is_shared, is_async=is_async) as engine:
        engine.wait_bound()
        assert engine.ask(text)[1] == 0
        engine.settle()
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()
        engine.reset()
        # A part of the last chunk is there: its blocks must not be written.
        engine.ask(text[:16])
        assert engine.ask(text)[1] in {176, 192}
        engine.settle()
    for one in pair:
        objects = ask(one, lambda id_: Objects(id_, 0, 99)).objects
        assert {len(each["shard_bytes"]) for each in objects} == {1 if is_shared else 2}
    first, second = map(keys, pair)
    assert len(first) == len(second) == 6
    assert not first & second, "a server that is named in another place must not be believed"


@pytest.mark.parametrize("poorer", [0, 1])
def test_the_server_that_has_the_least_decides_and_only_what_it_lacks_is_stored_again(
    toy, pair, prompt, poorer
):
    text = prompt(200)
    with ToyEngine(toy, ports(pair), ranks=2) as engine:
        engine.keep(text)
        chain = _chain(engine, text)
        lost = chain.joined(2, 4, part=poorer)
        assert ask(pair[poorer], lambda id_: Delete(id_, lost, True)).states == b"\1\1"

        assert engine.ask(text)[1] == 64
        engine.settle()
        eventually(lambda: all(one.held() == (0, 0) for one in pair))
        assert [len(keys(one)) for one in pair] == [6, 6]
        counts = engine.half.stores.counts
        assert (counts.stored, counts.present) == (6 + 2, 2), counts
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()


def _chain(engine, text):
    """Return the keys that a request of these tokens has."""
    request_id = engine.add(text, params={"kvcellar.skip_save": True})
    state = engine.half._states[request_id]
    chain = state.keys(engine.half._binder.current(), engine.half._adapters, token_count=len(text))
    engine.abort(request_id)
    engine.settle()
    return chain


def test_the_server_that_has_more_says_where_to_ask_why(toy, pair, prompt):
    text = prompt(200)
    with ToyEngine(toy, ports(pair), ranks=2) as engine:
        engine.keep(text)
        lost = _chain(engine, text).joined(0, 1, part=1)
        ask(pair[1], lambda id_: Delete(id_, lost, True))
        assert engine.ask(text)[1] == 0
        name = list(engine.asked)[-1]
        engine.settle()
        reasons = [
            eventually(lambda one=one: ask(one, lambda id_: Explain(id_, name)).misses)[0]["reason"]
            for one in pair
        ]
        assert reasons == ["part", "deleted"]


@pytest.mark.parametrize(
    ("change", "ranks"),
    [("order", 2), ("alone", 2), ("first alone", 1), ("more ranks", 4)],
)
def test_engines_that_divide_their_ranks_otherwise_share_nothing(toy, pair, prompt, change, ranks):
    text, places = prompt(200), ports(pair)
    servers = {
        "order": places[::-1],
        "alone": places[0],
        "first alone": places[0],
        "more ranks": places,
    }[change]
    with ToyEngine(toy, places, ranks=2) as one, ToyEngine(toy, servers, ranks=ranks) as other:
        for engine, hit in [(one, 0), (other, 0), (one, 192), (other, 192)]:
            engine.wait_bound()
            engine.reset()
            assert engine.ask(text)[1] == hit
            engine.settle()


def test_engines_that_divide_their_ranks_alike_share_everything(toy, pair, prompt):
    text = prompt(200)
    with (
        ToyEngine(toy, ports(pair), ranks=2) as one,
        ToyEngine(toy, ports(pair), ranks=2) as other,
    ):
        for engine, hit in [(one, 0), (other, 192)]:
            engine.wait_bound()
            assert engine.ask(text)[1] == hit
            engine.settle()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_killed_during_loads_and_stores_fails_no_request_and_hits_return(
    toy, shaky, prompt, victim, is_async
):
    text = prompt(200)
    for one in shaky:
        one.start()
    delays = Delays(load=lambda: 3, store=lambda: 3)
    with ToyEngine(toy, ports(shaky), ranks=2, is_async=is_async, delays=delays) as engine:
        engine.keep(text)
        engine.load_beside_a_store(text, prompt(100))
        shaky[victim].kill()
        engine.settle()
        eventually(lambda: shaky[1 - victim].held() == (0, 0))

        # Alone the other one is of no use, and is not filled with what nobody can load.
        kept, offered = keys(shaky[1 - victim]), engine.half.stores.counts.offered
        engine.reset()
        assert engine.ask(text)[1] == 0
        assert engine.ask(prompt(100))[1] == 0
        engine.settle()
        assert (keys(shaky[1 - victim]), engine.half.stores.counts.offered) == (kept, offered)

        shaky[victim].start()
        engine.wait_bound()
        engine.reset()
        present = engine.half.stores.counts.present
        assert engine.ask(text)[1] == 0
        engine.settle()
        assert engine.half.stores.counts.present == present, "each chunk was new to one of them"
        assert len(keys(shaky[victim])) == 6
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()
        eventually(lambda: all(one.held() == (0, 0) for one in shaky))


def test_the_engine_computes_until_every_server_is_there(toy, shaky, prompt):
    text = prompt(200)
    shaky[1].start()
    with ToyEngine(toy, ports(shaky), ranks=2) as engine:
        eventually(lambda: engine.half.parts[1].link.session)
        for _ in range(3):
            assert engine.ask(text)[1] == 0
            engine.settle()
            engine.reset()
        assert keys(shaky[1]) == set()
        shaky[0].start()
        engine.keep(text)
        assert engine.ask(text)[1] == 192
        engine.settle()


def test_a_frozen_server_costs_a_deadline_and_the_other_ones_leases_go_back(
    toy, shaky, prompt, monkeypatch
):
    monkeypatch.setattr("kvcellar.engines.vllm.stores.RESERVE_TIMEOUT_S", 0.3)
    texts = [prompt(100) for _ in range(4)]
    for one in shaky:
        one.start()
    options = {"kvcellar.lookup_timeout_s": 0.3, "kvcellar.heartbeat_s": 60}
    with ToyEngine(toy, ports(shaky), ranks=2, options=options) as engine:
        engine.wait_bound()
        for text in texts:
            engine.ask(text)
        engine.settle()
        engine.reset()
        shaky[1].freeze()
        for text in texts:
            assert engine.ask(text)[1] == 0
        engine.settle()
        # Long before a heartbeat would do it.
        eventually(lambda: shaky[0].held() == (0, 0), timeout_s=2.0)
        assert engine.half.parts[0].link.session is not None
        assert engine.half.parts[1].link.session is None
        shaky[1].thaw()
        eventually(lambda: engine.half.parts[1].link.session)
        engine.wait_bound()
        engine.reset()
        assert engine.ask(texts[0])[1] == 96
        engine.settle()
        eventually(lambda: all(one.held() == (0, 0) for one in shaky), timeout_s=2.0)


def test_a_chunk_counts_as_stored_only_where_every_server_had_room(toy, shaky, prompt):
    text = prompt(200)
    small = ("--l1-size-gb", str(64 * SHARD_BYTES / GIB), "--eviction-policy", "noop")
    with RunningServer("--chunk-size", str(CHUNK_TOKENS), *small) as narrow:
        wide = shaky[0].start()
        with ToyEngine(toy, [wide.port, narrow.port], ranks=2) as engine:
            engine.wait_bound()
            counts = engine.half.stores.counts
            with narrow.engine("greedy") as greedy:
                greedy.store(*range(64))
                engine.ask(text)
                engine.settle()
                first = counts.full
                assert (counts.offered, counts.stored) == (first, 0)
                assert first > 0
                engine.reset()
                assert engine.ask(text, params={"kvcellar.skip_save": True})[1] == 0
                engine.settle()
                greedy.call(Clear)
            assert 0 < len(keys(wide)) <= 6
            engine.reset()
            assert engine.ask(text)[1] == 0
            engine.settle()
            assert (counts.full, counts.stored) == (first, 6)
            engine.reset()
            assert engine.ask(text)[1] == 192
            engine.settle()
            assert narrow.status()["kvcellar"]["reservations"] == 0


def test_servers_whose_chunks_differ_are_not_used_and_that_is_said(toy, prompt, caplog):
    text = prompt(100)
    with (
        RunningServer("--chunk-size", "32") as one,
        RunningServer("--chunk-size", "48") as other,
        ToyEngine(toy, [one.port, other.port], ranks=2) as engine,
    ):
        said = "the servers differ in --chunk-size"
        engine.run_until(lambda: engine.half._binder.current() or said in caplog.text)
        for _ in range(3):
            assert engine.ask(text)[1] == 0
            engine.reset()
        engine.settle()
        assert engine.half.stores.counts.offered == 0
        assert caplog.text.count(said) == 1


def test_a_reset_clears_every_server(toy, pair, prompt):
    text = prompt(200)
    with ToyEngine(toy, ports(pair), ranks=2) as engine:
        engine.wait_bound()
        engine.ask(text)
        engine.settle()
        engine.reset(connector=True)
        assert [keys(one) for one in pair] == [set(), set()]
        engine.wait_bound()
        assert engine.ask(text)[1] == 0
        engine.settle()
        engine.reset()
        assert engine.ask(text)[1] == 192
        engine.settle()


@pytest.mark.parametrize("poorer", [0, 1])
def test_what_a_server_has_only_on_its_disk_is_waited_for(toy, shaky, prompt, tmp_path, poorer):
    text = prompt(200)
    memory = shaky[0].start()

    def serve():
        return DiskServer(tmp_path, "--chunk-size", str(CHUNK_TOKENS))

    def engine_with(disk):
        eventually(lambda: disk.status()["kvcellar"]["arena"]["ready_bytes"])
        places = [memory.port, memory.port]
        places[poorer] = disk.port
        return ToyEngine(toy, places, ranks=2, options={"kvcellar.fetch_timeout_s": 20.0})

    with serve() as disk:
        with engine_with(disk) as engine:
            engine.wait_bound()
            engine.ask(text)
            engine.settle()
        disk.wait_written(6)
    with serve() as disk:
        with engine_with(disk) as engine:
            engine.wait_bound()
            assert engine.ask(text)[1] == 192
            engine.settle()
            assert disk.status_metrics()["kvcellar_tier_fetches_total"] == 1

            # What the other one cannot add to is not waited for, however long it would take.
            ask(memory, Clear)
            with disk.tool() as session:
                session.call(Clear, timeout_s=WAIT_S)
            engine.reset()
            os.kill(disk.tier_pid(), signal.SIGSTOP)
            start_s = time.monotonic()
            assert engine.ask(text, params={"kvcellar.skip_save": True})[1] == 0
            assert time.monotonic() - start_s < 10.0
            os.kill(disk.tier_pid(), signal.SIGCONT)
            engine.settle()
        eventually(lambda: disk.status()["kvcellar"]["leases"] == 0)


@pytest.mark.parametrize("seed", range(3))
def test_random_days_with_several_servers_end_well(toy, pair, seed):
    play(toy, ports(pair), seed)
    eventually(lambda: all(one.held() == (0, 0) for one in pair), timeout_s=2.0)


@pytest.mark.parametrize("seed", range(2))
def test_random_days_with_servers_that_come_and_go_end_well(toy, shaky, seed, monkeypatch):
    monkeypatch.setattr("kvcellar.engines.vllm.stores.RESERVE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("tests.engines.vllm.toy_worker.WAIT_S", 0.2)
    for one in shaky:
        one.start()
    chance = Day(seed).chance

    def disturb():
        what, one = chance.random(), chance.choice(shaky)
        if what < 0.02:
            one.freeze()
        elif what < 0.06:
            one.thaw()
        elif what < 0.065:
            one.kill()
            one.start(has_memory=False)

    play(
        toy, ports(shaky), seed, actions=150, disturb=disturb,
        options={"kvcellar.lookup_timeout_s": 0.05},
    )  # fmt: skip
    for one in shaky:
        one.thaw()
    eventually(lambda: all(one.held() == (0, 0) for one in shaky), timeout_s=2.0)


def test_a_fetch_that_found_less_than_was_there_replaces_nothing():
    """As where the server has forgotten it."""
    released = []
    exchange = SimpleNamespace(release=lambda line, lease: released.append((line, lease)))
    lines = [SimpleNamespace(part=SimpleNamespace(index=index)) for index in range(2)]
    found = [LookupReply(1, 3, 11, b"a"), LookupReply(2, 2, 12, b"b")]
    answer = Answer(SimpleNamespace(lines=lines), list(found))
    assert answer.count == 2
    more = LookupReply(4, 4, 14, b"d")
    answer.improve(lines, [LookupReply(3, 0, 0, b""), more], exchange)
    assert (answer.found, answer.count) == ([found[0], more], 3)
    assert released == [(lines[0], 0), (lines[1], 12)]
    answer.give_back(exchange)
    answer.give_back(exchange)
    assert released[2:] == [(lines[0], 11), (lines[1], 14)]


class TestWorker:
    """The real worker half: rank 1 of 2 is alone at its server."""

    @pytest.fixture
    def rank(self, pair):
        rig = Rig(ports(pair), rank=1, world_size=2).start()
        scheduling = Scheduling(pair[1].port, instance="rig:1/2")
        try:
            rig.connected(scheduling.connect().session.boot_id)
            yield rig, scheduling
        finally:
            scheduling.close()
            rig.close()

    def test_a_rank_copies_at_the_server_of_its_part(self, rank):
        rig, scheduling = rank
        job = scheduling.store_job([1, 2], range(4))
        rig.step(stores=[replace(job, part=1)])
        assert timeless(rig.result(job.job_id)) == done(2 * RIG_SHARD_BYTES)
        until(lambda: scheduling.lookup(1, 2).count == 2)
        load = scheduling.load_job([1, 2], range(8, 12))
        rig.step(loads=[replace(load, part=1)])
        assert rig.received() == ({"load"}, set())
        assert rig.blocks(range(8, 12)) == rig.blocks(range(4))

    def test_what_is_for_another_part_is_not_touched_and_nothing_to_do_is_done(self, rank, caplog):
        rig, scheduling = rank
        foreign, own = (scheduling.store_job([number], range(2)) for number in (3, 4))
        nothing = replace(own, job_id=100, reservation=0, keys=b"", offsets=b"", block_ids=[])
        rig.step(stores=[foreign, *(replace(job, part=1) for job in (nothing, own))])
        assert timeless(rig.result(100)) == done(0)
        assert timeless(rig.result(own.job_id)) == done(RIG_SHARD_BYTES)
        until(lambda: scheduling.lookup(4).count == 1)

        load = scheduling.load_job([4], range(8, 10))
        rig.step(loads=[replace(load, job_id=200), replace(load, part=1)])
        rig.result(load.job_id)
        assert rig.reported.keys() == {100, own.job_id, load.job_id}
        assert scheduling.lookup(3).count == 0
        assert caplog.text.count("ERROR") == caplog.text.count("refused") == 0


class TestSplit:
    OPTIONS = read_options({"kvcellar.server_urls": "a:1,b:2"})

    def _split(self, ranks, options=OPTIONS, **parallel):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks, **parallel),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
        )
        return Split.of(config, options), config

    def test_ranks_are_divided_in_the_order_of_the_servers(self):
        split, config = self._split(4)
        assert (split.part_count, split.rank_count) == (2, 2)
        assert [split.instance_id(config, part) for part in range(2)] == [
            "engine:0/2",
            "engine:1/2",
        ]
        assert [str(split.client_options(part).address) for part in range(2)] == [
            "tcp://a:1",
            "tcp://b:2",
        ]

    def test_one_server_takes_any_engine_and_knows_it_by_its_own_name(self):
        split, config = self._split(3, read_options({}), data_parallel_size=2)
        assert (split.part_count, split.rank_count) == (1, 3)
        assert split.instance_id(config, 0) == "engine"

    @pytest.mark.parametrize(
        ("ranks", "parallel", "part"),
        [
            (3, {}, "2 servers for 3 ranks, which cannot be divided equally"),
            (1, {}, "2 servers for 1 ranks"),
            (2, {"data_parallel_size": 2}, "data parallelism excludes.*--data-parallel-size 1"),
            (2, {"data_parallel_index": 1}, "data parallelism excludes"),
            (2, {"pipeline_parallel_size": 2}, "pipeline parallelism excludes"),
        ],
    )
    def test_what_cannot_be_divided_is_a_value_error_with_the_fix(self, ranks, parallel, part):
        with pytest.raises(ValueError, match=part) as refusal:
            self._split(ranks, **parallel)
        assert "kvcellar.server_urls" in str(refusal.value)

    def test_an_engine_with_such_ranks_does_not_start(self, toy):
        with pytest.raises(ValueError, match="cannot be divided equally"):
            ToyEngine(toy, [1, 2], ranks=3)
