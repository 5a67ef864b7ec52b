"""Tenants' quotas: set, removed and shown; and what pages show of tenants.

A quota lives as long as the server. L1 keeps to it by itself; a tenant whose quota was lowered
gives up the excess at once, some chunks at a time so that no lookup waits. Used by `requests`,
on the control loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvcellar.errors import ConfigError, MalformedError
from kvcellar.protocol.messages import QuotaList, Quotas, Reply, Role, SetQuota
from kvcellar.protocol.quotas import QuotaFacts
from kvcellar.server.instances import Client
from kvcellar.server.node import Node
from kvcellar.telemetry.logs import EventLog
from kvcellar.tenancy.names import label_of, tenant_of

__all__ = ["QuotaBook"]

LIMIT_MAX_BYTES = 1 << 62
_TOOLS = frozenset({Role.TOOL})

_log = EventLog("kvcellar.server")


class QuotaBook:
    """Answers what tools say and ask about quotas."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shares = node.store.catalog.shares
        self._disk_limits: dict[str, int] = {}

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply]]]:
        """Return who may ask what, and who answers it."""
        return {SetQuota: (_TOOLS, self._set), Quotas: (_TOOLS, self._show)}

    def _set(self, _client: Client, request: SetQuota) -> Reply:
        tenant = tenant_of(request.tenant)
        _check_limit("limit_bytes", request.limit_bytes)
        _check_limit("disk_limit_bytes", request.disk_limit_bytes)
        policy = self._node.config.eviction_policy
        if policy != "IsolatedLRU" and request.limit_bytes is not None:
            raise ConfigError(
                f"quotas are kept with --eviction-policy IsolatedLRU; this server runs {policy}"
            )
        before = self._facts(tenant)
        self._shares.set_limit(tenant, request.limit_bytes)
        self._disk_limits.pop(tenant, None)
        if request.limit_bytes is not None and request.disk_limit_bytes is not None:
            self._disk_limits[tenant] = request.disk_limit_bytes
        _log.info(
            "quota removed" if request.limit_bytes is None else "quota set",
            tenant=label_of(tenant),
            limit_bytes=request.limit_bytes,
            disk_limit_bytes=request.disk_limit_bytes,
            used_bytes=before.used_bytes,
        )
        self._shrink(tenant)
        return QuotaList(request.id, (before,))

    def _show(self, _client: Client, request: Quotas) -> Reply:
        if request.tenant is not None:
            names = [tenant_of(request.tenant)]
        else:
            names = [tenant.name for tenant in self._shares.limited()]
        return QuotaList(request.id, tuple(self._facts(name) for name in names))

    def _facts(self, name: str) -> QuotaFacts:
        tenant = self._shares.tenant(name)
        return QuotaFacts(name, tenant.limit_bytes, tenant.used_bytes, self._disk_limits.get(name))

    def _shrink(self, tenant: str) -> None:
        if self._node.store.shrink(tenant):
            asyncio.get_running_loop().call_soon(self._shrink, tenant)


def _check_limit(name: str, limit_bytes: int | None) -> None:
    if limit_bytes is not None and not 0 <= limit_bytes <= LIMIT_MAX_BYTES:
        raise MalformedError(f"{name} {limit_bytes} is not from 0 to {LIMIT_MAX_BYTES}")
