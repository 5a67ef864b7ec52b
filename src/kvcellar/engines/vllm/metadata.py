"""What the scheduler half and the worker halves tell each other, once a step.

vLLM pickles these from the scheduler's process to every worker and back, so they are plain data.
A *job* is one copy between the engine's blocks and slots of the arena; its id is unique in the
life of the scheduler half, because one request may have several jobs at once and a preempted one
comes back under the same request id. Made by `scheduler`, executed by `worker`.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcellar.keys.digest import KEY_BYTES
from kvcellar.layout.shard import EXACT

__all__ = [
    "ConnectorMetadata",
    "GroupLoad",
    "GroupStore",
    "JobResult",
    "LoadJob",
    "StoreJob",
    "WorkerReport",
]


@dataclass(frozen=True)
class GroupLoad:
    """What a load reads for one KV group.

    Attributes:
        group: its index.
        keys: `KEY_BYTES` a chunk, in prefix order.
        refs: `REF_BYTES` for each shard of each chunk, chunk after chunk, as the server sent them.
        block_ids: the blocks of these chunks, the same number for each, in token order;
            `NOT_WRITTEN` for those that the engine holds already, which others may be reading, and
            for those that it has no use for.
    """

    group: int
    keys: bytes
    refs: bytes
    block_ids: list[int]

    @property
    def chunk_count(self) -> int:
        """Return how many chunks it reads."""
        return len(self.keys) // KEY_BYTES

    @property
    def blocks_per_chunk(self) -> int:
        """Return the blocks of one chunk."""
        return len(self.block_ids) // self.chunk_count


@dataclass(frozen=True)
class LoadJob:
    """Copy stored chunks into an engine's blocks; every rank copies its own shard of each.

    A rank that cannot run it (another boot of the server, no arena yet, a bad seal) still reports
    the request as received, together with the blocks that do not hold what they should.

    Attributes:
        job_id: see the module; reported back in a `WorkerReport` by every rank.
        request_id: vLLM's; reported as received exactly once by every rank.
        boot_id: the life of the server whose arena the groups' `refs` point into.
        shard_count: shards a chunk.
        groups: what to read for each KV group.
        is_divisible: whether what came before a failure is of use; else all of it has failed.
        fidelity: the form in which the chunks were stored.
        part: whose ranks run it.
    """

    job_id: int
    request_id: str
    boot_id: bytes
    shard_count: int
    groups: tuple[GroupLoad, ...]
    is_divisible: bool = True
    fidelity: str = EXACT
    part: int = 0

    @property
    def chunk_count(self) -> int:
        """Return how many chunks the job reads, one counted for each KV group."""
        return sum(group.chunk_count for group in self.groups)


@dataclass(frozen=True)
class GroupStore:
    """What a store writes for one KV group.

    Attributes:
        group: its index.
        keys: `KEY_BYTES` for each reserved chunk.
        offsets: `OFFSET_BYTES` for each shard of each reserved chunk, chunk after chunk.
        block_ids: blocks of the reserved chunks, the same number for each, in token order.
        places: the place of each chunk in the reservation, in whose order seals are committed.
    """

    group: int
    keys: bytes
    offsets: bytes
    block_ids: list[int]
    places: list[int]

    @property
    def chunk_count(self) -> int:
        """Return how many chunks it writes."""
        return len(self.keys) // KEY_BYTES

    @property
    def blocks_per_chunk(self) -> int:
        """Return the blocks of one chunk."""
        return len(self.block_ids) // self.chunk_count


@dataclass(frozen=True)
class StoreJob:
    """Copy blocks that this step completes into reserved slots, then commit the shard.

    The blocks stay untouched until every rank has reported the job, whatever became of it. The
    copy may start once the step that carries the job has computed its tokens.

    Attributes:
        job_id: see the module; reported back in a `WorkerReport` by every rank.
        request_id: vLLM's, for logs only.
        boot_id: the life of the server that made the reservation.
        reservation: its handle, for `Commit` and `Abort`.
        writers: the rank that writes each shard of a chunk; the others have nothing to do.
        groups: what to write for each KV group; nothing where only other parts store something.
        fidelity: the form in which to store them.
        part: whose ranks run it.
    """

    job_id: int
    request_id: str
    boot_id: bytes
    reservation: int
    writers: tuple[int, ...]
    groups: tuple[GroupStore, ...]
    fidelity: str = EXACT
    part: int = 0

    @property
    def shard_count(self) -> int:
        """Return the shards of a chunk."""
        return len(self.writers)

    @property
    def chunk_count(self) -> int:
        """Return how many chunks the job writes, one counted for each KV group."""
        return sum(group.chunk_count for group in self.groups)


@dataclass
class ConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """One step's jobs, from the scheduler half to every worker half.

    Attributes:
        loads: to start as soon as the metadata is bound.
        stores: to start once the step's forward pass has been launched.
        chunk_tokens: tokens a chunk in the namespace of now; 0 until it is known.
        step: the step's number, to be reported back; 0 where nobody asks for it.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    chunk_tokens: int = 0
    step: int = 0


@dataclass
class JobResult:
    """What ranks report of one job; adds up over ranks.

    Attributes:
        ranks_done: ranks that copied everything.
        ranks_failed: ranks that ended the job without that.
        size_bytes: bytes copied, over all ranks.
        copy_s: seconds of the slowest rank's copy, from its first byte to its last.
        wait_s: seconds that the job waited for others, on the rank where it waited longest.
    """

    ranks_done: int = 0
    ranks_failed: int = 0
    size_bytes: int = 0
    copy_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Jobs that ended since the last report; a job counts as over when every rank reported it.

    It has no length and is therefore always true: vLLM drops reports that are false.

    Attributes:
        jobs: what became of each job, by job id.
        step: number of the step that has ended with this; 0 where nobody asked for it.
    """

    jobs: dict[int, JobResult] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Return the sum of two ranks' (or two steps') reports."""
        assert isinstance(other, WorkerReport), type(other)
        jobs = dict(self.jobs)
        for job_id, result in other.jobs.items():
            mine = jobs.get(job_id, JobResult())
            jobs[job_id] = JobResult(
                ranks_done=mine.ranks_done + result.ranks_done,
                ranks_failed=mine.ranks_failed + result.ranks_failed,
                size_bytes=mine.size_bytes + result.size_bytes,
                copy_s=max(mine.copy_s, result.copy_s),
                wait_s=max(mine.wait_s, result.wait_s),
            )
        return WorkerReport(jobs, max(self.step, other.step))
