"""Worker halves without torch: real clients of a real server that copy numbers.

Every rank has its own link, pages and jobs. A copy happens whole steps after its job came, as the
test wants it, so blocks that were not kept would be read or written too late and seen to be wrong.
"""

from dataclasses import dataclass, field

import numpy as np

from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
from kvcellar.engines.pages import NOT_WRITTEN
from kvcellar.engines.vllm.metadata import JobResult, WorkerReport
from kvcellar.errors import KVCellarError
from kvcellar.layout.shard import PageRegion, ShardLayout
from kvcellar.memory.seal import seal
from kvcellar.protocol.messages import REF_BYTES, Abort, Commit, Damaged, Role

WAIT_S = 20.0


def seal_of(key, rank, data):
    return seal(data, bytes(key), rank).to_bytes(8, "little")


def _written(block_ids):
    return [block for block in block_ids if block != NOT_WRITTEN]


@dataclass
class Delays:
    """Steps between a job's arrival and its copy; and which jobs fail on which rank."""

    load: object = lambda: 0
    store: object = lambda: 0
    load_fails: object = lambda: False
    store_fails: object = lambda: False


@dataclass
class _Job:
    job: object
    is_load: bool
    steps: int


@dataclass
class ToyWorker:
    """One rank, counted as in its part of the engine's ranks."""

    port: int
    instance_id: str
    rank: int
    ranks: int
    block_count: int
    block_tokens: int
    groups: int
    delays: Delays
    is_shared: bool = False
    part: int = 0
    kv_rank: int = 0
    jobs: list = field(default_factory=list)
    received: set = field(default_factory=set)
    spoiled: set = field(default_factory=set)
    failed: set = field(default_factory=set)
    results: dict = field(default_factory=dict)
    loaded_tokens: int = 0
    step: int = 0

    def __post_init__(self):
        self.pages = np.full((self.block_count, self.block_tokens), -1, dtype=np.int64)
        page_bytes = self.pages[0].nbytes
        self.shard = 0 if self.is_shared else self.rank
        layouts = tuple(
            ShardLayout(
                self.rank,
                self.block_tokens,
                (PageRegion(f"toy {group}", page_bytes),),
                "toy",
                shared_as=0 if self.is_shared else None,
            )
            for group in range(self.groups)
        )
        self.link = Link(
            ClientOptions(port=self.port, heartbeat_s=0.2),
            Identity(
                Role.WORKER,
                instance_id=self.instance_id,
                software="toy",
                rank=self.rank,
                world_size=self.ranks,
                layouts=layouts,
            ),
            clock=SystemClock(),
            on_session=self._on_session,
        )
        self.arenas = []
        self.link.start()

    def close(self):
        self.link.close()
        for arena in self.arenas:
            arena.close()

    def begin(self, metadata):
        for job in self._own(metadata.loads):
            self.jobs.append(_Job(job, is_load=True, steps=self.delays.load()))
        self.step = metadata.step
        for job in self._own(metadata.stores):
            self.jobs.append(_Job(job, is_load=False, steps=self.delays.store()))

    def _own(self, jobs):
        return [job for job in jobs if job.part == self.part]

    def tick(self):
        """Run what is due; called after each step's computation."""
        due = [job for job in self.jobs if job.steps <= 0]
        self.jobs = [job for job in self.jobs if job.steps > 0]
        for job in self.jobs:
            job.steps -= 1
        for job in due:
            self._load(job.job) if job.is_load else self._store(job.job)

    def take(self):
        """Return what ended since the last call.

        These are requests, spoiled blocks, requests that failed, and a report or None.
        """
        taken = (
            self.received,
            self.spoiled,
            self.failed,
            WorkerReport(self.results, self.step) if self.results or self.step else None,
        )
        self.received, self.spoiled, self.results, self.step = set(), set(), {}, 0
        self.failed = set()
        return taken

    def _on_session(self, session):
        self.arenas.append(session.arena)

    def _session(self, boot_id):
        session = self.link.session
        return session if session is not None and session.boot_id == boot_id else None

    def _load(self, job):
        session = self._session(job.boot_id)
        ok = session is not None and not self.delays.load_fails()
        bad, most = [], 0
        for part in job.groups:
            bad += self._load_part(session, job, part) if ok else _written(part.block_ids)
            most = max(most, len(_written(part.block_ids)))
        self.loaded_tokens += 0 if bad else most * self.block_tokens
        self.received.add(job.request_id)
        if job.is_divisible:
            self.spoiled.update(bad)
        elif bad:
            self.failed.add(job.request_id)
        self._end(job, ok=not bad, size_bytes=most * self.pages[0].nbytes)

    def _load_part(self, session, job, part):
        """Copy one group's chunks and return the blocks that were not filled."""
        width, bad = part.blocks_per_chunk, []
        for index in range(part.chunk_count):
            chunk = part.block_ids[index * width : (index + 1) * width]
            at = (index * job.shard_count + self.shard) * REF_BYTES
            offset = int.from_bytes(part.refs[at : at + 8], "little")
            size = width * self.pages[0].nbytes
            data = bytes(session.arena.view[offset : offset + size])
            key = part.keys[index * 32 : index * 32 + 32]
            if seal_of(key, self.shard, data) != part.refs[at + 8 : at + 16]:
                bad += _written(chunk)
                self._say(session, lambda id_, k=key, o=offset: Damaged(id_, k, self.shard, o))
                continue
            pages = np.frombuffer(data, dtype=np.int64).reshape(width, self.block_tokens)
            for block, page in zip(chunk, pages, strict=True):
                if block != NOT_WRITTEN:
                    self.pages[block] = page
        return bad

    def _store(self, job):
        if not job.groups or job.writers[self.shard] != self.rank:
            self._end(job, ok=True, size_bytes=0)
            return
        session = self._session(job.boot_id)
        ok = session is not None and not self.delays.store_fails()
        seals = [b""] * job.chunk_count
        for part in job.groups if ok else ():
            width = part.blocks_per_chunk
            for index, place in enumerate(part.places):
                data = self.pages[part.block_ids[index * width : (index + 1) * width]].tobytes()
                at = (index * job.shard_count + self.shard) * 8
                offset = int.from_bytes(part.offsets[at : at + 8], "little")
                session.arena.view[offset : offset + len(data)] = data
                key = part.keys[index * 32 : index * 32 + 32]
                seals[place] = seal_of(key, self.shard, data)
        if ok:
            ok = self._say(
                session,
                lambda id_: Commit(id_, job.reservation, self.shard, b"".join(seals), 0.001),
            )
        elif session is not None:
            self._say(session, lambda id_: Abort(id_, job.reservation, self.shard))
        blocks = sum(len(part.block_ids) for part in job.groups)
        self._end(job, ok=ok, size_bytes=blocks * self.pages[0].nbytes)

    def _say(self, session, make):
        try:
            session.call(make, timeout_s=WAIT_S)
        except KVCellarError:
            return False
        return True

    def _end(self, job, *, ok, size_bytes):
        self.results[job.job_id] = JobResult(
            ranks_done=int(ok),
            ranks_failed=int(not ok),
            size_bytes=size_bytes if ok else 0,
            copy_s=0.001,
        )
