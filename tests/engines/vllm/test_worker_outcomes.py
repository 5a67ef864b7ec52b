"""What vLLM is told of jobs, and in which step."""

import pytest

from kvcellar.engines.vllm.metadata import JobResult, WorkerReport
from kvcellar.engines.vllm.outcomes import Outcomes

pytestmark = pytest.mark.engine

DONE = JobResult(ranks_done=1, size_bytes=10, copy_s=0.1)


def test_everything_is_told_once():
    outcomes = Outcomes()
    outcomes.add_load(1, "a", spoiled=[], result=DONE)
    outcomes.add_load(2, "b", spoiled=[7, 8], result=JobResult(ranks_failed=1))
    outcomes.add_store(3, DONE)
    assert outcomes.take_received() == {"a", "b"}
    assert outcomes.take_spoiled() == {7, 8}
    assert outcomes.take_results() == {1: DONE, 2: JobResult(ranks_failed=1), 3: DONE}
    assert outcomes.take_received() == set()
    assert outcomes.take_spoiled() == set()
    assert outcomes.take_results() == {}


def test_spoiled_blocks_are_told_in_the_step_that_tells_of_their_load():
    outcomes = Outcomes()
    assert outcomes.take_received() == set()
    # It ends between two questions of the same step.
    outcomes.add_load(2, "b", spoiled=[7, 8], result=JobResult(ranks_failed=1))
    assert outcomes.take_spoiled() == set()
    assert outcomes.take_received() == {"b"}
    assert outcomes.take_spoiled() == {7, 8}


def test_a_report_counts_as_true_for_vllm_whatever_is_in_it():
    assert WorkerReport({})
