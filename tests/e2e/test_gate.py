"""The gate, on as it is by default: long prompts of a real model are loaded, slow loads are not.

One engine serves the small real model, whose prompts take seconds to compute and milliseconds to
load. The other one serves the tiny model, and its copies begin two seconds late.
"""

from dataclasses import dataclass

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.device import DEVICE
from tests.e2e.engine import Engine, assert_same_answer, start_together
from tests.e2e.node import own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS
from tests.e2e.processes import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(DEVICE.name != "cpu", reason="a GPU computes the small model in no time"),
]

DELAY_S = 2.0
PROMPT_TOKENS = 3 * CHUNK_TOKENS + 20


@dataclass
class Node:
    cellar: Cellar
    real: Engine
    slow: Engine

    def compute(self, engine, prompt):
        """Have a prompt computed and wait until it is stored."""
        before = self.cellar.objects()
        answer = engine.complete(prompt)
        self.cellar.wait_for_objects(before + len(prompt) // CHUNK_TOKENS)
        return answer

    def decided(self, outcome, engine):
        return self.cellar.metric(f"kvcellar_gate_{outcome}_hits_total", engine.name)


@pytest.fixture(scope="module")
def node(tiny, model_folder, folder, stopping):
    cellar = stopping(Cellar("node", folder=folder, l1_gb=1))
    cellar.start_and_wait()
    options = ["--max-model-len", "4096", "--num-gpu-blocks-override", DEVICE.blocks(8192)]
    delay = {"testing.copy_delay_s": DELAY_S}
    engines = [
        Engine(
            name, model, folder=folder, options=options,
            transfer=own_transfer(cellar, gate=True, **more) | {"engine_id": name},
        )
        for name, model, more in (("real", model_folder, {}), ("slow", tiny, delay))
    ]  # fmt: skip
    start_together(*map(stopping, engines))
    return Node(cellar, *engines)


def test_hits_that_win_are_taken_and_go_on_being_taken(node, prompt):
    texts = [prompt(PROMPT_TOKENS) for _ in range(4)]
    answers = [node.compute(node.real, text) for text in texts]
    node.real.reset_prefix_cache()
    for text, cold in zip(texts, answers, strict=True):
        hit, counted = watched(node.real, lambda text=text: node.real.complete(text))
        assert counted.external_hits == 3 * CHUNK_TOKENS
        assert_same_answer(hit, cold)
    eventually(lambda: node.decided("taken", node.real) == 4, 5, what="four hits in the metrics")
    assert node.decided("refused", node.real) == 0
    assert node.cellar.metric("kvcellar_gate_prefill_token_seconds", "real") > 0
    assert node.cellar.metric("kvcellar_gate_load_bytes_per_second", "real") > 0


def test_hits_that_lose_are_refused_after_the_first_and_answered_right(node, prompt):
    texts = [prompt(PROMPT_TOKENS) for _ in range(4)]
    answers = [node.compute(node.slow, text) for text in texts]
    node.slow.reset_prefix_cache()
    hits = []
    for text, cold in zip(texts, answers, strict=True):
        answer, counted = watched(node.slow, lambda text=text: node.slow.complete(text))
        assert_same_answer(answer, cold)
        hits.append(counted.external_hits)
    assert hits == [3 * CHUNK_TOKENS, 0, 0, 0]
    eventually(lambda: node.decided("refused", node.slow) == 3, 5, what="refusals in the metrics")
    assert node.decided("taken", node.slow) == 1
    assert node.cellar.metric("kvcellar_gate_load_overhead_seconds", "slow") > DELAY_S
    node.cellar.wait_until_quiet(5)
