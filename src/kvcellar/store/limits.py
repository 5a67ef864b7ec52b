"""The bounds of the store: how much one owner may hold and how long a writer is waited for.

Every queue has a bound. These are generous, so that only a client that has lost its way meets
them; what happens then is an answer (a miss, FULL), never an exception in an engine. Made by the
server's wiring, read by the store.
"""

from dataclasses import dataclass

__all__ = ["StoreLimits"]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The bounds of one store.

    Attributes:
        leases_max: read leases of one owner; beyond, its lookups find nothing.
        reservations_max: unfinished reservations of one owner; beyond, its reserves get FULL.
        namespaces_max: namespaces that are known at once; empty ones make place for new ones.
        writer_alone_s: seconds during which a writer of a chunk is waited for; after them a
            second writer is admitted.
        arena_bytes: what the arena may grow to; None if unknown, then only a growth step bounds
            a shard.
    """

    leases_max: int = 65_536
    reservations_max: int = 4_096
    namespaces_max: int = 4_096
    writer_alone_s: float = 2.0
    arena_bytes: int | None = None
