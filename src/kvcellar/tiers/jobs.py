"""What the questions of the control process mean: calls of tiers, on the threads that ask.

Slots are named by offset and become views of the arena here. An answer is given when the tier's
call has returned, and so when nobody touches the slots any more; a tier that fails is a miss or a
chunk that is not kept, never an error. Used by `process`, which owns the threads.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvcellar.clock import Clock
from kvcellar.errors import TierUnavailableError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.protocol.tier_messages import (
    Delete,
    Deleted,
    Find,
    Found,
    Gone,
    QuotasSet,
    Read,
    ReadDone,
    Run,
    SetQuotas,
    Touch,
    Touched,
    Wipe,
    Write,
    WriteDone,
)
from kvcellar.tiers.base import ChunkRecord, ChunkWrite, ReadWant, Tier, WriteOutcome
from kvcellar.transport.deadline import Deadline

__all__ = ["Jobs"]

FIND_TIMEOUT_S = 1.0
READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 60.0

_KEPT = frozenset({WriteOutcome.WRITTEN, WriteOutcome.PRESENT})
_AnyT = TypeVar("_AnyT")


class Jobs:
    """Does what is asked; thread-safe as far as its tiers are."""

    def __init__(self, tiers: Sequence[Tier], arena: memoryview, clock: Clock) -> None:
        """Prepare.

        Args:
            tiers: in the order in which they are asked.
            arena: all of it, writable; only the slots that a question names are touched.
            clock: for deadlines.
        """
        self._clock = clock
        self._tiers = tiers
        self._limited: set[str] = set()
        self._arena = arena

    def set_quotas(self, question: SetQuotas) -> QuotasSet:
        """Bound what tenants may hold in each tier."""
        for tier in self._tiers:
            tier.set_quotas(question.limits)
        for tenant, limit_bytes in question.limits.items():
            if limit_bytes is None:
                self._limited.discard(tenant)
            else:
                self._limited.add(tenant)
        return QuotasSet(question.id)

    @property
    def limited(self) -> frozenset[str]:
        """Return the tenants that have a quota."""
        return frozenset(self._limited)

    def touch(self, question: Touch) -> Touched:
        """Count chunks as used in each tier."""
        for prefix in question.prefixes:
            keys = _split(prefix, KEY_BYTES)
            for tier in self._tiers:
                tier.touch(keys)
        return Touched(question.id)

    def find(self, question: Find) -> Found:
        """Return which tiers have the chunks after those that are in the arena."""
        keys = _split(question.keys, KEY_BYTES)
        for tier in self._tiers:
            tier.touch(keys[: question.start])
        rest, at = keys[question.start :], 0
        runs: list[Run] = []
        while at < len(rest):
            before = at
            for index, tier in enumerate(self._tiers):
                count = _count_of(tier, rest[at:])
                if count:
                    runs.append(Run(index, count))
                    at += count
            if at == before:
                break
        return Found(question.id, tuple(runs))

    def read(self, question: Read) -> ReadDone:
        """Fill slots from one tier."""
        keys = _split(question.keys, KEY_BYTES)
        offsets = list(
            struct.unpack(f"<{len(question.offsets) // OFFSET_BYTES}Q", question.offsets)
        )
        views = list(self._views(offsets, question.shard_bytes))
        wants = [
            ReadWant(key, question.namespace, question.shard_bytes, shards, question.codec)
            for key, shards in zip(keys, views, strict=True)
        ]
        try:
            report = self._tiers[question.tier].read_many(wants, timeout_s=READ_TIMEOUT_S)
        except TierUnavailableError:
            return ReadDone(question.id, 0, _by_shard((), len(question.shard_bytes)))
        return ReadDone(
            question.id, report.count, _by_shard(report.seals, len(question.shard_bytes))
        )

    def write(self, question: Write) -> WriteDone:
        """Keep chunks in every tier."""
        keys = _split(question.keys, KEY_BYTES)
        refs = list(struct.iter_unpack("<QQ", question.refs))
        shards = len(question.shard_bytes)
        assert len(question.refs) == len(keys) * shards * REF_BYTES, len(question.refs)
        views = list(self._views([offset for offset, _ in refs], question.shard_bytes))
        writes = [
            ChunkWrite(
                ChunkRecord(
                    key,
                    question.namespace,
                    question.shard_bytes,
                    tuple(seal for _, seal in refs[place * shards : (place + 1) * shards]),
                    question.tenant,
                    question.codec,
                ),
                views[place],
            )
            for place, key in enumerate(keys)
        ]
        kept = bytearray(len(keys))
        for tier in self._tiers:
            for start, part in _parts(tier, writes):
                try:
                    report = tier.write_many(part, timeout_s=WRITE_TIMEOUT_S)
                except TierUnavailableError:
                    break
                for place, outcome in enumerate(report.outcomes, start):
                    kept[place] |= outcome in _KEPT
        return WriteDone(question.id, bytes(kept))

    def delete(self, question: Delete) -> Gone:
        """Remove chunks from every tier, one by one, to say of each what became of it."""
        keys = _split(question.keys, KEY_BYTES)
        deadline = Deadline(self._clock, DELETE_TIMEOUT_S)
        gone = [_delete(tier, keys, deadline) for tier in self._tiers]
        return Gone(question.id, bytes(max(states) for states in zip(*gone, strict=True)))

    def wipe(self, question: Wipe) -> Deleted:
        """Empty every tier; -1 where one could not be emptied."""
        count, is_done = 0, True
        for tier in self._tiers:
            try:
                count += tier.clear(question.namespace, timeout_s=DELETE_TIMEOUT_S)
            except TierUnavailableError:
                is_done = False
        return Deleted(question.id, count if is_done else -1)

    def _views(
        self, offsets: Sequence[int], shard_bytes: tuple[int, ...]
    ) -> Iterator[tuple[memoryview, ...]]:
        shards = len(shard_bytes)
        for at in range(0, len(offsets), shards):
            yield tuple(
                self._arena[offset : offset + size_bytes]
                for offset, size_bytes in zip(offsets[at : at + shards], shard_bytes, strict=True)
            )


def _by_shard(seals: Sequence[tuple[int, ...]], shards: int) -> tuple[bytes, ...]:
    """Return, for each shard, the seals of all chunks."""
    return tuple(
        struct.pack(f"<{len(seals)}Q", *(chunk[shard] for chunk in seals))
        for shard in range(shards)
    )


def _split(packed: bytes, size_bytes: int) -> list[bytes]:
    return [packed[at : at + size_bytes] for at in range(0, len(packed), size_bytes)]


def _parts(tier: Tier, things: Sequence[_AnyT]) -> Iterator[tuple[int, Sequence[_AnyT]]]:
    batch_max = tier.capabilities.batch_max
    for start in range(0, len(things), batch_max):
        yield start, things[start : start + batch_max]


def _count_of(tier: Tier, keys: Sequence[bytes]) -> int:
    """Return how many leading keys a tier has."""
    found = 0
    for start, part in _parts(tier, keys):
        try:
            found += tier.lookup(part, timeout_s=FIND_TIMEOUT_S)
        except TierUnavailableError:
            break
        if found < start + len(part):
            break
    return found


def _delete(tier: Tier, keys: Sequence[bytes], deadline: Deadline) -> bytes:
    """Return for each key 1 where it was there, 2 where it may still be, else 0."""
    states = bytearray(b"\2" * len(keys))
    for place, key in enumerate(keys):
        left_s = deadline.remaining_s()
        if left_s <= 0:
            break
        with contextlib.suppress(TierUnavailableError):
            states[place] = tier.delete([key], timeout_s=left_s)
    return bytes(states)
