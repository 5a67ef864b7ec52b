"""The messages about tenants' quotas, spoken by tools and the HTTP pages.

Apart from `messages`, which gives them on, because no engine sends them.
"""

import msgspec

__all__ = ["QuotaFacts", "QuotaList", "Quotas", "SetQuota"]


class QuotaFacts(msgspec.Struct, frozen=True, array_like=True):
    """One tenant's quota and use.

    Attributes:
        tenant: its name (`kvcellar.tenancy.names`), "" for the one without a salt.
        limit_bytes: what it may hold in memory; None where nobody set it.
        used_bytes: what it holds there.
        disk_limit_bytes: what it may hold on each disk; None: as much as in memory.
        disk_used_bytes: what it holds on all of them, as they last said.
    """

    tenant: str
    limit_bytes: int | None
    used_bytes: int
    disk_limit_bytes: int | None = None
    disk_used_bytes: int = 0


class SetQuota(msgspec.Struct, tag="set_quota", frozen=True, array_like=True):
    """Set or remove a tenant's quota. Reply: `QuotaList` of that tenant, as it was before.

    Attributes:
        tenant: see `QuotaFacts`.
        limit_bytes: at least 0; None removes the quota.
        disk_limit_bytes: see `QuotaFacts`.
    """

    id: int
    tenant: str
    limit_bytes: int | None
    disk_limit_bytes: int | None = None


class Quotas(msgspec.Struct, tag="quotas", frozen=True, array_like=True):
    """Ask for a tenant's quota and use, or for all tenants with a quota. Reply: `QuotaList`.

    Attributes:
        tenant: None for all.
    """

    id: int
    tenant: str | None = None


class QuotaList(msgspec.Struct, tag="quota_list", frozen=True, array_like=True):
    """What was asked for; one for each tenant."""

    id: int
    quotas: tuple[QuotaFacts, ...]
