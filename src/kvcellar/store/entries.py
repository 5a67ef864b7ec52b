"""What the catalogue remembers of a chunk, and of the KV group and namespace that it belongs to.

An entry is the price of a chunk in memory (with its key and its place in the catalogue less than
500 bytes), so it has slots only, holds the slots' references packed as the wire wants them, and
knows its parent by key. All are bare records: the catalogue keeps their rules.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple, NewType

from kvcellar.keys.digest import NamespaceId
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.tenancy.ranking import Tenant

__all__ = ["Entry", "Group", "Namespace", "OwnerId"]

OwnerId = NewType("OwnerId", int)
"""The number that the server gives a client process; what it holds belongs to this number."""


class Group:
    """One KV group of a namespace: how large its chunks' shards are, and what of it a hit needs.

    A model whose layers keep their KV differently (all of it, a window, a state) has one for each
    kind; most have one. A chunk has an entry for each group that keeps something of it.

    Attributes:
        namespace: the 32 bytes of the namespace that it belongs to.
        shard_bytes: bytes of each rank's shard, in rank order.
        span: which chunks before an end must be there for a hit to end there: 0 for all, n for the
            last n, -n for those since the last multiple of n.
        slot_bytes: bytes that each shard takes from the arena.
        chunk_bytes: their sum.
        packer: packs one offset for each shard.
        entries: entries of the catalogue, complete or not.
    """

    __slots__ = (
        "chunk_bytes",
        "entries",
        "namespace",
        "packer",
        "shard_bytes",
        "slot_bytes",
        "span",
    )

    def __init__(
        self,
        namespace: NamespaceId,
        shard_bytes: tuple[int, ...],
        slot_bytes: tuple[int, ...],
        *,
        span: int = 0,
    ) -> None:
        self.namespace = namespace
        self.shard_bytes = shard_bytes
        self.slot_bytes = slot_bytes
        self.span = span
        self.chunk_bytes = sum(slot_bytes)
        self.packer = struct.Struct(f"<{len(shard_bytes)}Q")
        self.entries = 0

    def start(self, end: int) -> int:
        """Return the first chunk that must be there for a hit to end before chunk `end`."""
        if self.span == 0:
            return 0
        return max(0, end - self.span) if self.span > 0 else end - end % -self.span

    def extents_of_refs(self, refs: bytes) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes taken) of each shard of a complete chunk."""
        for shard, taken_bytes in enumerate(self.slot_bytes):
            at = shard * REF_BYTES
            yield int.from_bytes(refs[at : at + OFFSET_BYTES], "little"), taken_bytes

    def extents_of_offsets(self, offsets: bytes) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes taken) of each shard of a reserved chunk."""
        return zip(self.packer.unpack(offsets), self.slot_bytes, strict=True)


class Namespace(NamedTuple):
    """One namespace.

    Attributes:
        id: its 32 bytes.
        groups: its KV groups, in the order in which clients number them.
    """

    id: NamespaceId
    groups: tuple[Group, ...]


class Entry:
    """One group's part of a chunk: complete, being written, or only the parent of such a one.

    Attributes:
        key: 32 bytes.
        group: where it belongs.
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
        "group",
        "key",
        "leases",
        "mark",
        "parent",
        "refs",
        "tenant",
        "tick",
    )

    def __init__(self, key: bytes, group: Group, tenant: Tenant) -> None:
        self.key = key
        self.group = group
        self.tenant = tenant
        self.parent = b""
        self.refs = b""
        self.leases = 0
        self.children = 0
        self.tick = 0
        self.mark = 0
