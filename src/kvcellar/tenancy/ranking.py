"""Tenants by rank, the greatest on top: a heap in which each member knows its place.

A tenant's rank changes with every chunk that it stores, and its place is then found without a
search; that is all that the standard library's heap lacks. Used by `shares` only.
"""

__all__ = ["Rank", "Ranking", "Tenant"]


Rank = tuple[float, int]
"""What decides between two tenants: bytes used (as a part of the quota where there is one), then
minus the tick of the last use."""


class Tenant:
    """What is known of one tenant in one place (memory, a disk).

    Attributes:
        name: see `names.tenant_of`.
        used_bytes: what it holds.
        limit_bytes: its quota; None where nobody set one.
        evicted: chunks of it that left to make room.
        tick: rises with its uses.
        seen_bytes: how much had been stored in this place, by anybody, when it was used last.
        rank: the one that its place in a ranking is by.
        place: its index in the ranking's heap; -1 while it is in none.
    """

    __slots__ = (
        "evicted",
        "limit_bytes",
        "name",
        "place",
        "rank",
        "seen_bytes",
        "tick",
        "used_bytes",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.used_bytes = 0
        self.limit_bytes: int | None = None
        self.evicted = 0
        self.tick = 0
        self.seen_bytes = 0
        self.rank: Rank = (0.0, 0)
        self.place = -1


class Ranking:
    """Some tenants, ordered; a tenant is in one ranking at most. O(log tenants) a change."""

    def __init__(self) -> None:
        self._heap: list[Tenant] = []

    def __len__(self) -> int:
        return len(self._heap)

    def top(self) -> Tenant | None:
        """Return the tenant of the greatest rank."""
        return self._heap[0] if self._heap else None

    def put(self, tenant: Tenant, rank: Rank) -> None:
        """Give `tenant` its place by `rank`, whether it has one or not."""
        tenant.rank = rank
        if tenant.place < 0:
            tenant.place = len(self._heap)
            self._heap.append(tenant)
        self._settle(tenant)

    def drop(self, tenant: Tenant) -> None:
        """Take `tenant` out."""
        place, last = tenant.place, self._heap.pop()
        tenant.place = -1
        if last is not tenant:
            self._heap[place] = last
            last.place = place
            self._settle(last)

    def check(self) -> None:
        """Assert that everybody is where the ranks say; linear, for tests."""
        for place, tenant in enumerate(self._heap):
            assert tenant.place == place, (tenant.name, tenant.place, place)
            above = self._heap[(place - 1) // 2] if place else tenant
            assert above.rank >= tenant.rank, (above.name, tenant.name)

    def _settle(self, tenant: Tenant) -> None:
        heap, place, rank = self._heap, tenant.place, tenant.rank
        while place and (above := heap[(place - 1) // 2]).rank < rank:
            heap[place] = above
            above.place, place = place, (place - 1) // 2
        count = len(heap)
        while (at := 2 * place + 1) < count:
            if at + 1 < count and heap[at + 1].rank > heap[at].rank:
                at += 1
            below = heap[at]
            if below.rank <= rank:
                break
            heap[place] = below
            below.place, place = place, at
        heap[place] = tenant
        tenant.place = place
