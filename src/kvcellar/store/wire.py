"""What goes over the wire, as the store takes and gives it: packed keys, references, answers.

Used by the store alone, before and after it decides.
"""

from collections.abc import Iterator

import msgspec

from kvcellar.errors import LimitError, MalformedError, MismatchError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.store.entries import Group, Namespace, OwnerId

__all__ = [
    "SEAL_BYTES",
    "Hit",
    "Reserved",
    "check_reserve",
    "count_chunks",
    "count_keys",
    "join_refs",
    "read_places",
]

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


def check_reserve(
    space: Namespace, *, parent: bytes, writers: tuple[OwnerId, ...], groups: bytes, count: int
) -> None:
    """Check what a reserve says besides its keys.

    Raises:
        MalformedError: `parent` or `groups` is not what it must be.
        MismatchError: the instance has not one rank for each shard.
    """
    parents = sum(not group.span for group in space.groups)
    if len(parent) not in (0, parents * KEY_BYTES):
        raise MalformedError(
            f"parent has {len(parent)} bytes: send 0 or {parents * KEY_BYTES}, a key for each KV "
            "group that needs all chunks"
        )
    if groups and (len(groups) != count or max(groups) >= len(space.groups)):
        raise MalformedError(
            f"groups has {len(groups)} bytes up to {max(groups)} for {count} keys: send one below "
            f"{len(space.groups)} for each, or none"
        )
    shards = len(space.groups[0].shard_bytes)
    if len(writers) != shards:
        raise MismatchError(
            f"the instance has {len(writers)} ranks, its namespace {shards} shards a chunk: each "
            "rank writes one"
        )


def read_places(
    space: Namespace, keys: bytes, parent: bytes, groups: bytes
) -> Iterator[tuple[bytes, Group, bytes]]:
    """Yield what a reserve names, once it was checked: a key, its KV group, the key above it.

    What only an end needs hangs below nothing: it leaves when nobody ends there any more.
    """
    whole = [index for index, group in enumerate(space.groups) if not group.span]
    above = {index: parent[at * KEY_BYTES :][:KEY_BYTES] for at, index in enumerate(whole)}
    for place, at in enumerate(range(0, len(keys), KEY_BYTES)):
        key, index = keys[at : at + KEY_BYTES], groups[place] if groups else 0
        yield key, space.groups[index], above.get(index, b"")
        if index in above:
            above[index] = key


def count_chunks(keys: bytes, *, groups: int) -> int:
    """Return for how many chunks there is a key of each KV group.

    Raises:
        MalformedError: they are no list of keys, or not as many for each group.
        LimitError: they are more than `KEYS_MAX`.
    """
    count, rest = divmod(count_keys(keys), groups)
    if rest:
        raise MalformedError(
            f"{len(keys) // KEY_BYTES} keys for {groups} KV groups: send as many for each"
        )
    return count


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
