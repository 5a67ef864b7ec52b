"""A tier in a dictionary: the smallest one that keeps the contract, and one that fails on order.

It is an example for those who write a tier, and what tests of the wrappers and of the tier
process use where no disk is wanted.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from kvcellar.errors import TierUnavailableError
from kvcellar.memory.seal import seal
from kvcellar.tiers.base import (
    ChunkRecord,
    ChunkWrite,
    ReadReport,
    ReadWant,
    Tier,
    TierCapabilities,
    TierUsage,
    WriteOutcome,
    WriteReport,
)

__all__ = ["MemoryTier"]


class _Stored(msgspec.Struct):
    record: ChunkRecord
    shards: tuple[bytearray, ...]


class MemoryTier(Tier):
    """Chunks in memory, least recently used out first when there is a cap."""

    def __init__(self, name: str = "memory", *, cap_bytes: int = 0) -> None:
        """Make an empty one.

        Args:
            name: of the tier.
            cap_bytes: the most that all shards together may be; 0 for no bound.
        """
        self._name = name
        self._cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, _Stored] = OrderedDict()
        self._evicted = 0
        self._damaged = 0
        self._is_closed = False
        self.failure = ""
        """While it is set every call fails with this text, as a medium that is gone does."""
        self.gate = threading.Event()
        """While it is cleared reads and writes wait, as on a medium that hangs."""
        self.gate.set()

    @property
    def capabilities(self) -> TierCapabilities:
        """Return what it is."""
        return TierCapabilities(name=self._name)

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Return how many leading keys are there."""
        self._check()
        with self._lock:
            count = next((n for n, key in enumerate(keys) if key not in self._chunks), len(keys))
        self.touch(keys[:count])
        return count

    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Copy leading chunks and verify the copies."""
        self._check()
        if timeout_s <= 0 or not self.gate.wait(timeout_s):
            return ReadReport(0, failure="" if timeout_s <= 0 else "the medium hangs")
        seals: list[tuple[int, ...]] = []
        damaged = []
        for want in wants:
            with self._lock:
                stored = self._chunks.get(want.key)
            if stored is None:
                break
            if not _fill(want, stored):
                damaged.append(want.key)
                self._drop_damaged(want.key)
                break
            seals.append(stored.record.seals)
        self.touch([want.key for want in wants[: len(seals)]])
        return ReadReport(len(seals), tuple(seals), tuple(damaged))

    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Copy the chunks that are new."""
        self._check()
        if timeout_s <= 0 or not self.gate.wait(timeout_s):
            failed = (WriteOutcome.FAILED,) * len(writes)
            return WriteReport(failed, "" if timeout_s <= 0 else "the medium hangs")
        outcomes = tuple(self._write(write) for write in writes)
        self.touch([write.record.key for write in writes])
        return WriteReport(outcomes)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Forget chunks."""
        self._check()
        with self._lock:
            return sum(1 for key in keys if self._chunks.pop(key, None) is not None)

    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Forget a namespace."""
        self._check()
        with self._lock:
            stored = [s.record for s in self._chunks.values()]
        keys = [record.key for record in stored if namespace in {b"", record.namespace}]
        return self.delete(keys, timeout_s=timeout_s)

    def usage(self) -> TierUsage:
        """Return the sums."""
        with self._lock:
            tenants: Counter[str] = Counter()
            for stored in self._chunks.values():
                tenants[stored.record.tenant] += sum(stored.record.shard_bytes)
            return TierUsage(
                used_bytes=tenants.total(),
                cap_bytes=self._cap_bytes,
                chunks=len(self._chunks),
                tenant_bytes=dict(tenants),
                evicted=self._evicted,
                damaged=self._damaged,
            )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make keys the last to leave."""
        with self._lock:
            for key in reversed(keys):
                if key in self._chunks:
                    self._chunks.move_to_end(key)

    def close(self) -> None:
        """Forget everything."""
        self._is_closed = True

    def flip_bit(self, key: bytes) -> None:
        """Damage a chunk."""
        with self._lock:
            self._chunks[key].shards[-1][-1] ^= 1

    def _write(self, write: ChunkWrite) -> WriteOutcome:
        record = write.record
        with self._lock:
            if record.key in self._chunks:
                return WriteOutcome.PRESENT
            used_bytes = sum(sum(stored.record.shard_bytes) for stored in self._chunks.values())
            excess_bytes = used_bytes + sum(record.shard_bytes) - self._cap_bytes
            if self._cap_bytes and sum(record.shard_bytes) > self._cap_bytes:
                return WriteOutcome.FULL
            while self._cap_bytes and excess_bytes > 0:
                _, left = self._chunks.popitem(last=False)
                excess_bytes -= sum(left.record.shard_bytes)
                self._evicted += 1
            shards = tuple(bytearray(view) for view in write.views)
            self._chunks[record.key] = _Stored(record, shards)
        return WriteOutcome.WRITTEN

    def _drop_damaged(self, key: bytes) -> None:
        with self._lock:
            self._chunks.pop(key, None)
            self._damaged += 1

    def _check(self) -> None:
        if self._is_closed or self.failure:
            raise TierUnavailableError(self.failure or f"tier {self._name} is closed")


def _fill(want: ReadWant, stored: _Stored) -> bool:
    record = stored.record
    if (record.namespace, record.shard_bytes, record.codec) != (
        want.namespace,
        want.shard_bytes,
        want.codec,
    ):
        return False
    for view, shard in zip(want.views, stored.shards, strict=True):
        view[:] = shard
    proofs = enumerate(zip(want.views, record.seals, strict=True))
    return all(seal(view, want.key, shard) == expected for shard, (view, expected) in proofs)
