"""Who gives way when a place for chunks is full: the tenants' accounts, quotas and turn.

Memory and each disk have one of these. Whoever keeps the place says what a tenant takes and gives
back (`charge`, `discharge`), that it was used (`touch`), and whether it has something that may
leave (`offer`, `withdraw`); `next_to_give` names the tenant that gives way, and the place takes
that tenant's least recently used chunk. docs/tenants.md says the rules in the user's words:

1. a tenant over its quota (one that was lowered);
2. a tenant without a quota that nobody used while the place was filled `IDLE_TURNS` times over,
   the longest idle first: salts that never come again would else keep their part for ever;
3. the tenant whose use is the largest part of its quota. Who has none counts as having an equal
   part of what the quotas leave, and all of these together never less than a tenth;
4. of equal ones, the one that was used least recently.

Pure, not thread-safe, and O(log tenants) a call.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import nlargest

from kvcellar.tenancy.ranking import Rank, Ranking, Tenant

__all__ = ["IDLE_TURNS", "QUOTAS_MAX", "Shares"]

IDLE_TURNS = 4
QUOTAS_MAX = 10_000
"""How many tenants may have a quota; kept by who takes them in."""
_RESERVE = 9
"""Quotas get at most nine parts where tenants without one get one."""


class Shares:
    """The tenants of one place.

    Attributes:
        capacity_bytes: how much the place holds; its keeper sets it.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self._known: dict[str, Tenant] = {}
        self._promised_bytes = 0
        self._used_bytes = 0
        self._sharers = 0
        self._tick = 0
        self._turned_bytes = 0
        self._limited_ranks = Ranking()
        self._other_ranks = Ranking()
        self._others_by_age: OrderedDict[Tenant, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tenants hold something or have a quota."""
        return len(self._known)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._known.values())

    @property
    def used_bytes(self) -> int:
        """Return what all tenants hold."""
        return self._used_bytes

    @property
    def share_bytes(self) -> int:
        """Return what a tenant without a quota counts as having, at least 1."""
        left_bytes = max(
            self.capacity_bytes - self._promised_bytes, self._promised_bytes // _RESERVE
        )
        return max(1, left_bytes // max(1, self._sharers))

    def tenant(self, name: str) -> Tenant:
        """Return the tenant of this name; one that holds nothing is forgotten unless charged."""
        return self._known.get(name) or Tenant(name)

    def largest(self, count: int) -> list[Tenant]:
        """Return the `count` tenants that hold most, the largest first. Linear in the tenants."""
        return nlargest(count, self._known.values(), key=_used_bytes)

    def charge(self, tenant: Tenant, size_bytes: int) -> None:
        """Note that `tenant` takes `size_bytes` more."""
        if not tenant.used_bytes:
            assert self._known.setdefault(tenant.name, tenant) is tenant, tenant.name
            self._sharers += tenant.limit_bytes is None
        tenant.used_bytes += size_bytes
        self._used_bytes += size_bytes
        self._turned_bytes += size_bytes
        self._rank_again(tenant)

    def discharge(self, tenant: Tenant, size_bytes: int) -> None:
        """Note that `tenant` gives `size_bytes` back."""
        tenant.used_bytes -= size_bytes
        self._used_bytes -= size_bytes
        assert tenant.used_bytes >= 0, (tenant.name, tenant.used_bytes, size_bytes)
        if not tenant.used_bytes and tenant.limit_bytes is None:
            self._sharers -= 1
            self.withdraw(tenant)
            del self._known[tenant.name]
        self._rank_again(tenant)

    def touch(self, tenant: Tenant) -> None:
        """Note that something of `tenant` was stored or found. O(1)."""
        self._tick += 1
        tenant.tick = self._tick
        tenant.seen_bytes = self._turned_bytes
        if tenant in self._others_by_age:
            self._others_by_age.move_to_end(tenant)

    def set_limit(self, name: str, limit_bytes: int | None) -> Tenant:
        """Give a tenant a quota, or take it away with None; return the tenant."""
        assert limit_bytes is None or limit_bytes >= 0, limit_bytes
        tenant = self.tenant(name)
        was_offered = tenant.place >= 0
        if was_offered:
            self.withdraw(tenant)
        self._sharers -= tenant.limit_bytes is None and tenant.used_bytes > 0
        self._promised_bytes += (limit_bytes or 0) - (tenant.limit_bytes or 0)
        tenant.limit_bytes = limit_bytes
        self._sharers += limit_bytes is None and tenant.used_bytes > 0
        self._list(tenant)
        if was_offered:
            self.offer(tenant)
        return tenant

    def over_bytes(self, tenant: Tenant, size_bytes: int = 0) -> int:
        """Return by how much `size_bytes` more would put `tenant` over its quota; 0 if not."""
        if tenant.limit_bytes is None:
            return 0
        return max(0, tenant.used_bytes + size_bytes - tenant.limit_bytes)

    def offer(self, tenant: Tenant) -> None:
        """Note that `tenant` has something that may leave; harmless if that is known."""
        if tenant.place < 0:
            self._ranking(tenant).put(tenant, self._rank(tenant))
            if tenant.limit_bytes is None:
                # It was new or in use until now, so it is not idle, and the order by age holds.
                tenant.seen_bytes = self._turned_bytes
                self._others_by_age[tenant] = None

    def withdraw(self, tenant: Tenant) -> None:
        """Note that `tenant` had its turn and nothing that may leave; harmless if that is known.

        A place need not say so before: an idle tenant whose last leaf left and made its parent
        a leaf would look as if it had been used.
        """
        if tenant.place >= 0:
            self._ranking(tenant).drop(tenant)
            self._others_by_age.pop(tenant, None)

    def next_to_give(self) -> Tenant | None:
        """Return the tenant that gives way next, of those that have something to give."""
        limited, other = self._top(self._limited_ranks), self._top(self._other_ranks)
        if limited is not None and limited.rank[0] > 1.0:
            return limited
        if other is None:
            return limited
        oldest = next(iter(self._others_by_age))
        if self._turned_bytes - oldest.seen_bytes > IDLE_TURNS * self.capacity_bytes:
            return oldest
        if limited is None:
            return other
        use = (other.used_bytes / self.share_bytes, other.rank[1])
        return limited if limited.rank > use else other

    def check(self) -> None:
        """Assert that all accounts agree; linear, for tests."""
        known = self._known.values()
        assert all(tenant.used_bytes or tenant.limit_bytes is not None for tenant in known)
        assert self._used_bytes == sum(tenant.used_bytes for tenant in known)
        assert self._promised_bytes == sum(tenant.limit_bytes or 0 for tenant in known)
        others = [t for t in known if t.limit_bytes is None]
        assert self._sharers == len(others), (self._sharers, len(others))
        assert len(self._others_by_age) == len(self._other_ranks)
        assert all(tenant.place >= 0 for tenant in self._others_by_age)
        seen = [tenant.seen_bytes for tenant in self._others_by_age]
        assert seen == sorted(seen), seen
        for ranking in (self._limited_ranks, self._other_ranks):
            ranking.check()

    def _list(self, tenant: Tenant) -> None:
        if tenant.used_bytes or tenant.limit_bytes is not None:
            self._known[tenant.name] = tenant
        else:
            self._known.pop(tenant.name, None)

    def _ranking(self, tenant: Tenant) -> Ranking:
        return self._other_ranks if tenant.limit_bytes is None else self._limited_ranks

    def _rank(self, tenant: Tenant) -> Rank:
        if tenant.limit_bytes is None:
            return tenant.used_bytes, -tenant.tick
        return tenant.used_bytes / max(tenant.limit_bytes, 1), -tenant.tick

    def _rank_again(self, tenant: Tenant) -> None:
        if tenant.place >= 0:
            self._ranking(tenant).put(tenant, self._rank(tenant))

    def _top(self, ranking: Ranking) -> Tenant | None:
        # A use only makes a tenant's turn come later, so its place is put right when it is on
        # top and not with every lookup.
        while (tenant := ranking.top()) is not None:
            rank = self._rank(tenant)
            if rank == tenant.rank:
                break
            ranking.put(tenant, rank)
        return tenant


def _used_bytes(tenant: Tenant) -> int:
    return tenant.used_bytes
