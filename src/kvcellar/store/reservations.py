"""A reservation: slots for all shards of some chunks that the ranks of one instance will write.

It is complete when every rank has committed, and void as soon as one cannot (it failed or died,
the scheduler half died, the cache was cleared). A void reservation keeps its slots until no rank
can touch them any more, for a DMA may still run. Kept in `Holdings`, moved on by the store.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvcellar.store.entries import Entry, Group, Namespace, OwnerId
from kvcellar.tenancy.ranking import Tenant

__all__ = ["PendingChunk", "Reservation"]


class PendingChunk(NamedTuple):
    """One group's part of a chunk that is being written.

    Attributes:
        key: 32 bytes.
        offsets: `OFFSET_BYTES` for each shard.
        group: where it belongs.
    """

    key: bytes
    offsets: bytes
    group: Group

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes taken) of each shard."""
        return self.group.extents_of_offsets(self.offsets)


class Reservation:
    """The state of one reservation.

    Attributes:
        handle: its name on the wire; 0 until it is given one.
        owner: the scheduler half that asked for it.
        request: id of the request that granted it, in its owner's count; 0 when the connection
            over which it was granted is gone.
        namespace: where its chunks belong.
        tenant: on whose account their slots are.
        writers: the owner of each rank, in rank order.
        reserved_s: when it was made.
        chunks: what is being written.
        seals: what each rank committed; empty where it has not.
        out: ranks that may still touch their slots.
        is_void: its chunks will never become visible.
    """

    __slots__ = (
        "chunks",
        "handle",
        "is_void",
        "namespace",
        "out",
        "owner",
        "request",
        "reserved_s",
        "seals",
        "tenant",
        "writers",
    )

    def __init__(
        self,
        owner: OwnerId,
        namespace: Namespace,
        *,
        tenant: Tenant,
        writers: tuple[OwnerId, ...],
        reserved_s: float,
        request: int,
    ) -> None:
        self.handle = 0
        self.owner = owner
        self.namespace = namespace
        self.tenant = tenant
        self.writers = writers
        self.reserved_s = reserved_s
        self.request = request
        self.chunks: list[PendingChunk] = []
        self.seals = [b""] * len(writers)
        self.out = set(range(len(writers)))
        self.is_void = False

    def may_write(self, entry: Entry, group: Group) -> bool:
        """Return whether an entry that is there already is what this one would write."""
        return entry.group is group and entry.tenant.name == self.tenant.name
