"""The server dies, freezes, is absent or too small, clients hang up: requests are answered.

One engine and the server at its address. Every test's load policy is the default, 'recompute'.
What design §8 promises is checked in each: no request fails, no token is wrong, and a second
after the last request nobody holds a lease, a reservation or a block.
"""

import signal
import time
from dataclasses import dataclass

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Answer, Engine, assert_same_answer
from tests.e2e.load import Load
from tests.e2e.node import own_transfer, watched
from tests.e2e.processes import eventually

pytestmark = pytest.mark.e2e

HEARTBEAT_S = 0.5
POOL_BLOCKS = 70
BACK_S = 4 * HEARTBEAT_S + 3.0
"""Until hits begin again: two heartbeats and the server's start, on a machine that is busy."""
SLOWEST_S = 8.0
"""Bound for one request while the server is away; without a cache it takes 0.1 to 0.5 s."""
GROWTH_MAX_BYTES = 8 * 2**20


@dataclass
class Node:
    """One server, one engine, and prompts with the answers that they must get."""

    cellar: Cellar
    engine: Engine
    cases: list[tuple[list[int], Answer]]
    absent: tuple[Answer, Answer]

    def is_hit(self, case: tuple[list[int], Answer]) -> bool:
        """Whether the engine loads a prompt that it has just computed and then lost."""
        tokens, expected = case
        assert_same_answer(self.engine.complete(tokens), expected)
        self.engine.reset_prefix_cache()
        answer, counted = watched(self.engine, lambda: self.engine.complete(tokens))
        assert_same_answer(answer, expected)
        return counted.external_hits > 0

    def check_quiet(self) -> None:
        """Check that nothing is held: at the server, nor in the engine's pool."""
        eventually(self.engine.is_idle, 5, what="an idle engine")
        self.cellar.wait_until_quiet()
        # It succeeds only when every block is free, so no pin is left.
        self.engine.reset_prefix_cache(1.0)


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    """Start the engine while its server is absent, then the server."""
    cellar = stopping(Cellar("node", folder=folder, l1_gb=0.5))
    engine = stopping(
        Engine(
            "engine",
            tiny,
            folder=folder,
            transfer=own_transfer(cellar, heartbeat_s=HEARTBEAT_S, lookup_timeout_s=0.5),
            options=["--max-model-len", "8192", "--num-gpu-blocks-override", str(POOL_BLOCKS)],
        )
    )
    engine.start()
    engine.wait_until_ready()
    tokens = [3 + index % 1000 for index in range(700)]
    absent = engine.complete(tokens), engine.complete(tokens)
    return Node(cellar, engine, [], absent)


@pytest.fixture
def node(shared, prompt) -> Node:
    """The module's node, alive, with nothing cached and some prompts whose answers are known."""
    if not shared.cellar.is_alive:
        shared.cellar.start_and_wait()
    shared.cellar.wait_until_quiet(10)
    shared.cellar.clear()
    shared.engine.reset_prefix_cache()
    prefix = prompt(600)
    prompts = [prompt(700), prompt(1500), prefix + prompt(100), prefix + prompt(400), prompt(80)]
    shared.cases = [(tokens, shared.engine.complete(tokens)) for tokens in prompts]
    return shared


def test_an_engine_starts_without_its_server_and_uses_it_when_it_comes(shared, prompt):
    first, second = shared.absent
    assert_same_answer(second, first)
    output = shared.engine.output()
    address = f"localhost:{shared.cellar.port}"
    assert [line for line in output.splitlines() if "WARNING" in line and address in line]

    shared.cellar.start_and_wait()

    tokens = prompt(600)
    case = (tokens, shared.engine.complete(tokens))
    eventually(lambda: shared.is_hit(case), BACK_S, what="a hit after the server came")
    shared.check_quiet()


@pytest.mark.parametrize("away_s", [0.0, 30.0])
def test_a_killed_server_costs_hits_and_nothing_else(node, away_s):
    with Load(node.engine, node.cases) as load:
        load.go_on(2)
        node.cellar.kill()
        load.go_on(away_s)
        node.cellar.start()
        node.cellar.wait_until(node.cellar.is_healthy, 15, what="health")
        asked = load.count
        load.go_on(3)
        assert load.count > asked
    assert load.slowest_s < SLOWEST_S

    eventually(lambda: node.is_hit(node.cases[0]), BACK_S, what="a hit after the restart")
    # The memory of the dead server's arena is free once no engine maps it: within 5 s.
    eventually(lambda: len(node.engine.mapped_arenas()) == 1, 8, what="one arena mapped")
    node.check_quiet()


