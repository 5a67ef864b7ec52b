"""What tools do to a store by hand: list chunks, count some, and delete some by their keys.

Apart from `machine`, because no engine asks for it. Called by the server for the pages below
`/cache`.
"""

from collections.abc import Set as AbstractSet
from itertools import islice
from typing import NamedTuple

from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.store.departures import Reason
from kvcellar.store.entries import Entry
from kvcellar.store.machine import Store
from kvcellar.store.search import find_reach

__all__ = ["Deletion", "Listing", "count_leading", "delete_chunk", "list_chunks"]


class Deletion:
    """What became of one key that was to be deleted."""

    ABSENT = 0
    DELETED = 1
    IN_USE = 2
    UNSURE = 3
    """A tier could not be reached and may keep it."""


class Listing(NamedTuple):
    """A page of complete chunks.

    Attributes:
        chunks: in the order in which their keys first came, at most as many as were asked for.
        next_at: where the next page begins; 0 after the last one.
    """

    chunks: list[Entry]
    next_at: int


def list_chunks(
    store: Store, at: int, *, count: int, namespaces: AbstractSet[NamespaceId] | None = None
) -> Listing:
    """Return the complete chunks from place `at` of the catalogue on.

    Chunks that come and go between two pages may be missed or seen twice: a place is no more than
    a number. Skipping to a place costs some 10 ns an entry, and no page looks at more than
    `count` entries, so that nobody's lookup waits for a listing.

    Args:
        store: whose chunks.
        at: 0, or `next_at` of the page before.
        count: entries to look at.
        namespaces: only chunks of these; None for all.
    """
    entries = store.catalog.entries
    page = list(islice(entries.values(), at, at + count))
    found = [
        entry
        for entry in page
        if entry.refs and (namespaces is None or entry.group.namespace in namespaces)
    ]
    end = at + len(page)
    return Listing(found, end if page and end < len(entries) else 0)


def count_leading(store: Store, namespace: NamespaceId, keys: bytes) -> int:
    """Return how many leading chunks a lookup would find; nothing counts as used.

    Args:
        store: whose chunks.
        namespace: 32 bytes.
        keys: 32 bytes a chunk, in prefix order, KV group after KV group.
    """
    space = store.namespace(namespace)
    if space is None:
        return 0
    count = len(keys) // KEY_BYTES // len(space.groups)
    return find_reach(store.catalog.entries, space.groups, keys, count=count).end


def delete_chunk(store: Store, key: bytes, *, force: bool) -> int:
    """Remove a complete chunk by its key and return a `Deletion`.

    Args:
        store: whose chunk.
        key: 32 bytes.
        force: also if somebody reads it; its slots are then freed when the leases end.
    """
    entry = store.catalog.entries.get(key)
    if entry is None or not entry.refs:
        return Deletion.ABSENT
    if entry.leases and not force:
        return Deletion.IN_USE
    store.catalog.vacate(entry)
    store.catalog.departures.note(key, Reason.DELETED)
    store.statistics.cleared += 1
    return Deletion.DELETED
