"""The namespace of an engine: how large its chunks are, and which ranks hold which shard."""

import pytest
from tests.engines.vllm.toy_engine import BLOCK_TOKENS, ToyEngine
from tests.server.running import RunningServer, eventually

from kvcellar.engines.vllm.binding import holders_of
from kvcellar.errors import MismatchError
from kvcellar.layout.shard import PageRegion, ShardLayout

pytestmark = pytest.mark.engine


def layout(rank, **changes):
    given = {"block_tokens": 16, "regions": (PageRegion("a", 64),), "format": "f", **changes}
    return ShardLayout(rank, **given)


@pytest.mark.parametrize(("wish", "chunk"), [(1, 16), (16, 16), (17, 32), (40, 48)])
def test_a_chunk_is_the_smallest_number_of_blocks_that_is_no_less_than_the_wish(toy, wish, chunk):
    with RunningServer("--chunk-size", str(wish)) as server:
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        with ToyEngine(toy, server.port) as engine:
            engine.wait_bound()
            bound = engine.half._binder.current()
            assert (bound.chunk_tokens, bound.groups[0].blocks) == (chunk, chunk // BLOCK_TOKENS)
            text = list(range(100))
            engine.ask(text)
            engine.settle()
            engine.reset()
            assert engine.ask(text)[1] == 100 // chunk * chunk
            engine.settle()


def test_each_rank_holds_its_own_shard_unless_it_says_otherwise():
    assert holders_of((layout(0), layout(1))) == ((0,), (1,))
    shared = tuple(layout(rank, shared_as=0) for rank in range(3))
    assert holders_of(shared) == ((0, 1, 2),)


@pytest.mark.parametrize("change", [{"format": "g"}, {"regions": (PageRegion("a", 32),)}])
def test_ranks_that_share_a_shard_lay_it_out_alike(change):
    with pytest.raises(MismatchError, match=r"ranks \(0, 1\)"):
        holders_of((layout(0, shared_as=0), layout(1, shared_as=0, **change)))
