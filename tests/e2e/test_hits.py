"""A prompt that was computed once is loaded: after a reset, a restart, and by another instance.

Two engines share a server: one with the name and keys of LMCache's guide, the other with ours.
Load policy: the default, which the connector makes 'recompute'. Where a prompt's KV came from is
read from vLLM's own counters and from the server's; answers are compared as token ids with their
log-probabilities.
"""

from dataclasses import dataclass

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import (
    BLOCK_TOKENS,
    Answer,
    Engine,
    assert_same_answer,
    start_together,
)
from tests.e2e.node import lmcache_transfer, own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS
from tests.e2e.tiny_model import ADAPTER, OTHER, OTHER_ADAPTER

pytestmark = pytest.mark.e2e

LENGTHS = (1, 255, 256, 257, 513, 2000)
OPTIONS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "160")


@dataclass
class Node:
    """One server and two engines."""

    cellar: Cellar
    first: Engine
    second: Engine

    def forget(self, *engines: Engine) -> None:
        """Empty the own caches of engines."""
        for engine in engines or (self.first, self.second):
            engine.reset_prefix_cache()

    def compute(self, engine: Engine, prompt: list[int], **options: object) -> Answer:
        """Have a prompt computed and wait until all its full chunks are stored."""
        before = self.cellar.objects()
        answer = engine.complete(prompt, **options)
        self.cellar.wait_for_objects(before + len(prompt) // CHUNK_TOKENS)
        return answer


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    cellar = stopping(Cellar("node", folder=folder, l1_gb=1))
    cellar.start_and_wait()

    def adapters(**names: str) -> list[str]:
        words = [f"{name}={tiny.parent / path}" for name, path in names.items()]
        return ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *words]

    first = Engine(
        "first",
        tiny,
        folder=folder,
        transfer=lmcache_transfer(cellar),
        options=[*OPTIONS, *adapters(same=ADAPTER, differs=ADAPTER)],
    )
    second = Engine(
        "second",
        tiny,
        folder=folder,
        transfer=own_transfer(cellar, save_decode_cache=True),
        options=[*OPTIONS, *adapters(same=ADAPTER, differs=OTHER_ADAPTER)],
    )
    start_together(stopping(first), stopping(second))
    return Node(cellar, first, second)


@pytest.fixture
def node(shared) -> Node:
    """The module's node with nothing cached anywhere."""
    shared.cellar.wait_until_quiet()
    shared.cellar.clear()
    shared.forget()
    return shared


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_loaded_after_vllm_lost_it(node, prompt, length):
    tokens = prompt(length)
    stored = length // CHUNK_TOKENS * CHUNK_TOKENS
    cold = node.compute(node.first, tokens)
    own, counted = watched(node.first, lambda: node.first.complete(tokens))
    assert counted.external_hits == max(0, stored - counted.own_hits)
    node.forget(node.first)

    hit, counted = watched(node.first, lambda: node.first.complete(tokens))

    assert (counted.own_hits, counted.external_hits) == (0, stored)
    assert counted.external_queries == length
    assert_same_answer(own, cold)
    assert_same_answer(hit, cold)
    node.cellar.wait_until_quiet()


@pytest.mark.parametrize("length", LENGTHS)
def test_another_instance_loads_what_one_computed(node, prompt, length):
    tokens = prompt(length)
    stored = length // CHUNK_TOKENS
    cold = node.compute(node.first, tokens)
    found = node.cellar.metric("kvcellar_lookup_hit_chunks_total")
    loaded = node.cellar.metric("kvcellar_loaded_chunks_total")

    hit, counted = watched(node.second, lambda: node.second.complete(tokens))

    assert (counted.own_hits, counted.external_hits) == (0, stored * CHUNK_TOKENS)
    assert node.cellar.metric("kvcellar_lookup_hit_chunks_total") - found == stored
    assert node.cellar.metric("kvcellar_loaded_chunks_total") - loaded == stored
    assert_same_answer(hit, cold)
    node.cellar.wait_until_quiet()


@pytest.mark.parametrize("own_blocks", [0, 1, 2, 3, 6, 7, 13, 14, 15])
def test_a_load_begins_where_vllms_own_cache_ends(node, prompt, own_blocks):
    """vLLM holds nothing, a part of a chunk, whole chunks, or more than the server: 7 chunks."""
    tokens = prompt(2000)
    boundary = own_blocks * BLOCK_TOKENS
    node.compute(node.first, tokens)
    node.forget(node.first)
    if own_blocks:
        node.first.complete(tokens[: boundary + 1])

    hit, counted = watched(node.first, lambda: node.first.complete(tokens))

    assert counted.own_hits == boundary
    assert counted.external_hits == max(0, 7 * CHUNK_TOKENS - boundary)
    # The same boundary, but everything before it from vLLM's own cache.
    reached = max(boundary, 7 * CHUNK_TOKENS)
    node.cellar.wait_until_quiet()
    node.cellar.clear()
    node.forget(node.first)
    node.compute(node.first, tokens[: reached + 1])
    node.cellar.clear()
    own, counted = watched(node.first, lambda: node.first.complete(tokens))
    assert (counted.own_hits, counted.external_hits) == (reached, 0)
    assert_same_answer(hit, own)


