"""The two copy threads of a worker and what they tell the server.

Loads and stores have a lane each, so that a request never waits behind somebody's store. A load
runs on the arena of the life of the server that granted it, also while that server is dead; a
store runs only while its server lives. Every job that comes in ends in exactly one outcome,
whatever happens to it. Made by `worker`, which feeds it from the step's thread.
"""

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvcellar.client.link import Link
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.engines.access import PageAccess
from kvcellar.engines.lane import Lane
from kvcellar.engines.pages import NOT_WRITTEN, Copier
from kvcellar.engines.shelf import ArenaShelf, Hold
from kvcellar.engines.touch import Toucher
from kvcellar.engines.vllm.copies import Copied, ShardCopies
from kvcellar.engines.vllm.metadata import JobResult, LoadJob, StoreJob
from kvcellar.engines.vllm.outcomes import Outcomes
from kvcellar.engines.vllm.settlements import Settlements
from kvcellar.errors import KVCellarError, TimeoutExpiredError
from kvcellar.layout.shard import EXACT
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.messages import Damaged, Loaded, Request
from kvcellar.telemetry.logs import EventLog

__all__ = ["Copying"]

LOADS_MAX = 1024
"""Loads that may wait for the copy thread."""
STORES_MAX = 256
"""Stores that may wait for the copy thread."""
CLOSE_TIMEOUT_S = 0.3
LEAVE_TIMEOUT_S = 10.0
"""How long an engine that falls asleep waits for one batch of a copy, which takes milliseconds."""
TELL_TIMEOUT_S = 0.25
"""How long what a load has to say may wait for the store lane's own conversation."""

NOTHING = Copied(chunk_count=0, size_bytes=0, copy_s=0.0)

log = EventLog("vllm.kvcellar.copying")


class _Load(NamedTuple):
    """A load on its way to its lane."""

    job: LoadJob
    hold: Hold
    after: object
    queued_s: float


class _Store(NamedTuple):
    """A store on its way to its lane."""

    job: StoreJob
    hold: Hold
    after: object


