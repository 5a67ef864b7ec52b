"""Who holds what: things that owners hold by handle, findable by owner when one leaves.

Leases and reservations are both granted by a request, named by a handle, listed by heartbeats and
ended when their owner goes; this is that bookkeeping, once. What an end means for the memory is
the store's part.
"""

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from kvcellar.store.entries import OwnerId

__all__ = ["Granted", "Holdings"]


class Granted(Protocol):
    """Something that a request granted."""

    request: int


HeldT = TypeVar("HeldT", bound=Granted)


class Holdings(Generic[HeldT]):
    """All things of one kind that are held now; handles rise from 1 and are never reused."""

    def __init__(self) -> None:
        self._by_owner: dict[OwnerId, dict[int, HeldT]] = {}
        self._owners: dict[int, OwnerId] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[HeldT]:
        for held in self._by_owner.values():
            yield from held.values()

    def add(self, owner: OwnerId, thing: HeldT) -> int:
        """Give `thing` to `owner` and return its handle."""
        self._last += 1
        self._by_owner.setdefault(owner, {})[self._last] = thing
        self._owners[self._last] = owner
        return self._last

    def get(self, handle: int) -> HeldT | None:
        """Return what a handle names, whoever holds it."""
        owner = self._owners.get(handle)
        return None if owner is None else self._by_owner[owner][handle]

    def remove(self, owner: OwnerId, handle: int) -> HeldT | None:
        """End the holding of `handle` and return the thing; None unless `owner` holds it."""
        if self._owners.get(handle) != owner:
            return None
        del self._owners[handle]
        held = self._by_owner[owner]
        thing = held.pop(handle)
        if not held:
            del self._by_owner[owner]
        return thing

    def count_of(self, owner: OwnerId) -> int:
        """Return how many things `owner` holds."""
        return len(self._by_owner.get(owner, ()))

    def handles_of(self, owner: OwnerId) -> list[int]:
        """Return the handles of what `owner` holds, oldest first."""
        return list(self._by_owner.get(owner, ()))

    def unlisted(self, owner: OwnerId, listed: Collection[int], *, seen: int) -> list[int]:
        """Return the handles of `owner` that a heartbeat should have listed and did not.

        Args:
            owner: who sent it.
            listed: the handles that it says it uses.
            seen: the highest request id such that it had processed all replies up to it; what a
                later request granted may not have reached it.
        """
        used = frozenset(listed)
        held = self._by_owner.get(owner, {})
        return [
            handle for handle, thing in held.items() if handle not in used and thing.request <= seen
        ]