def test_a_prompt_is_loaded_after_vllms_restart(node, prompt):
    tokens = prompt(1000)
    cold = node.compute(node.first, tokens)
    node.first.stop()
    assert node.cellar.objects() == 3
    node.cellar.wait_until_quiet()

    node.first.start()
    node.first.wait_until_ready()
    hit, counted = watched(node.first, lambda: node.first.complete(tokens))

    assert (counted.own_hits, counted.external_hits) == (0, 768)
    assert_same_answer(hit, cold)


def test_prompts_that_share_a_prefix_load_it_at_once(node, prompt, at_once):
    prefix = prompt(1024)
    prompts = [prefix + prompt(length) for length in (1, 40, 200, 300, 511, 600)]
    node.compute(node.first, prefix)
    expected = [node.first.complete(tokens) for tokens in prompts]
    node.cellar.wait_until_quiet()

    before = node.second.counters()
    answers = at_once([lambda tokens=tokens: node.second.complete(tokens) for tokens in prompts])

    counted = node.second.counters() - before
    assert counted.own_hits + counted.external_hits >= 6 * 1024
    for answer, wanted in zip(answers, expected, strict=True):
        assert_same_answer(answer, wanted)
    node.cellar.wait_until_quiet()


def test_a_salt_shares_nothing_with_another(node, prompt):
    tokens = prompt(600)
    cold = node.compute(node.first, tokens, cache_salt="one")

    for salt in ("two", None):
        options = {"cache_salt": salt} if salt else {}
        other, counted = watched(
            node.second, lambda options=options: node.second.complete(tokens, **options)
        )
        assert (counted.own_hits, counted.external_hits) == (0, 0)
        assert_same_answer(other, cold)
    _, counted = watched(node.second, lambda: node.second.complete(tokens, cache_salt="one"))
    assert counted.external_hits == 512


def test_an_adapter_shares_nothing_with_another(node, prompt):
    tokens = prompt(600)
    base = node.compute(node.first, tokens)
    same = node.compute(node.first, tokens, model="same")
    differs = node.compute(node.first, tokens, model="differs")
    assert node.cellar.objects() == 6
    assert base.tokens != same.tokens

    hit, counted = watched(node.second, lambda: node.second.complete(tokens, model="same"))
    assert counted.external_hits == 512
    assert_same_answer(hit, same)
    other, counted = watched(node.second, lambda: node.second.complete(tokens, model="differs"))
    assert counted.external_hits == 0
    assert other.tokens != differs.tokens


def test_other_weights_of_the_same_shape_share_nothing(node, prompt, tiny, folder, stopping):
    tokens = prompt(600)
    cold = node.compute(node.first, tokens)
    third = stopping(
        Engine(
            "third",
            tiny.parent / OTHER,
            folder=folder,
            transfer=lmcache_transfer(node.cellar),
            options=OPTIONS,
        )
    )
    third.start()
    third.wait_until_ready()

    other, counted = watched(third, lambda: third.complete(tokens))

    assert counted.external_hits == 0
    assert other.tokens != cold.tokens
    node.cellar.wait_for_objects(4)
    third.stop()


def test_generated_tokens_are_stored_when_asked_for(node, prompt):
    tokens = prompt(200)
    first = node.first.complete(tokens, max_tokens=100)
    node.cellar.wait_until_quiet()
    assert node.cellar.objects() == 0

    second = node.second.complete(tokens, max_tokens=100)
    node.cellar.wait_for_objects(1)
    assert_same_answer(second, first)

    node.forget(node.first)
    longer = [*tokens, *second.tokens]
    _, counted = watched(node.first, lambda: node.first.complete(longer))
    assert counted.external_hits == 256


def test_a_reset_that_includes_the_external_cache_forgets_for_this_engine(node, prompt):
    tokens = prompt(600)
    cold = node.compute(node.first, tokens)

    node.first.reset_prefix_cache(external=True)

    again, counted = watched(node.first, lambda: node.first.complete(tokens))
    assert counted.external_hits == 0
    assert_same_answer(again, cold)
