"""What the store counts: plain numbers for status and metrics pages.

Counters rise where the thing happens; gauges say what is so now. No unit of time is in here, for
the store knows no clock; latencies are measured around it. Read by the server's status page.
"""

from dataclasses import dataclass

__all__ = ["StoreStatistics"]


@dataclass(slots=True)
class StoreStatistics:
    """Counters since the start, then gauges.

    Attributes:
        lookups: lookups answered.
        chunks_asked: keys that they asked for.
        chunks_hit: keys that they found.
        lookups_refused: lookups that found nothing because their owner held too many leases.
        reserved: chunks for which slots were reserved; equals stored + dropped + those pending.
        stored: chunks that became visible.
        dropped: reserved chunks that did not: a rank failed or died, the reservation was
            cancelled, the cache was cleared, or another writer was first.
        evicted: chunks that left to make room.
        evicted_quota: those of them that left because their own tenant had reached its quota.
        steps_reclaimed: growth steps that were emptied because no run was long enough.
        refused_full: chunks not stored because no memory was to be had.
        refused_quota: reserves cut short because their tenant's quota had no room.
        busy: chunks not stored because another writer was storing them.
        second_writers: chunks reserved although an older writer had them.
        damaged: chunks removed because a reader found a seal that did not match.
        clears: clears.
        cleared: chunks that they removed, or that somebody deleted by key.
        leases: read leases held now.
        leased_chunks: chunks that they hold, a chunk counted for each of its leases.
        reservations: reservations whose slots some rank may still touch.
        reserved_chunks: chunks that they hold, whether these can still become visible or not.
        chunks: complete chunks that a lookup can find.
        objects: complete shards of chunks.
        namespaces: namespaces that are known.
        used_bytes: bytes of the arena in slots.
        total_bytes: bytes of the arena that hold memory.
    """

    lookups: int = 0
    chunks_asked: int = 0
    chunks_hit: int = 0
    lookups_refused: int = 0
    reserved: int = 0
    stored: int = 0
    dropped: int = 0
    evicted: int = 0
    evicted_quota: int = 0
    steps_reclaimed: int = 0
    refused_full: int = 0
    refused_quota: int = 0
    busy: int = 0
    second_writers: int = 0
    damaged: int = 0
    clears: int = 0
    cleared: int = 0
    leases: int = 0
    leased_chunks: int = 0
    reservations: int = 0
    reserved_chunks: int = 0
    chunks: int = 0
    objects: int = 0
    namespaces: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
