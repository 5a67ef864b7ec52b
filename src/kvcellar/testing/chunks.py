"""Chunks to test with: right seals, aligned memory, bytes that differ from key to key.

The tier test-suite uses them, and so can any test that needs something to store.
"""

import mmap

import numpy as np
from blake3 import blake3

from kvcellar.memory.seal import seal
from kvcellar.tiers.base import RAW, ChunkRecord, ChunkWrite, ReadWant

__all__ = ["NAMESPACE", "aligned_view", "bytes_of", "make_chunk", "make_key", "make_want"]

NAMESPACE = b"n" * 32
"""The namespace of chunks for which none was named."""


def make_key(number: int) -> bytes:
    """Return the key of a chunk that `make_chunk` makes."""
    return blake3(b"a chunk to test with" + number.to_bytes(8, "little")).digest()


def aligned_view(size_bytes: int) -> memoryview:
    """Return writable memory of its own, aligned as a slot is."""
    # A page more, so that whoever writes past a view's end does not crash the test.
    return memoryview(mmap.mmap(-1, size_bytes + mmap.PAGESIZE))[:size_bytes]


def make_chunk(
    number: int,
    shard_bytes: tuple[int, ...] = (8192,),
    *,
    tenant: str = "",
    namespace: bytes = NAMESPACE,
    codec: str = RAW,
) -> ChunkWrite:
    """Return a chunk that can be stored; the same number makes the same key and bytes."""
    key = make_key(number)
    views = tuple(aligned_view(size) for size in shard_bytes)
    for shard, view in enumerate(views):
        source = np.random.default_rng([number, shard])
        view[:] = source.integers(0, 256, len(view), dtype=np.uint8).data
    seals = tuple(seal(view, key, shard) for shard, view in enumerate(views))
    record = ChunkRecord(key, namespace, shard_bytes, seals, tenant, codec)
    return ChunkWrite(record, views)


def make_want(write: ChunkWrite) -> ReadWant:
    """Return the wish to read a chunk into new memory."""
    record = write.record
    views = tuple(aligned_view(size) for size in record.shard_bytes)
    return ReadWant(record.key, record.namespace, record.shard_bytes, views, record.codec)


def bytes_of(chunk: ChunkWrite | ReadWant) -> tuple[bytes, ...]:
    """Return what is in a chunk's views, shard by shard."""
    return tuple(bytes(view) for view in chunk.views)
