"""Tensor parallel ranks: each stores its shard, a chunk needs all of them, and a rank may die.

One engine with two ranks of two KV heads each. Load policy: the default, 'recompute'. The last
test kills a rank while both store, which ends this vLLM; the server must not notice.
"""

import os
import signal
from dataclasses import dataclass

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Engine, assert_same_answer
from tests.e2e.node import own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS, Peek
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import KV_BYTES_A_TOKEN

pytestmark = pytest.mark.e2e

RANKS = 2
SHARD_BYTES = [CHUNK_TOKENS * KV_BYTES_A_TOKEN // RANKS] * RANKS


@dataclass
class Node:
    """One server and an engine of two ranks."""

    cellar: Cellar
    engine: Engine


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    cellar = stopping(Cellar("node", folder=folder, l1_gb=0.5))
    cellar.start_and_wait()
    engine = Engine(
        "engine",
        tiny,
        folder=folder,
        # The delay leaves time to kill a rank while it stores.
        transfer=own_transfer(cellar, **{"testing.copy_delay_s": 1.0}),
        options=[
            *("--tensor-parallel-size", str(RANKS)),
            *("--max-model-len", "4096", "--num-gpu-blocks-override", "100"),
        ],
    )
    stopping(engine).start()
    engine.wait_until_ready()
    engine.complete([3])
    return Node(cellar, engine)


@pytest.fixture
def node(shared) -> Node:
    """The module's node with nothing cached anywhere."""
    shared.cellar.wait_until_quiet(10)
    shared.cellar.clear()
    shared.engine.reset_prefix_cache()
    return shared


@pytest.mark.parametrize("length", [256, 257, 2000])
def test_both_ranks_load_their_shards(node, prompt, length):
    tokens = prompt(length)
    chunks = length // CHUNK_TOKENS
    cold = node.engine.complete(tokens)
    node.cellar.wait_for_objects(chunks * RANKS)
    node.engine.reset_prefix_cache()
    loaded = node.cellar.metric("kvcellar_loaded_chunks_total")

    hit, counted = watched(node.engine, lambda: node.engine.complete(tokens))

    assert (counted.own_hits, counted.external_hits) == (0, chunks * CHUNK_TOKENS)
    assert node.cellar.metric("kvcellar_loaded_chunks_total") - loaded == chunks * RANKS
    assert_same_answer(hit, cold)
    node.cellar.wait_until_quiet()


@pytest.mark.parametrize("rank", range(RANKS))
def test_damage_of_one_ranks_shard_is_found(node, prompt, rank):
    tokens = prompt(900)
    expected = node.engine.complete(tokens)
    node.cellar.wait_for_objects(3 * RANKS)
    with Peek(node.cellar, shard_bytes=SHARD_BYTES) as peek:
        peek.flip_bit(peek.find(peek.keys(tokens))[1][rank], 77)
    node.engine.reset_prefix_cache()
    damaged = node.cellar.metric("kvcellar_damaged_chunks_total")

    answer = node.engine.complete(tokens)

    assert_same_answer(answer, expected)
    eventually(
        lambda: node.cellar.metric("kvcellar_damaged_chunks_total") == damaged + 1,
        5,
        what="one more damaged chunk counted",
    )
    node.cellar.wait_for_objects(3 * RANKS)


def test_a_rank_killed_while_it_stores_leaves_nothing(node, prompt, at_once):
    """The last test of the module: vLLM does not survive the loss of a rank."""
    kept, lost = prompt(600), prompt(1000)
    node.engine.complete(kept)
    node.cellar.wait_for_objects(2 * RANKS)
    used = node.cellar.metric("kvcellar_l1_used_bytes")
    rank = node.engine.process("VLLM::Worker_TP1")

    def kill() -> None:
        node.cellar.wait_for_writers()
        os.kill(rank, signal.SIGKILL)

    at_once([lambda: node.engine.complete_or_break(lost), kill])

    eventually(
        lambda: node.cellar.metric("kvcellar_l1_used_bytes") == used,
        10,
        what="the slots of the dead rank's store free again",
    )
    node.cellar.wait_until_quiet(10)
    assert node.cellar.objects() == 2 * RANKS
    assert node.cellar.is_healthy()
    node.engine.wait_for_end(30)
    eventually(lambda: node.cellar.status()["kvcellar"]["instances"] == [], 5, what="no instance")