def test_a_frozen_server_costs_hits_and_nothing_else(node):
    members = {process.pid for process in node.cellar.members()}
    with Load(node.engine, node.cases) as load:
        load.go_on(2)
        node.cellar.freeze()
        try:
            load.go_on(20)
        finally:
            node.cellar.thaw()
        asked = load.count
        load.go_on(3)
        assert load.count > asked
    assert load.slowest_s < SLOWEST_S

    eventually(lambda: node.is_hit(node.cases[0]), BACK_S, what="a hit after the thaw")
    node.check_quiet()
    # However long it was: none of its processes blames another for the time that all slept.
    assert {process.pid for process in node.cellar.members()} == members


def test_two_hundred_aborted_streams_leave_nothing(node, prompt, at_once):
    def abort_all(count: int) -> None:
        prompts = [node.cases[index % 5][0][: 200 + 13 * index] for index in range(count // 2)]
        prompts += [prompt(300 + 7 * index) for index in range(count // 2)]
        at_once(
            [
                lambda tokens=tokens, after=index % 4: node.engine.abort_stream(
                    tokens, after, max_tokens=200
                )
                for index, tokens in enumerate(prompts)
            ]
        )

    abort_all(100)
    node.check_quiet()
    memory, files = node.cellar.memory_bytes(), node.cellar.open_files()
    abort_all(100)

    node.check_quiet()
    assert node.cellar.open_files() <= files
    assert node.cellar.memory_bytes() - memory < GROWTH_MAX_BYTES
    for tokens, expected in node.cases:
        assert_same_answer(node.engine.complete(tokens), expected)


def test_a_request_that_waits_for_admission_keeps_its_lease(node, prompt, at_once):
    """Many heartbeats pass between the lookup's answer and the load that it allowed."""
    waiting, running = prompt(5000), prompt(4000)
    expected = node.engine.complete(waiting)
    node.cellar.wait_until_quiet(5)
    node.engine.reset_prefix_cache()

    def run() -> Answer:
        return node.engine.complete(running, max_tokens=4000)

    def pool_share() -> float:
        return node.engine.metrics()["vllm:kv_cache_usage_perc"]

    def wait() -> tuple[Answer, float]:
        eventually(lambda: pool_share() > 31 / POOL_BLOCKS, 10, what="a pool that is half full")
        started = time.monotonic()
        answer = node.engine.complete(waiting)
        return answer, time.monotonic() - started

    def look() -> list[int]:
        eventually(lambda: node.cellar.holdings()["leases"] == 1, 10, what="a lease")
        seen = []
        for _ in range(10):
            time.sleep(HEARTBEAT_S)
            seen.append(node.cellar.holdings()["leases"])
        return seen

    before = node.engine.counters()
    _, (answer, took_s), leases = at_once([run, wait, look])

    assert took_s > 10 * HEARTBEAT_S, "it had to wait"
    assert leases == [1] * 10
    assert_same_answer(answer, expected)
    assert (node.engine.counters() - before).external_hits == 19 * 256
    node.check_quiet()


def test_an_l1_smaller_than_one_prompt_keeps_what_fits(node, prompt, folder, stopping):
    """Eleven chunks of 0.75 MiB are computed; L1 is 4 MiB, and the prefix's head stays."""
    node.cellar.stop()
    small = stopping(Cellar("small", folder=folder, l1_gb=4 / 1024, ports=node.cellar.ports))
    small.start_and_wait()
    tokens = prompt(3000)
    expected = node.engine.complete(tokens)

    def is_stored() -> bool:
        node.engine.reset_prefix_cache()
        assert_same_answer(node.engine.complete(tokens), expected)
        return small.objects() == 5 and small.is_quiet()

    eventually(is_stored, BACK_S, what="5 chunks in an L1 of 5 slots")
    node.engine.reset_prefix_cache()
    answer, counted = watched(node.engine, lambda: node.engine.complete(tokens))

    assert counted.external_hits == 5 * 256
    assert small.metric("kvcellar_full_chunks_total") > 0
    assert_same_answer(answer, expected)
    with Load(node.engine, node.cases) as load:
        load.go_on(3)
    small.wait_until_quiet()
    small.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_takes_its_pages_child_with_it(node, number):
    assert len(node.cellar.members()) == 2

    node.cellar.signal(number)

    eventually(lambda: not node.cellar.members(), 5, what="the end of all its processes")
    assert_same_answer(node.engine.complete(node.cases[0][0]), node.cases[0][1])


def test_an_engine_that_ends_is_forgotten_at_once(node):
    """The last test of the module: it ends the engine."""
    assert len(node.cellar.status()["kvcellar"]["instances"]) == 1
    eventually(lambda: node.is_hit(node.cases[0]), BACK_S, what="a hit")

    node.engine.stop()

    eventually(lambda: node.cellar.status()["kvcellar"]["instances"] == [], 1, what="no instance")
    node.cellar.wait_until_quiet()
    assert node.cellar.objects() > 0
