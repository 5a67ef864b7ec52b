"""One job's copies: which chunk goes to which slot, its seal, and what came of it.

The middle between the worker half, which has threads and a server to talk to, and a `Copier`,
which knows bytes. It takes a job, walks its chunks in order and stops at the first that fails.
Runs on the worker half's copy threads.
"""

from collections.abc import Callable
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
        shard_bytes = width * self._copier.block_bytes
        seals = bytearray()
        self._copier.warm_up()
        started_s = self._clock.monotonic_s()
        count = 0
        for index in range(job.chunk_count):
            offset = self._number(job.offsets, index * job.shard_count, OFFSET_BYTES)
            with use_arena() as arena:
                if arena is None:
                    break
                slot = _slot(arena, offset, shard_bytes)
                partial = self._copier.store(blocks[index], slot, after=after)
                del slot
            value = seal.finish(partial, _key(job.keys, index), self._shard, shard_bytes)
            seals += value.to_bytes(8, "little")
            count += 1
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
        shard_bytes = width * self._copier.block_bytes
        self._copier.warm_up()
        started_s = self._clock.monotonic_s()
        damage = None
        count = 0
        for index in range(job.chunk_count):
            position = index * job.shard_count
            offset = self._number(job.refs, position, REF_BYTES)
            wanted = self._number(job.refs, position, REF_BYTES, field=1)
            key = _key(job.keys, index)
            with use_arena() as arena:
                if arena is None:
                    break
                slot = _slot(arena, offset, shard_bytes)
                is_good = self._copier.load(
                    slot,
                    blocks[index],
                    is_sealed=self._check(key, shard_bytes, wanted),
                    after=after,
                )
                del slot
            if not is_good:
                damage = Damage(key, offset)
                break
            count += 1
        return Copied(
            chunk_count=count,
            size_bytes=count * shard_bytes,
            copy_s=self._clock.monotonic_s() - started_s,
            damage=damage,
        )

    def _number(self, packed: bytes, position: int, width: int, *, field: int = 0) -> int:
        """Return one uint64 of this rank's record, in records of `width` bytes for each shard."""
        start = (position + self._shard) * width + field * 8
        return int.from_bytes(packed[start : start + 8], "little")

    def _check(self, key: bytes, shard_bytes: int, wanted: int) -> Callable[[int], bool]:
        return lambda partial: seal.finish(partial, key, self._shard, shard_bytes) == wanted


def _key(keys: bytes, index: int) -> bytes:
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def _slot(arena: ArenaView, offset: int, size_bytes: int) -> SlotBytes:
    if offset + size_bytes > arena.size_bytes:
        raise IndexError(f"slot [{offset}, +{size_bytes}) of an arena of {arena.size_bytes} bytes")
    return np.frombuffer(arena.view, dtype=np.uint8, count=size_bytes, offset=offset)
