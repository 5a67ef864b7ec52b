"""One engine of two ranks with a server for each: hits need both, requests need neither.

Beside it runs the same vLLM without us, whose answers every answer must equal. The configuration
is in LMCache's words. Load policy: the default, 'recompute'.
"""

from dataclasses import dataclass

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Engine, assert_same_answer, start_together
from tests.e2e.node import servers_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS
from tests.e2e.processes import eventually

pytestmark = pytest.mark.e2e

RANKS = 2
HEARTBEAT_S = 0.5
BACK_S = 4 * HEARTBEAT_S + 5.0


@dataclass
class Node:
    """Two servers, the engine that uses them, and one that uses none."""

    cellars: list[Cellar]
    engine: Engine
    plain: Engine

    def loaded(self) -> list[float]:
        """Return how many shards of chunks were loaded from each server so far."""
        return [cellar.metric("kvcellar_loaded_chunks_total") for cellar in self.cellars]

    def ask(self, tokens: list[int]) -> int:
        """Ask the engine what vLLM's own cache does not know, and return the tokens loaded."""
        self.engine.reset_prefix_cache()
        answer, counted = watched(self.engine, lambda: self.engine.complete(tokens))
        assert_same_answer(answer, self.plain.complete(tokens))
        return counted.external_hits


@pytest.fixture(scope="module")
def node(tiny, folder, stopping) -> Node:
    cellars = [stopping(Cellar(f"node{part}", folder=folder, l1_gb=0.25)) for part in range(RANKS)]
    for cellar in cellars:
        cellar.start_and_wait()
    options = [
        *("--tensor-parallel-size", str(RANKS)),
        *("--max-model-len", "4096", "--num-gpu-blocks-override", "100"),
    ]
    transfer = servers_transfer(cellars, heartbeat_s=HEARTBEAT_S)
    engine = Engine("engine", tiny, folder=folder, transfer=transfer, options=options)
    plain = Engine("plain", tiny, folder=folder, options=options)
    start_together(stopping(engine), stopping(plain))
    return Node(cellars, engine, plain)


def test_hits_come_from_both_servers_and_a_dead_one_costs_hits_and_nothing_else(node, prompt):
    tokens, others = prompt(1500), prompt(900)
    chunks = len(tokens) // CHUNK_TOKENS
    whole = chunks * CHUNK_TOKENS

    assert node.ask(tokens) == 0
    for cellar in node.cellars:
        # One rank's shards, of all chunks.
        cellar.wait_for_objects(chunks)
    before = node.loaded()
    assert node.ask(tokens) == whole
    eventually(
        lambda: node.loaded() == [count + chunks for count in before],
        5,
        what="each server's chunks loaded once",
    )

    # The server that has less decides.
    node.cellars[1].clear()
    assert node.ask(tokens) == 0
    node.cellars[1].wait_for_objects(chunks)
    assert node.cellars[0].objects() == chunks
    assert node.ask(tokens) == whole

    node.cellars[1].kill()
    assert node.ask(tokens) == 0
    assert node.ask(others) == 0
    node.cellars[0].wait_until_quiet()
    assert node.cellars[0].objects() == chunks, "nothing is stored that nobody could load"

    node.cellars[1].start_and_wait()
    eventually(lambda: node.ask(tokens) == whole, BACK_S, what="hits after the server came back")
    assert node.ask(others) == 0
    for cellar in node.cellars:
        cellar.wait_until_quiet(5)
