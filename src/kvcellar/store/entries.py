"""What the catalogue remembers of a chunk, and of the namespace that it belongs to.

An entry is the price of a chunk in memory (with its key and its place in the catalogue less than
500 bytes), so it has slots only, holds the slots' references packed as the wire wants them, and
knows its parent by key. Both are bare records: the catalogue keeps their rules.
"""

import struct
from collections.abc import Iterator
from typing import NewType

from kvcellar.keys.digest import NamespaceId
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.tenancy.ranking import Tenant

__all__ = ["Entry", "Namespace", "OwnerId"]

OwnerId = NewType("OwnerId", int)
"""The number that the server gives a client process; what it holds belongs to this number."""


class Namespace:
    """One namespace: how large its shards are and how much of it is in the catalogue.

    Attributes:
        id: its 32 bytes.
        shard_bytes: bytes of each rank's shard, in rank order.
        slot_bytes: bytes that each shard takes from the arena.
        chunk_bytes: their sum.
        packer: packs one offset for each shard.
        entries: entries of the catalogue, complete or not.
    """

    __slots__ = ("chunk_bytes", "entries", "id", "packer", "shard_bytes", "slot_bytes")

    def __init__(
        self, identity: NamespaceId, shard_bytes: tuple[int, ...], slot_bytes: tuple[int, ...]
    ) -> None:
        self.id = identity
        self.shard_bytes = shard_bytes
        self.slot_bytes = slot_bytes
        self.chunk_bytes = sum(slot_bytes)
        self.packer = struct.Struct(f"<{len(shard_bytes)}Q")
        self.entries = 0

    def extents_of_refs(self, refs: bytes) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes taken) of each shard of a complete chunk."""
        for shard, taken_bytes in enumerate(self.slot_bytes):
            at = shard * REF_BYTES
            yield int.from_bytes(refs[at : at + OFFSET_BYTES], "little"), taken_bytes

    def extents_of_offsets(self, offsets: bytes) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes taken) of each shard of a reserved chunk."""
        return zip(self.packer.unpack(offsets), self.slot_bytes, strict=True)


class Entry:
    """One chunk in the catalogue: complete, being written, or only the parent of such a one.

    Attributes:
        key: 32 bytes.
        namespace: where it belongs.
        tenant: who stored it, and so whose account its slots are on; keys differ by salt, so
            nobody else finds it.
        parent: key of the chunk before it; empty for the first of a prefix or where unknown.
        refs: `REF_BYTES` for each shard; empty while the chunk is not complete.
        leases: read leases that hold it.
        children: entries in the catalogue whose parent it is.
        tick: the store's count of operations when it was used last.
        mark: whatever the eviction policy wants to remember of it.
    """

    __slots__ = (
        "children",
        "key",
        "leases",
        "mark",
        "namespace",
        "parent",
        "refs",
        "tenant",
        "tick",
    )

    def __init__(self, key: bytes, namespace: Namespace, tenant: Tenant) -> None:
        self.key = key
        self.namespace = namespace
        self.tenant = tenant
        self.parent = b""
        self.refs = b""
        self.leases = 0
        self.children = 0
        self.tick = 0
        self.mark = 0
