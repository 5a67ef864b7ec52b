"""Whose chunk leaves a medium next: the tenants' accounts, and for each tenant its own order.

The same rules as in memory (`kvcellar.tenancy.shares`). Kept by `ChunkIndex` under its lock; no
I/O. Chunks whose owner is not known yet, for a moment after a start, are on the account of "".
"""

import sys
from collections import OrderedDict
from collections.abc import Mapping

from kvcellar.tenancy.shares import Shares

__all__ = ["Turns"]


class Turns:
    """The chunks of one medium by tenant, the least recently used first."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.shares = Shares(capacity_bytes)
        self._orders: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, key: bytes, tenant: str, size_bytes: int) -> None:
        """Take a chunk in, as the most recently used of its tenant."""
        account = self.shares.tenant(tenant)
        # An emptied file occupies nothing, and has to leave in its turn all the same.
        self.shares.charge(account, max(size_bytes, 1))
        self._orders.setdefault(account.name, OrderedDict())[key] = None
        self.shares.offer(account)

    def remove(self, key: bytes, tenant: str, size_bytes: int) -> None:
        """Forget a chunk."""
        order = self._orders[tenant]
        del order[key]
        account = self.shares.tenant(tenant)
        if not order:
            del self._orders[tenant]
            self.shares.withdraw(account)
        self.shares.discharge(account, max(size_bytes, 1))

    def use(self, key: bytes, tenant: str) -> None:
        """Make a chunk the most recently used one."""
        self._orders[tenant].move_to_end(key)
        self.shares.touch(self.shares.tenant(tenant))

    def put_first(self, key: bytes, tenant: str) -> None:
        """Make a chunk the one that leaves first of its tenant's."""
        self._orders[tenant].move_to_end(key, last=False)

    def reserve(self, tenant: str, size_bytes: int) -> None:
        """Put a chunk that is being written on its tenant's account."""
        self.shares.charge(self.shares.tenant(tenant), size_bytes)

    def unreserve(self, tenant: str, size_bytes: int) -> None:
        """Take it off."""
        self.shares.discharge(self.shares.tenant(tenant), size_bytes)

    def next(self) -> bytes | None:
        """Return the key that has to leave next."""
        account = self.shares.next_to_give()
        return None if account is None else self.next_of(account.name)

    def next_of(self, tenant: str) -> bytes | None:
        """Return the key that has to leave next of a tenant's."""
        order = self._orders.get(tenant)
        return next(iter(order)) if order else None

    def over_bytes(self, tenant: str) -> int:
        """Return by how much a tenant is over its quota."""
        return self.shares.over_bytes(self.shares.tenant(tenant))

    def set_limits(self, limits: Mapping[str, int | None]) -> None:
        """Give these tenants quotas, or take them away with None."""
        for tenant, limit_bytes in limits.items():
            self.shares.set_limit(sys.intern(tenant), limit_bytes)

    def tenant_bytes(self, count: int) -> dict[str, int]:
        """Return the bytes of at most `count` tenants; the rest and unknown ones under ""."""
        largest = [one for one in self.shares.largest(count) if one.name][: count - 1]
        named = {one.name: one.used_bytes for one in largest if one.used_bytes}
        rest = self.shares.used_bytes - sum(named.values())
        return {**named, "": rest} if rest else named

    def check(self) -> None:
        """Assert that accounts and orders agree; linear, for tests."""
        self.shares.check()
        assert all(self._orders.values()), "an empty order is kept"
        assert all(self.shares.tenant(name).place >= 0 for name in self._orders)