class Copying:
    """Runs one rank's jobs; `load` and `store` only queue."""

    def __init__(
        self,
        link: Link,
        copiers: Sequence[Copier],
        *,
        rank: int,
        shard: int,
        delay_s: float,
        clock: Clock,
    ) -> None:
        """Start the threads.

        Args:
            link: to the server; its sessions are to be handed to `meet`.
            copiers: for the pages of each KV group; what one does to the arena holds for all.
            rank: this worker's.
            shard: of a chunk, that this rank holds.
            delay_s: how long every copy waits before it begins, for tests.
            clock: for deadlines and for how long copies took.
        """
        self.outcomes = Outcomes()
        self._link = link
        self._fidelities = frozenset.intersection(*(each.fidelities for each in copiers))
        self._copies = ShardCopies(copiers, shard=shard, clock=clock)
        self._mark = copiers[0].mark
        self._rank = rank
        self._shard = shard
        self._delay_s = delay_s
        self._shelf = ArenaShelf(clock, before_close=copiers[0].disown)
        self._settlements = Settlements(link, shard=shard)
        self._clock = clock
        self._closing = threading.Event()
        self._pages = PageAccess()
        self._toucher = Toucher(self._shelf, copiers[0], ready=self._ready_steps, clock=clock)
        self._load_lane = Lane("kvcellar-loads", self._run_load, depth_max=LOADS_MAX)
        self._store_lane = Lane(
            "kvcellar-stores", self._run_store, depth_max=STORES_MAX, tick=self._tidy
        )
        # What it queues is the one thing that has to be done first.
        self._quiet_lane: Lane[Callable[[], None]] = Lane(
            "kvcellar-quiet", lambda job: job(), depth_max=1, tick=self._toucher.touch
        )
        self._quiet_lane.offer(functools.partial(self._copies.warm_up, fidelity=EXACT))

    def meet(self, session: Session) -> None:
        """Take over the arena of a new session; called on the keeper's thread."""
        if session.arena is not None:
            self._shelf.install(session.boot_id, session.arena)
        fidelity = session.welcome.fidelity
        if fidelity != EXACT and fidelity in self._fidelities:
            self._quiet_lane.offer(functools.partial(self._copies.warm_up, fidelity=fidelity))

    def load(self, job: LoadJob) -> None:
        """Queue a load, or end it at once where it cannot be done."""
        hold = self._take(job)
        if hold is not None:
            now_s = self._clock.monotonic_s()
            if self._load_lane.offer(_Load(job, hold, self._mark(), now_s)):
                return
            self._shelf.give_back(hold)
        self._end_load(job, NOTHING)

    def store(self, job: StoreJob) -> None:
        """Queue a store behind what the step has launched, or drop it where it cannot be done."""
        if not job.groups or job.writers[self._shard] != self._rank:
            # Only other servers lack something, or it is the turn of a rank with the same bytes.
            self.outcomes.add_store(job.job_id, JobResult(ranks_done=1))
            return
        hold = self._take(job)
        if hold is not None:
            if self._store_lane.offer(_Store(job, hold, self._mark())):
                return
            self._shelf.give_back(hold)
        self._end_store(job, NOTHING)

    def leave_pages(self) -> None:
        """Touch the engine's pages no more until `enter_pages`; jobs end without a copy meanwhile.

        Blocks until the batch that is being copied is over; idempotent.

        Raises:
            TimeoutExpiredError: it was not over in `LEAVE_TIMEOUT_S`; the pages must stay.
        """
        if not self._pages.close(timeout_s=LEAVE_TIMEOUT_S):
            raise TimeoutExpiredError(
                f"a copy still uses the KV cache after {LEAVE_TIMEOUT_S:.0f} s; it cannot be freed"
            )

    def enter_pages(self) -> None:
        """Copy again; the pages are where they were. Idempotent."""
        self._pages.open()

    def close(self) -> None:
        """End the threads and say goodbye; idempotent; takes less than a second.

        The server may give our slots to others once we said goodbye, so we do not say it while a
        copy still runs: then our process's end tells it.
        """
        self._closing.set()
        for lane in (self._load_lane, self._store_lane, self._quiet_lane):
            lane.stop()
        end_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
        is_over = True
        for lane in (self._load_lane, self._store_lane):
            is_over &= lane.join(max(0.0, end_s - self._clock.monotonic_s()))
        # What it reads of the arena keeps the arena mapped, but nobody waits for it.
        self._quiet_lane.join(max(0.0, end_s - self._clock.monotonic_s()))
        if not is_over:
            atexit.unregister(self._link.close)
            return
        self._link.close()
        self._shelf.close()

    def _take(self, job: LoadJob | StoreJob) -> Hold | None:
        if job.fidelity not in self._fidelities:
            return None
        return self._shelf.take(job.boot_id)

    def _run_load(self, queued: _Load) -> None:
        copied, wait_s = NOTHING, 0.0
        try:
            # Not a part of how fast loads are: compiling, and the loads before this one.
            self._copies.warm_up(fidelity=queued.job.fidelity)
            wait_s = self._clock.monotonic_s() - queued.queued_s
            self._closing.wait(self._delay_s)
            copied = self._copies.load(
                queued.job, lambda: self._reading(queued.hold), after=queued.after
            )
        finally:
            self._shelf.give_back(queued.hold)
            # Said before the load is over: else the recomputed chunk may be offered while the
            # server still believes that it has it.
            self._tell_damage(queued.job, copied)
            self._end_load(queued.job, copied, wait_s=wait_s)
            self._tell_load(queued.job, copied)

    def _run_store(self, queued: _Store) -> None:
        job, copied = queued.job, NOTHING
        try:
            self._closing.wait(self._delay_s)
            session = self._link.session
            if session is not None and session.boot_id == job.boot_id:
                copied = self._copies.store(
                    job, lambda: self._reading(queued.hold), after=queued.after
                )
        finally:
            self._shelf.give_back(queued.hold)
            self._end_store(job, copied)

    def _end_load(self, job: LoadJob, copied: Copied, *, wait_s: float = 0.0) -> None:
        is_whole = copied.chunk_count == job.chunk_count
        self.outcomes.add_load(
            job.job_id,
            job.request_id,
            spoiled=() if is_whole else _spoiled(job, copied),
            result=_result(copied, is_whole=is_whole, wait_s=wait_s),
        )

    def _end_store(self, job: StoreJob, copied: Copied) -> None:
        is_whole = copied.chunk_count == job.chunk_count
        self.outcomes.add_store(job.job_id, _result(copied, is_whole=is_whole))
        if is_whole:
            self._settlements.commit(
                job.boot_id, job.reservation, seals=copied.seals, copy_s=copied.copy_s
            )
        else:
            self._settlements.abort(job.boot_id, job.reservation)

    def _tell_damage(self, job: LoadJob, copied: Copied) -> None:
        """Have the server remove a damaged chunk, and wait until it has, for a bounded time.

        Else a server with much to do may hear of the recomputed chunk first, over the scheduler
        half's connection, and say that it has that already.
        """
        damage = copied.damage
        if damage is None:
            return
        log.warning("damaged slot", request_id=job.request_id, offset=damage.offset)
        session = self._link.session
        if session is not None and session.boot_id == job.boot_id:
            with contextlib.suppress(KVCellarError):
                session.call(
                    lambda id_: Damaged(id_, damage.key, self._shard, damage.offset),
                    timeout_s=TELL_TIMEOUT_S,
                )

    def _tell_load(self, job: LoadJob, copied: Copied) -> None:
        is_whole = copied.chunk_count == job.chunk_count
        self._tell(
            job.boot_id,
            lambda id_: Loaded(
                id_, copied.chunk_count, copied.size_bytes, copied.copy_s, ok=is_whole
            ),
        )

    def _tell(self, boot_id: bytes, make: Callable[[int], Request]) -> None:
        """Tell the server something that it can do without, unless it does not listen."""
        session = self._link.session
        if session is None or session.boot_id != boot_id:
            return
        with contextlib.suppress(KVCellarError):
            session.forget(session.post(make, timeout_s=TELL_TIMEOUT_S))

    @contextlib.contextmanager
    def _reading(self, hold: Hold) -> Iterator[ArenaView | None]:
        """Give the arena for one chunk, or None when the copies have to end."""
        with self._pages.using() as is_there:
            if self._closing.is_set() or not is_there:
                yield None
                return
            with self._shelf.reading(hold) as arena:
                yield arena

    def _ready_steps(self) -> tuple[int, int]:
        """Return how many steps of the present arena are known to hold memory, and their size."""
        session, beat = self._link.session, self._link.last_heartbeat
        if session is None or beat is None or beat.boot_id != session.boot_id:
            return 0, 0
        return beat.steps_ready, session.welcome.step_bytes

    def _tidy(self) -> None:
        """Settle what is copied and unmap what is over; the store lane's tick."""
        self._settlements.send()
        self._shelf.sweep()


def _spoiled(job: LoadJob, copied: Copied) -> list[int] | None:
    """Return the blocks that a load did not fill; None where nothing of it is of use."""
    if not job.is_divisible:
        return None
    (group,) = job.groups
    rest = group.block_ids[copied.chunk_count * group.blocks_per_chunk :]
    return [block for block in rest if block != NOT_WRITTEN]


def _result(copied: Copied, *, is_whole: bool, wait_s: float = 0.0) -> JobResult:
    return JobResult(
        ranks_done=int(is_whole),
        ranks_failed=int(not is_whole),
        size_bytes=copied.size_bytes,
        copy_s=copied.copy_s,
        wait_s=wait_s,
    )
