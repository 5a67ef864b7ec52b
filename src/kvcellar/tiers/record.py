"""The record that a chunk is on a disk: a header that proves itself, then the shards.

All integers are little-endian, all parts begin at multiples of 4096 bytes, so that a record moves
between a file opened with O_DIRECT and slots of the arena without another copy:

    header   4096 bytes, or more where there are more than 220 shards
        magic "KVCELREC", version (uint32), header bytes (uint32), record bytes (uint64),
        key (32), namespace (32),
        codec (length as uint16, 64 bytes), tenant (length as uint16, 256 bytes),
        shard count (uint32), then for each shard its length and its seal (2 x uint64),
        zeros, and in the last 32 bytes blake3 of everything before them
    shards   each followed by zeros up to the next multiple of 4096

The size of a header depends on the number of shards alone, so a reader who knows a chunk's shape
knows the record's size, and reads header and shards in one call. The seals prove the shards, so
the digest covers the header only. Called by tiers that keep files or blobs; pure.
"""

import struct
from collections.abc import Sequence

from blake3 import blake3

from kvcellar.tiers.base import ChunkRecord, ReadWant
from kvcellar.units import align_up

__all__ = [
    "ALIGNMENT",
    "SHARDS_MAX",
    "RecordError",
    "header_bytes",
    "mismatch",
    "pack_header",
    "parse_header",
    "record_bytes",
]

ALIGNMENT = 4096
SHARDS_MAX = 1024
_MAGIC = b"KVCELREC"
_VERSION = 1
_CODEC_MAX = 64
_TENANT_MAX = 256
_FIXED = struct.Struct(f"<8sIIQ32s32sH{_CODEC_MAX}sH{_TENANT_MAX}sI")
_SHARD = struct.Struct("<QQ")
_DIGEST_BYTES = 32


class RecordError(Exception):
    """Bytes are no header of a record, or not of this version; the text says what is wrong."""


def header_bytes(shard_count: int) -> int:
    """Return how long the header of a record with so many shards is."""
    assert 0 < shard_count <= SHARDS_MAX, shard_count
    return align_up(_FIXED.size + shard_count * _SHARD.size + _DIGEST_BYTES, ALIGNMENT)


def record_bytes(shard_bytes: Sequence[int]) -> int:
    """Return how long the whole record of these shards is."""
    return header_bytes(len(shard_bytes)) + sum(align_up(size, ALIGNMENT) for size in shard_bytes)


def pack_header(record: ChunkRecord) -> bytes:
    """Return the header of a record, `header_bytes` long.

    Args:
        record: within the bounds that `ChunkRecord` names; anything else is a programmer's error.
    """
    codec, tenant = record.codec.encode(), record.tenant.encode()
    assert len(record.key) == len(record.namespace) == 32, record
    assert len(codec) <= _CODEC_MAX, record.codec
    assert len(tenant) <= _TENANT_MAX, len(tenant)
    assert len(record.seals) == len(record.shard_bytes), record
    size = header_bytes(len(record.shard_bytes))
    head = bytearray(size - _DIGEST_BYTES)
    _FIXED.pack_into(
        head,
        0,
        _MAGIC,
        _VERSION,
        size,
        record_bytes(record.shard_bytes),
        record.key,
        record.namespace,
        len(codec),
        codec,
        len(tenant),
        tenant,
        len(record.seals),
    )
    shards = zip(record.shard_bytes, record.seals, strict=True)
    for index, (length, seal) in enumerate(shards):
        _SHARD.pack_into(head, _FIXED.size + index * _SHARD.size, length, seal)
    return bytes(head) + blake3(head).digest()


def parse_header(header: bytes | memoryview) -> ChunkRecord:
    """Return the record that a header names.

    Args:
        header: at least the first 4096 bytes of a record, and all of its header.

    Raises:
        RecordError: anything about it is wrong.
    """
    if len(header) < ALIGNMENT:
        raise RecordError(f"{len(header)} bytes are less than a header")
    (magic, version, size, _total, key, namespace, codec_length, codec, tenant_length, tenant,
     count) = _FIXED.unpack_from(header)  # fmt: skip
    if magic != _MAGIC or version != _VERSION:
        raise RecordError(f"magic {magic!r} and version {version} are not {_MAGIC!r} {_VERSION}")
    if not 0 < count <= SHARDS_MAX or size != header_bytes(count) or size > len(header):
        raise RecordError(f"a header of {size} bytes for {count} shards")
    if blake3(header[: size - _DIGEST_BYTES]).digest() != header[size - _DIGEST_BYTES : size]:
        raise RecordError("the header's digest does not match")
    shards = [_SHARD.unpack_from(header, _FIXED.size + n * _SHARD.size) for n in range(count)]
    # From here on the digest says that these bytes are what `pack_header` wrote.
    return ChunkRecord(
        key=key,
        namespace=namespace,
        shard_bytes=tuple(length for length, _ in shards),
        seals=tuple(seal for _, seal in shards),
        tenant=tenant[:tenant_length].decode(),
        codec=codec[:codec_length].decode(),
    )


def mismatch(record: ChunkRecord, want: ReadWant) -> str:
    """Return the first field in which a record is not what is wanted, "" when it is."""
    pairs = {
        "key": (record.key, want.key),
        "namespace": (record.namespace, want.namespace),
        "shard_bytes": (record.shard_bytes, want.shard_bytes),
        "codec": (record.codec, want.codec),
    }
    return next((field for field, (ours, theirs) in pairs.items() if ours != theirs), "")
