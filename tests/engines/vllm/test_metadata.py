"""What the halves exchange survives vLLM's pickling and adds up over ranks."""

import pickle

import pytest

from kvcellar.engines.vllm.metadata import (
    ConnectorMetadata,
    GroupLoad,
    GroupStore,
    JobResult,
    LoadJob,
    StoreJob,
    WorkerReport,
)

pytestmark = pytest.mark.engine


def test_jobs_come_through_a_pickle_as_they_were():
    reading = GroupLoad(0, b"k" * 64, b"r" * 64, [-1, 4, 5, 6])
    load = LoadJob(1, "r", b"b" * 16, 2, (reading, GroupLoad(1, b"l" * 32, b"s" * 32, [9])))
    writing = GroupStore(0, b"k" * 32, b"o" * 16, [7, 8], [0])
    store = StoreJob(2, "r", b"b" * 16, 9, (0, 1), (writing,))
    sent = ConnectorMetadata(loads=[load], stores=[store], chunk_tokens=32)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert (load.chunk_count, reading.chunk_count, reading.blocks_per_chunk) == (3, 2, 2)
    assert (store.chunk_count, writing.chunk_count, writing.blocks_per_chunk) == (1, 1, 2)


def test_reports_of_ranks_add_up():
    one = WorkerReport({1: JobResult(1, 0, 100, 0.5), 2: JobResult(0, 1, 0, 0.1)})
    other = WorkerReport({1: JobResult(1, 0, 100, 0.7), 3: JobResult(1, 0, 10, 0.2)})
    assert one.aggregate(other) == WorkerReport(
        {
            1: JobResult(2, 0, 200, 0.7),
            2: JobResult(0, 1, 0, 0.1),
            3: JobResult(1, 0, 10, 0.2),
        }
    )
    assert one.jobs[1] == JobResult(1, 0, 100, 0.5)


def test_ranks_waits_and_steps_add_up_to_the_longest_and_the_newest():
    one = WorkerReport({1: JobResult(1, 0, 100, 0.5, 0.2)}, step=7)
    other = WorkerReport({1: JobResult(1, 0, 100, 0.1, 0.3)}, step=6)
    assert one.aggregate(other) == WorkerReport({1: JobResult(2, 0, 200, 0.5, 0.3)}, step=7)
    assert WorkerReport().aggregate(one) == one


def test_a_report_is_never_false():
    """vLLM drops reports that are."""
    assert WorkerReport()
