"""One job's copies: which chunk goes to which slot, its seal, and what came of it.

The middle between the worker half, which has threads and a server to talk to, and a `Copier`,
which knows bytes. It takes a job, walks its chunks in order and stops at the first that fails.
Runs on the worker half's copy threads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcellar.clock import Clock
from kvcellar.engines.pages import Copier, SlotBytes
from kvcellar.engines.vllm.metadata import GroupLoad, GroupStore, LoadJob, StoreJob
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.memory import seal
from kvcellar.memory.arena import ArenaView
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES

__all__ = ["Copied", "Damage", "ShardCopies", "UseArena"]

_SEAL_BYTES = REF_BYTES - OFFSET_BYTES

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
        chunk_count: leading chunks that were copied, KV group after KV group.
        size_bytes: bytes of those.
        copy_s: seconds from the first byte to the last.
        seals: of all chunks of the reservation in its order, uint64 little-endian each; empty for
            loads, and of no use where not all were copied.
        damage: why a load stopped, if that was a seal.
    """

    chunk_count: int
    size_bytes: int
    copy_s: float
    seals: bytes = b""
    damage: Damage | None = None


class ShardCopies:
    """Copies one rank's shard of chunks."""

    def __init__(self, copiers: Sequence[Copier], *, shard: int, clock: Clock) -> None:
        """Copy with a copier for each KV group."""
        self._copiers = copiers
        self._shard = shard
        self._clock = clock

    def warm_up(self, *, fidelity: str) -> None:
        """See `Copier.warm_up`; all of them, since they share what a copy uses."""
        for copier in self._copiers:
            copier.warm_up(fidelity=fidelity)

    def store(self, job: StoreJob, use_arena: UseArena, *, after: object) -> Copied:
        """Copy the job's blocks into its slots and seal them.

        Raises:
            IndexError: a block or a slot that does not exist.
        """
        seals = bytearray(job.chunk_count * _SEAL_BYTES)
        count = size_bytes = 0
        self.warm_up(fidelity=job.fidelity)
        started_s = self._clock.monotonic_s()
        for group in job.groups:
            stored = 0
            for value in self._store_group(job, group, use_arena, after=after):
                at = group.places[stored] * _SEAL_BYTES
                seals[at : at + _SEAL_BYTES] = value.to_bytes(_SEAL_BYTES, "little")
                stored += 1
            count += stored
            size_bytes += stored * self._shard_bytes(group, job.fidelity)
            if stored < group.chunk_count:
                break
        return Copied(
            chunk_count=count,
            size_bytes=size_bytes,
            copy_s=self._clock.monotonic_s() - started_s,
            seals=bytes(seals),
        )

    def _store_group(
        self, job: StoreJob, group: GroupStore, use_arena: UseArena, *, after: object
    ) -> Iterator[int]:
        """Yield the seal of each chunk that was copied."""
        copier, shard_bytes = self._copiers[group.group], self._shard_bytes(group, job.fidelity)
        blocks = _rows(group)
        for batch in _batches(copier, group.chunk_count):
            with use_arena() as arena:
                if arena is None:
                    return
                places = (_offset(job, group, index, shard=self._shard) for index in batch)
                slots = [_slot(arena, offset, shard_bytes) for offset in places]
                partials = copier.store(
                    [blocks[index] for index in batch],
                    slots,
                    fidelity=job.fidelity,
                    after=after,
                )
                del slots
            for index, partial in zip(batch, partials, strict=True):
                yield seal.finish(partial, _key(group.keys, index), self._shard, shard_bytes)

    def load(self, job: LoadJob, use_arena: UseArena, *, after: object) -> Copied:
        """Copy verified chunks into the job's blocks, up to the first whose seal does not match.

        Raises:
            IndexError: a block or a slot that does not exist.
        """
        count = size_bytes = 0
        damage = None
        self.warm_up(fidelity=job.fidelity)
        started_s = self._clock.monotonic_s()
        for group in job.groups:
            loaded, damage = self._load_group(job, group, use_arena, after=after)
            count += loaded
            size_bytes += loaded * self._shard_bytes(group, job.fidelity)
            if loaded < group.chunk_count:
                break
        return Copied(
            chunk_count=count,
            size_bytes=size_bytes,
            copy_s=self._clock.monotonic_s() - started_s,
            damage=damage,
        )

    def _load_group(
        self, job: LoadJob, group: GroupLoad, use_arena: UseArena, *, after: object
    ) -> tuple[int, Damage | None]:
        """Return how many leading chunks were copied, and why not all, if that was a seal."""
        copier, shard_bytes = self._copiers[group.group], self._shard_bytes(group, job.fidelity)
        blocks = _rows(group)
        count = 0
        for batch in _batches(copier, group.chunk_count):
            refs = [_Ref(job, group, index, shard=self._shard) for index in batch]
            with use_arena() as arena:
                if arena is None:
                    break
                slots = [_slot(arena, ref.offset, shard_bytes) for ref in refs]
                good = copier.load(
                    slots,
                    [blocks[index] for index in batch],
                    fidelity=job.fidelity,
                    is_sealed=self._checker(refs, shard_bytes),
                    after=after,
                )
                del slots
            count += good
            if good < len(refs):
                return count, Damage(refs[good].key, refs[good].offset)
        return count, None

    def _shard_bytes(self, group: GroupLoad | GroupStore, fidelity: str) -> int:
        return self._copiers[group.group].shard_bytes(group.blocks_per_chunk, fidelity=fidelity)

    def _checker(self, refs: Sequence["_Ref"], shard_bytes: int) -> Callable[[int, int], bool]:
        return lambda index, partial: (
            seal.finish(partial, refs[index].key, self._shard, shard_bytes) == refs[index].seal
        )


class _Ref:
    """Where one rank's shard of one chunk lies, as a lookup's reply says."""

    __slots__ = ("key", "offset", "seal")

    def __init__(self, job: LoadJob, group: GroupLoad, index: int, *, shard: int) -> None:
        start = (index * job.shard_count + shard) * REF_BYTES
        self.key = _key(group.keys, index)
        self.offset = int.from_bytes(group.refs[start : start + OFFSET_BYTES], "little")
        self.seal = int.from_bytes(group.refs[start + OFFSET_BYTES : start + REF_BYTES], "little")


def _rows(group: GroupLoad | GroupStore) -> npt.NDArray[np.int64]:
    """Return the block ids of each chunk, shape [chunks, blocks a chunk]."""
    return np.asarray(group.block_ids, dtype=np.int64).reshape(group.chunk_count, -1)


def _batches(copier: Copier, chunk_count: int) -> Iterator[range]:
    """Cut chunks into what is copied behind one wait; the arena is asked for each anew."""
    width = copier.batch_chunks
    for start in range(0, chunk_count, width):
        yield range(start, min(start + width, chunk_count))


def _key(keys: bytes, index: int) -> bytes:
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def _offset(job: StoreJob, group: GroupStore, index: int, *, shard: int) -> int:
    start = (index * job.shard_count + shard) * OFFSET_BYTES
    return int.from_bytes(group.offsets[start : start + OFFSET_BYTES], "little")


def _slot(arena: ArenaView, offset: int, size_bytes: int) -> SlotBytes:
    if offset + size_bytes > arena.size_bytes:
        raise IndexError(f"slot [{offset}, +{size_bytes}) of an arena of {arena.size_bytes} bytes")
    return np.frombuffer(arena.view, dtype=np.uint8, count=size_bytes, offset=offset)
