"""Write-behind: what engines stored goes on to the tiers, after the fact and within bounds.

A commit that makes chunks visible leases them for the life of the tier process and queues them;
the tier process writes them while it has nothing to read. The leases keep their slots from being
given away meanwhile, so the queue has a bound in bytes: beyond it chunks are not written, and
counted. Everything runs on the control loop and returns at once. Used by `tiers` and `requests`.
"""

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from kvcellar.keys.digest import NamespaceId
from kvcellar.protocol.tier_messages import TierAnswer, Write, WriteDone
from kvcellar.server.tier_line import TierAsker
from kvcellar.server.tier_meters import TierMeters
from kvcellar.store.entries import Group, OwnerId
from kvcellar.store.grants import Held, hold, vacate
from kvcellar.store.machine import Store
from kvcellar.store.reservations import Reservation
from kvcellar.units import GIB

__all__ = ["WriteBehind"]

QUEUED_MAX_BYTES = GIB
QUEUED_MAX_CHUNKS = 16_384
L1_SHARE = 4
"""The queue may hold a quarter of the arena; the rest is there for those who read and store."""
WRITES_AT_ONCE = 2


@dataclass(eq=False, slots=True)
class _Job:
    """Chunks that are written together, under one lease."""

    owner: OwnerId
    namespace: NamespaceId
    shard_bytes: tuple[int, ...]
    tenant: str
    held: Held


class WriteBehind:
    """What waits to be written to the tiers of a server."""

    def __init__(
        self,
        store: Store,
        meters: TierMeters,
        asker: TierAsker,
        *,
        codec: str,
        l1_bytes: int,
        is_skipping_l1: bool,
    ) -> None:
        """Prepare.

        Args:
            store: where chunks lie.
            meters: counted in.
            asker: passes questions to the tier process.
            codec: the form of the arena's chunks.
            l1_bytes: size of the arena.
            is_skipping_l1: chunks leave the arena once a tier has them.
        """
        self._store = store
        self._meters = meters
        self._asker = asker
        self._codec = codec
        self._bytes_max = min(QUEUED_MAX_BYTES, l1_bytes // L1_SHARE)
        self._is_skipping_l1 = is_skipping_l1
        self._queue: deque[_Job] = deque()
        self._out = 0
        self.bytes = 0
        """Bytes of slots that wait or are being written."""
        self.chunks = 0
        """Chunks that do."""

    def offer(self, owner: OwnerId, reservation: Reservation) -> None:
        """Queue the chunks of a reservation that has just become visible.

        Args:
            owner: the life of the tier process; 0 while there is none.
            reservation: whose last rank has committed.
        """
        for group in reservation.namespace.groups:
            keys = [chunk.key for chunk in reservation.chunks if chunk.group is group]
            self._queue_keys(owner, group, keys, tenant=reservation.tenant.name)
        self._send()

    def life_ended(self) -> None:
        """Forget everything; the leases ended with the owner."""
        self._meters.unwritten_chunks += sum(len(job.held.keys) for job in self._queue)
        self._queue.clear()
        self._out = self.bytes = self.chunks = 0

    def drop(self) -> None:
        """Forget what is not being written yet: the cache was cleared."""
        while self._queue:
            self._release(self._queue.pop())

    def forget(self, keys: AbstractSet[bytes]) -> None:
        """Write these chunks no more, as far as that has not begun: they were deleted."""
        for job in self._queue:
            held = job.held
            width = len(held.refs) // len(held.keys) if held.keys else 0
            kept = [place for place, key in enumerate(held.keys) if key not in keys]
            self.chunks -= len(held.keys) - len(kept)
            # The lease holds all of them until the job has its turn; so do the bytes.
            job.held = held._replace(
                keys=[held.keys[place] for place in kept],
                refs=b"".join([held.refs[place * width : (place + 1) * width] for place in kept]),
            )

    def _queue_keys(self, owner: OwnerId, group: Group, keys: list[bytes], *, tenant: str) -> None:
        """Queue chunks of one KV group, as many as there is place for."""
        # What is behind a gap is of no use, so the leading ones are kept.
        count = min(len(keys), self._places(group.chunk_bytes)) if owner else 0
        self._meters.unwritten_chunks += len(keys) - count
        for at in range(0, count, self._asker.batch_max):
            held = hold(self._store, owner, keys[at : min(count, at + self._asker.batch_max)])
            if held is not None:
                self.bytes += held.size_bytes
                self.chunks += len(held.keys)
                self._queue.append(_Job(owner, group.namespace, group.shard_bytes, tenant, held))

    def _places(self, chunk_bytes: int) -> int:
        """Return how many more chunks of a size may be queued."""
        by_bytes = max(0, self._bytes_max - self.bytes) // chunk_bytes
        return min(by_bytes, QUEUED_MAX_CHUNKS - self.chunks)

    def _send(self) -> None:
        while self._queue and self._out < WRITES_AT_ONCE:
            job = self._queue.popleft()
            if not job.held.keys:
                self._release(job)
            elif self._asker.ask(partial(self._question, job), partial(self._done, job)):
                self._out += 1
            else:
                self._meters.unwritten_chunks += len(job.held.keys)
                self._release(job)

    def _question(self, job: _Job, id_: int) -> Write:
        held = job.held
        return Write(
            id_,
            job.namespace,
            job.shard_bytes,
            self._codec,
            job.tenant,
            b"".join(held.keys),
            held.refs,
        )

    def _done(self, job: _Job, answer: TierAnswer | None) -> None:
        if answer is None:
            # The process is gone or goes: `life_ended` follows, and its leases end with it.
            self._meters.unwritten_chunks += len(job.held.keys)
            return
        self._out -= 1
        self._release(job)
        kept = answer.kept if isinstance(answer, WriteDone) else b""
        keys = [key for key, is_kept in zip(job.held.keys, kept, strict=False) if is_kept]
        self._meters.unwritten_chunks += len(job.held.keys) - len(keys)
        if self._is_skipping_l1:
            vacate(self._store, keys)
        self._send()

    def _release(self, job: _Job) -> None:
        self._store.release(job.owner, [job.held.lease])
        self.bytes -= job.held.size_bytes
        self.chunks -= len(job.held.keys)
