"""Why a prompt missed, asked of the real server after vLLM's real scheduler has run it."""

import random

import pytest
from tests.engines.vllm.toy_engine import ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.server.running import WAIT_S, eventually

from kvcellar.protocol.messages import Delete, Explain, Objects

pytestmark = pytest.mark.engine


@pytest.fixture
def prompt(request):
    # Tests share a server: what one of them stored, no other may ask for.
    source = random.Random(request.node.name)
    return lambda count: [source.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture
def engine(toy, cellar):
    made = []

    def make(**settings):
        one = ToyEngine(toy, cellar.port, **settings)
        made.append(one)
        one.wait_bound()
        return one

    yield make
    for one in made:
        with one:
            one.settle()


def tool(cellar, make):
    with cellar.tool() as session:
        return session.call(make, timeout_s=WAIT_S)


def why(cellar, engine, text, **more):
    """Ask an engine a prompt and then the server why it missed."""
    engine.ask(text, **more)
    engine.settle()
    name = list(engine.asked)[-1]
    return eventually(
        lambda: next(
            (miss for miss in tool(cellar, lambda id_: Explain(id_, name)).misses
             if miss["request"] == name),
            None,
        )
    )  # fmt: skip


def test_each_reason_is_told_from_what_the_engine_really_sent(cellar, engine, prompt):
    one, text = engine(), prompt(200)
    assert why(cellar, one, text)["reason"] == "new"

    other_end = [*text[:150], *prompt(50)]
    miss = why(cellar, one, other_end)
    assert miss["reason"] == "tokens"
    assert (miss["tokens"], miss["hit_tokens"]) == (200, 128)
    assert 128 <= miss["evidence"]["equal_tokens"] <= 150 < miss["evidence"]["differs_before"]

    miss = why(cellar, one, text, cache_salt="somebody's secret")
    assert miss["reason"] == "salt"
    assert "secret" not in repr(miss)

    assert why(cellar, one, prompt(20))["reason"] == "short"
    assert why(cellar, one, text)["reason"] == "hit"

    objects = tool(cellar, lambda id_: Objects(id_, 0, 5_000)).objects
    keys = b"".join(each["key"] for each in objects)
    tool(cellar, lambda id_: Delete(id_, keys, True))
    miss = why(cellar, one, text)
    assert (miss["reason"], miss["evidence"]["chunk"]) == ("deleted", 0)


def test_the_first_field_that_makes_another_engine_is_named(cellar, engine, prompt):
    one, text = engine(), prompt(200)
    why(cellar, one, text)
    # Two ranks lay their shards out otherwise and are another engine.
    miss = why(cellar, engine(ranks=2), text)
    assert miss["reason"] == "engine"
    assert miss["evidence"]["field"] == miss["evidence"]["fields"][0]
    assert "parallel.tensor" in miss["evidence"]["fields"]
    assert one.config.kv_transfer_config.engine_id in miss["text"]


def test_a_reset_is_named(cellar, engine, prompt):
    one, text = engine(), prompt(200)
    why(cellar, one, text)
    one.reset(connector=True)
    one.wait_bound()
    assert "was reset" in why(cellar, one, text)["text"]


def test_what_the_engine_counts_reaches_the_status(cellar, engine, prompt):
    one = engine()
    one.ask(prompt(200))
    one.settle()
    name = one.config.kv_transfer_config.engine_id

    def counts():
        instances = cellar.status()["kvcellar"]["instances"]
        (own,) = [each["counts"] for each in instances if each["name"] == name]
        return own

    assert eventually(lambda: counts().get("stored") == 6 and counts())["offered"] == 6
