"""Engines that share one device and one server answer as vLLM alone does, also when one is killed.

Four engines: 'bare' has no connector and says what is right; 'first' and 'second' share the
server; 'doomed' does too, with copies that start late, and is killed in the middle of them. Load
policy: the default, 'recompute'. Made for a GPU (`make test-gpu`), and true on a CPU.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.device import DEVICE
from tests.e2e.engine import Engine, assert_same_answer, start_together
from tests.e2e.node import own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS, Peek
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import KV_BYTES_A_TOKEN

pytestmark = pytest.mark.e2e

COPY_DELAY_S = 2.0
POOL_TOKENS = 12_288
OPTIONS = ("--max-model-len", "4096", "--num-gpu-blocks-override", DEVICE.blocks(POOL_TOKENS))


@dataclass
class Node:
    """One server and the engines."""

    cellar: Cellar
    bare: Engine
    first: Engine
    second: Engine
    doomed: Engine


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    cellar = stopping(Cellar("node", folder=folder, l1_gb=1))
    cellar.start_and_wait()
    engine = functools.partial(Engine, model=tiny, folder=folder, options=OPTIONS)
    late = own_transfer(cellar, **{"testing.copy_delay_s": COPY_DELAY_S})
    node = Node(
        cellar,
        stopping(engine("bare")),
        stopping(engine("first", transfer=own_transfer(cellar))),
        stopping(engine("second", transfer=own_transfer(cellar))),
        stopping(engine("doomed", transfer=late)),
    )
    start_together(node.bare, node.first, node.second, node.doomed)
    return node


@pytest.fixture
def node(shared) -> Node:
    """The module's node with nothing cached anywhere."""
    shared.cellar.wait_until_quiet(10)
    shared.cellar.clear()
    for engine in (shared.bare, shared.first, shared.second):
        engine.reset_prefix_cache()
    return shared


@pytest.mark.parametrize("length", [255, 256, 257, 1000, 3000])
def test_what_one_engine_stored_gives_another_the_answers_of_vllm_alone(node, prompt, length):
    tokens = prompt(length)
    chunks = length // CHUNK_TOKENS
    expected = node.bare.complete(tokens)
    assert_same_answer(node.first.complete(tokens), expected)
    node.cellar.wait_for_objects(chunks)

    hit, counted = watched(node.second, lambda: node.second.complete(tokens))

    assert (counted.own_hits, counted.external_hits) == (0, chunks * CHUNK_TOKENS)
    assert_same_answer(hit, expected)


def test_many_requests_at_once_on_both_engines_are_all_right(node, prompt, at_once):
    """Stores and loads of both engines run at the same time, and blocks change hands."""
    prefix = prompt(700)
    prompts = [prompt(900) for _ in range(6)] + [prefix + prompt(200) for _ in range(6)]
    expected = [node.bare.complete(tokens) for tokens in prompts]
    before = node.second.counters()
    for _ in range(2):
        asked = [(engine, tokens) for engine in (node.first, node.second) for tokens in prompts]
        answers = at_once([functools.partial(engine.complete, tokens) for engine, tokens in asked])
        for answer, wanted in zip(answers, [*expected, *expected], strict=True):
            assert_same_answer(answer, wanted)
        node.cellar.wait_until_quiet(10)
        for engine in (node.first, node.second):
            engine.reset_prefix_cache()
    assert (node.second.counters() - before).external_hits > 0


def test_an_engine_killed_between_stores_and_loads_spoils_nothing(node, prompt, at_once):
    """The last test of the module."""
    loaded, stored, others = prompt(1000), prompt(1200), [prompt(700) for _ in range(4)]
    asked = [loaded, stored, *others]
    expected = [node.bare.complete(tokens) for tokens in asked]
    node.first.complete(loaded)
    node.cellar.wait_for_objects(len(loaded) // CHUNK_TOKENS)

    def kill() -> None:
        node.cellar.wait_for_writers()
        eventually(lambda: node.cellar.holdings()["leases"] > 0, 30, what="a load's lease")
        node.doomed.kill_all()

    def survive() -> None:
        for tokens, wanted in zip(others, expected[2:], strict=True):
            assert_same_answer(node.first.complete(tokens), wanted)

    at_once(
        [
            functools.partial(node.doomed.complete_or_break, stored),
            functools.partial(node.doomed.complete_or_break, loaded),
            kill,
            survive,
        ]
    )

    node.cellar.wait_until_quiet(10)
    for engine in (node.second, node.first):
        for tokens, wanted in zip(asked, expected, strict=True):
            assert_same_answer(engine.complete(tokens), wanted)
    node.cellar.wait_until_quiet(10)
    with Peek(node.cellar, shard_bytes=[CHUNK_TOKENS * KV_BYTES_A_TOKEN]) as peek:
        found = peek.stored(asked)
        assert len(found) == sum(len(tokens) // CHUNK_TOKENS for tokens in asked)
        node.cellar.clear()
        node.second.reset_prefix_cache()
        for tokens in asked:
            node.second.complete(tokens, max_tokens=1)
        node.cellar.wait_for_objects(len(found))
        afresh = peek.stored(asked)
    for key, data in found.items():
        np.testing.assert_allclose(
            np.frombuffer(data, np.float32),
            np.frombuffer(afresh[key], np.float32),
            atol=DEVICE.kv_tolerance,
        )
