"""What goes over the wire, as the store takes and gives it: packed keys, references, answers.

Used by the store alone, before and after it decides.
"""

import msgspec

from kvcellar.errors import LimitError, MalformedError, MismatchError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.store.entries import Namespace, OwnerId

__all__ = ["SEAL_BYTES", "Hit", "Reserved", "check_reserve", "count_keys", "join_refs"]

SEAL_BYTES = REF_BYTES - OFFSET_BYTES


class Hit(msgspec.Struct, frozen=True):
    """The answer to a lookup; its fields are those of `LookupReply`."""

    count: int
    lease: int
    refs: bytes


class Reserved(msgspec.Struct, frozen=True):
    """The answer to a reserve; its fields are those of `ReserveReply`."""

    reservation: int
    states: bytes
    offsets: bytes


def join_refs(offsets: bytes, seals: list[bytes], index: int) -> bytes:
    """Return the references of one chunk.

    Args:
        offsets: `OFFSET_BYTES` for each shard of the chunk.
        seals: by shard, those of all chunks of its reservation.
        index: the chunk's place in there.
    """
    at = index * SEAL_BYTES
    return b"".join(
        [
            part
            for shard, sealed in enumerate(seals)
            for part in (
                offsets[shard * OFFSET_BYTES : (shard + 1) * OFFSET_BYTES],
                sealed[at : at + SEAL_BYTES],
            )
        ]
    )


def check_reserve(space: Namespace, *, parent: bytes, writers: tuple[OwnerId, ...]) -> None:
    """Check what a reserve says besides its keys.

    Raises:
        MalformedError: `parent` is no key.
        MismatchError: the instance has not one rank for each shard.
    """
    if len(parent) not in (0, KEY_BYTES):
        raise MalformedError(f"parent has {len(parent)} bytes: send 0 or {KEY_BYTES}")
    if len(writers) != len(space.shard_bytes):
        raise MismatchError(
            f"the instance has {len(writers)} ranks, its namespace {len(space.shard_bytes)} "
            "shards a chunk: each rank writes one"
        )


def count_keys(keys: bytes) -> int:
    """Return how many keys these are.

    Raises:
        MalformedError: they are no list of keys.
        LimitError: they are more than `KEYS_MAX`.
    """
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest:
        raise MalformedError(f"{len(keys)} bytes are no list of keys of {KEY_BYTES} bytes")
    if count > KEYS_MAX:
        raise LimitError(f"{count} keys in one request: send at most {KEYS_MAX}")
    return count
