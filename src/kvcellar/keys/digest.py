"""The engine digest and the request seed: everything but the tokens that makes KV what it is.

Two engines share chunks exactly when their digests are equal, so the digest must differ wherever
their KV could. It is a blake3 over named fields in a canonical encoding: each name and value is
length-prefixed and the names are sorted, so no two different sets of fields encode alike. Each
field has a digest of its own as well, so that a tool can say *which* field made two engines
differ. Called by the connector's scheduler half once at start (engine) and once a request (seed).
Pure: no I/O; whoever calls gathers the values.
"""

from collections.abc import Mapping
from typing import NewType

from blake3 import blake3

__all__ = [
    "KEY_BYTES",
    "ChunkKey",
    "EngineDigest",
    "FieldValue",
    "NamespaceId",
    "RequestSeed",
    "engine_digest",
    "field_digests",
    "namespace_fields",
    "namespace_id",
    "request_seed",
]

KEY_BYTES = 32

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name a chunk."""

EngineDigest = NewType("EngineDigest", bytes)
"""32 bytes that name a model, its weights and how this engine runs it."""

NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes: the engine digest together with the layouts of all shards and the fidelity."""

RequestSeed = NewType("RequestSeed", bytes)
"""32 bytes: the namespace together with adapter and tenant; the chain's key before the first."""

FieldValue = str | int | float | bool | bytes | None


def engine_digest(fields: Mapping[str, FieldValue]) -> EngineDigest:
    """Return the digest of an engine from its named fields.

    Args:
        fields: at least one; structured values (a model's configuration) as canonical JSON text.
            A missing field and a field that is None differ.
    """
    return EngineDigest(_digest(b"kvcellar-engine-1", _encode_fields(fields)))


def field_digests(fields: Mapping[str, FieldValue]) -> dict[str, str]:
    """Return the first 16 hex digits of each field's own digest, to compare two engines by."""
    return {
        name: _digest(b"kvcellar-field-1", _encode_value(value)).hex()[:16]
        for name, value in sorted(fields.items())
    }


def namespace_id(
    engine: EngineDigest,
    *,
    layouts: list[bytes],
    chunk_tokens: int,
    fidelity: str,
    epoch: bytes,
    part: tuple[int, int] = (0, 1),
) -> NamespaceId:
    """Return the namespace in which this engine's chunks live.

    Args:
        engine: see `engine_digest`.
        layouts: each shard's layout fingerprint, in shard order; their number and order count.
        chunk_tokens: tokens a chunk.
        fidelity: the lossiest form that any tier on the way may give back ("exact").
        epoch: empty, or the value that the last cache reset made (weights may have changed).
        part: which of how many parts of the engine's ranks these shards are of, from 0; one
            for each server that it uses.
    """
    fields = namespace_fields(
        layouts=layouts, chunk_tokens=chunk_tokens, fidelity=fidelity, epoch=epoch, part=part
    )
    return NamespaceId(
        _digest(b"kvcellar-namespace-1", _encode_fields({**fields, "engine": bytes(engine)}))
    )


def namespace_fields(
    *,
    layouts: list[bytes],
    chunk_tokens: int,
    fidelity: str,
    epoch: bytes,
    part: tuple[int, int] = (0, 1),
) -> dict[str, FieldValue]:
    """Return what a namespace is made of beside the engine; see `namespace_id`."""
    fields: dict[str, FieldValue] = {
        "chunk_tokens": chunk_tokens,
        "fidelity": fidelity,
        "epoch": epoch,
        "shard_count": len(layouts),
    }
    fields.update({f"layout.{index}": layout for index, layout in enumerate(layouts)})
    place, count = part
    if count > 1:
        # One part has no name: what was stored and published before there were several holds.
        fields["part"] = f"{place}/{count}"
    return fields


def request_seed(
    namespace: NamespaceId, *, adapter: bytes | None, cache_salt: str | None
) -> RequestSeed:
    """Return the key before a request's first chunk.

    Args:
        namespace: see `namespace_id`.
        adapter: identity of the LoRA adapter (name, path and content digest), None without one.
        cache_salt: the tenant's salt; None and "" are the same tenant, the one without a salt.
    """
    fields: dict[str, FieldValue] = {
        "namespace": bytes(namespace),
        "adapter": adapter,
        "cache_salt": cache_salt or None,
    }
    return RequestSeed(_digest(b"kvcellar-request-1", _encode_fields(fields)))


def _digest(context: bytes, data: bytes) -> bytes:
    return blake3(context + b"\x00" + data).digest()


def _encode_fields(fields: Mapping[str, FieldValue]) -> bytes:
    parts = [len(fields).to_bytes(8, "little")]
    for name, value in sorted(fields.items()):
        parts.append(_prefixed(name.encode()))
        parts.append(_encode_value(value))
    return b"".join(parts)


def _encode_value(value: FieldValue) -> bytes:
    # The type's name goes in, so that 1, True, 1.0 and "1" are four different values.
    if value is None:
        return _prefixed(b"none") + _prefixed(b"")
    if isinstance(value, bytes):
        return _prefixed(b"bytes") + _prefixed(value)
    if isinstance(value, str):
        return _prefixed(b"str") + _prefixed(value.encode("utf-8", "surrogatepass"))
    return _prefixed(type(value).__name__.encode()) + _prefixed(repr(value).encode())


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
