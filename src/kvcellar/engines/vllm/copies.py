"""One job's copies: which chunk goes to which slot, its seal, and what came of it.

The middle between the worker half, which has threads and a server to talk to, and a `Copier`,
which knows bytes. It takes a job, walks its chunks in order and stops at the first that fails.
Runs on the worker half's copy threads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvcellar.clock import Clock
from kvcellar.engines.pages import NOT_WRITTEN, Copier, SlotBytes
from kvcellar.engines.vllm.metadata import LoadJob, StoreJob
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.memory import seal
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES

__all__ = ["Copied", "Damage", "ShardCopies", "UseArena"]

UseArena = Callable[[], AbstractContextManager[ArenaView | None]]
"""Gives the arena for the time of one chunk, or None when it must not be used any more."""


@dataclass(frozen=True)
class Damage:
    """A slot whose seal did not match.

    Attributes:
        key: of the chunk that should have been there.
        offset: of the slot in the arena.
    """

    key: bytes
    offset: int


@dataclass(frozen=True)
class Copied:
    """What came of a job.

    Attributes:
        chunk_count: leading chunks that were copied.
        size_bytes: bytes of those.
        copy_s: seconds from the first byte to the last.
        seals: of those chunks, uint64 little-endian each; empty for loads.
        damage: why a load stopped, if that was a seal.
    """

    chunk_count: int
    size_bytes: int
    copy_s: float
    seals: bytes = b""
    damage: Damage | None = None


class ShardCopies:
    """Copies one rank's shard of chunks."""

    def __init__(self, copier: Copier, *, shard: int, clock: Clock) -> None:
        self._copier = copier
        self._shard = shard
        self._clock = clock

    def store(self, job: StoreJob, use_arena: UseArena, *, after: object) -> Copied:
        """Copy the job's blocks into its slots and seal them.

        Raises:
            IndexError: a block or a slot that does not exist.
        """
        width = job.blocks_per_chunk
        blocks = np.asarray(job.block_ids, dtype=np.int64).reshape(job.chunk_count, width)
        shard_bytes = self._copier.shard_bytes(width, fidelity=job.fidelity)
        seals = bytearray()
        self._copier.warm_up(fidelity=job.fidelity)
        started_s = self._clock.monotonic_s()
        for batch in self._batches(job.chunk_count):
            with use_arena() as arena:
                if arena is None:
                    break
                slots = [
                    _slot(arena, _offset(job, index, shard=self._shard), shard_bytes)
                    for index in batch
                ]
                partials = self._copier.store(
                    [blocks[index] for index in batch],
                    slots,
                    fidelity=job.fidelity,
                    after=after,
                )
                del slots
            for index, partial in zip(batch, partials, strict=True):
                value = seal.finish(partial, _key(job.keys, index), self._shard, shard_bytes)
                seals += value.to_bytes(8, "little")
        count = len(seals) // 8
        return Copied(
            chunk_count=count,
            size_bytes=count * shard_bytes,
            copy_s=self._clock.monotonic_s() - started_s,
            seals=bytes(seals),
        )

    def load(self, job: LoadJob, use_arena: UseArena, *, after: object) -> Copied:
        """Copy verified chunks into the job's blocks, up to the first whose seal does not match.

        Raises:
            IndexError: a block or a slot that does not exist.
        """
        width = job.blocks_per_chunk
        ids = [NOT_WRITTEN] * job.skip_blocks + job.block_ids
        blocks = np.asarray(ids, dtype=np.int64).reshape(job.chunk_count, width)
        shard_bytes = self._copier.shard_bytes(width, fidelity=job.fidelity)
        self._copier.warm_up(fidelity=job.fidelity)
        started_s = self._clock.monotonic_s()
        damage = None
        count = 0
        for batch in self._batches(job.chunk_count):
            refs = [_Ref(job, index, shard=self._shard) for index in batch]
            with use_arena() as arena:
                if arena is None:
                    break
                slots = [_slot(arena, ref.offset, shard_bytes) for ref in refs]
                good = self._copier.load(
                    slots,
                    [blocks[index] for index in batch],
                    fidelity=job.fidelity,
                    is_sealed=self._checker(refs, shard_bytes),
                    after=after,
                )
                del slots
            count += good
            if good < len(refs):
                damage = Damage(refs[good].key, refs[good].offset)
                break
        return Copied(
            chunk_count=count,
            size_bytes=count * shard_bytes,
            copy_s=self._clock.monotonic_s() - started_s,
            damage=damage,
        )

    def _batches(self, chunk_count: int) -> Iterator[range]:
        """Cut a job into what is copied behind one wait; the arena is asked for each anew."""
        width = self._copier.batch_chunks
        for start in range(0, chunk_count, width):
            yield range(start, min(start + width, chunk_count))

    def _checker(self, refs: Sequence["_Ref"], shard_bytes: int) -> Callable[[int, int], bool]:
        return lambda index, partial: (
            seal.finish(partial, refs[index].key, self._shard, shard_bytes) == refs[index].seal
        )


class _Ref:
    """Where one rank's shard of one chunk lies, as a lookup's reply says."""

    __slots__ = ("key", "offset", "seal")

    def __init__(self, job: LoadJob, index: int, *, shard: int) -> None:
        start = (index * job.shard_count + shard) * REF_BYTES
        self.key = _key(job.keys, index)
        self.offset = int.from_bytes(job.refs[start : start + OFFSET_BYTES], "little")
        self.seal = int.from_bytes(job.refs[start + OFFSET_BYTES : start + REF_BYTES], "little")


def _key(keys: bytes, index: int) -> bytes:
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def _offset(job: StoreJob, index: int, *, shard: int) -> int:
    start = (index * job.shard_count + shard) * OFFSET_BYTES
    return int.from_bytes(job.offsets[start : start + OFFSET_BYTES], "little")


def _slot(arena: ArenaView, offset: int, size_bytes: int) -> SlotBytes:
    if offset + size_bytes > arena.size_bytes:
        raise IndexError(f"slot [{offset}, +{size_bytes}) of an arena of {arena.size_bytes} bytes")
    return np.frombuffer(arena.view, dtype=np.uint8, count=size_bytes, offset=offset)
