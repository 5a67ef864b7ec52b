"""Tenants' quotas: set, removed and shown; and what pages show of tenants.

A quota lives as long as the server, with `--quota-file` longer. L1 and the tiers keep to it by
themselves, as far as they are isolated; a tenant whose quota was lowered gives up the excess at
once, in L1 some chunks at a time so that no lookup waits. Used by `requests`, on the control loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvcellar.config.quota_file import SavedQuota, read_quota_file
from kvcellar.errors import ConfigError, LimitError, MalformedError, RetryableError
from kvcellar.protocol.messages import ErrorReply, QuotaList, Quotas, Reply, Role, SetQuota
from kvcellar.protocol.quotas import QuotaFacts
from kvcellar.server.instances import Client
from kvcellar.server.node import Node
from kvcellar.server.quota_saving import QuotaSaving
from kvcellar.telemetry.logs import EventLog
from kvcellar.tenancy.names import label_of, shown_name, tenant_of
from kvcellar.tenancy.shares import QUOTAS_MAX
from kvcellar.units import GIB

__all__ = ["QuotaBook"]

LIMIT_MAX_BYTES = 1 << 62
_TOOLS = frozenset({Role.TOOL})

_log = EventLog("kvcellar.server")


class QuotaBook:
    """Answers what tools say and ask about quotas."""

    def __init__(self, node: Node) -> None:
        """Restore what was saved; reads the file.

        Raises:
            ConfigError: it cannot be, or this server keeps no quotas.
            LimitError: they are too many.
        """
        self._node = node
        self._shares = node.store.catalog.shares
        self._limits: dict[str, int] = {}
        self._disk_limits: dict[str, int] = {}
        path = node.config.quota_file
        self._saving = None if path is None else QuotaSaving(path)
        if path is not None:
            self._restore(path)

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply | None]]]:
        """Return who may ask what, and who answers it."""
        return {SetQuota: (_TOOLS, self._set), Quotas: (_TOOLS, self._show)}

    def _restore(self, path: str) -> None:
        self._check_kept("--quota-file: ")
        for name, saved in read_quota_file(path).items():
            self._check_count()
            tenant = tenant_of(name)
            self._limits[tenant] = int(saved.limit_gb * GIB)
            if saved.disk_limit_gb is not None:
                self._disk_limits[tenant] = int(saved.disk_limit_gb * GIB)
            self._apply(tenant)
        _log.info("quotas restored", file=path, tenants=len(self._limits))

    def _set(self, client: Client, request: SetQuota) -> Reply | None:
        tenant = tenant_of(request.tenant)
        _check_limit("limit_bytes", request.limit_bytes)
        _check_limit("disk_limit_bytes", request.disk_limit_bytes)
        before = self._facts(tenant)
        self._limits.pop(tenant, None)
        self._disk_limits.pop(tenant, None)
        if request.limit_bytes is not None:
            self._check_kept()
            self._check_count()
            self._limits[tenant] = request.limit_bytes
            if request.disk_limit_bytes is not None:
                self._disk_limits[tenant] = request.disk_limit_bytes
        self._apply(tenant)
        _log.info(
            "quota removed" if request.limit_bytes is None else "quota set",
            tenant=label_of(tenant),
            limit_bytes=request.limit_bytes,
            disk_limit_bytes=request.disk_limit_bytes,
            used_bytes=before.used_bytes,
        )
        reply = QuotaList(request.id, (before,))
        if self._saving is None:
            return reply
        connection = client.connection

        def saved(failure: str) -> None:
            if connection is not None and client.connection is connection:
                connection.push(_not_saved(request.id, failure) if failure else reply)

        self._saving.save({shown_name(one): self._saved(one) for one in self._limits}, saved)
        return None

    def _saved(self, tenant: str) -> SavedQuota:
        disk_bytes = self._disk_limits.get(tenant)
        return SavedQuota(
            self._limits[tenant] / GIB, None if disk_bytes is None else disk_bytes / GIB
        )

    def _check_kept(self, flag: str = "") -> None:
        tiers, policy = self._node.tiers, self._node.config.eviction_policy
        if not self._is_isolated and not (tiers is not None and tiers.keeps_quotas):
            raise ConfigError(
                f"{flag}quotas are kept with --eviction-policy IsolatedLRU; this server runs "
                f"{policy}"
            )

    def _check_count(self) -> None:
        if len(self._limits) >= QUOTAS_MAX:
            raise LimitError(f"{QUOTAS_MAX} tenants have a quota, as many as may: delete one first")

    def _apply(self, tenant: str) -> None:
        limit_bytes = self._limits.get(tenant)
        if self._is_isolated:
            self._shares.set_limit(tenant, limit_bytes)
            self._shrink(tenant)
        if self._node.tiers is not None:
            disk_limit_bytes = self._disk_limits.get(tenant, limit_bytes)
            self._node.tiers.set_quota(tenant, disk_limit_bytes)

    def _show(self, _client: Client, request: Quotas) -> Reply:
        names = list(self._limits) if request.tenant is None else [tenant_of(request.tenant)]
        return QuotaList(request.id, tuple(self._facts(name) for name in names))

    def _facts(self, name: str) -> QuotaFacts:
        tiers = self._node.tiers
        return QuotaFacts(
            name,
            self._limits.get(name),
            self._shares.tenant(name).used_bytes,
            self._disk_limits.get(name),
            tiers.tenant_bytes(name) if tiers is not None else 0,
        )

    @property
    def _is_isolated(self) -> bool:
        return self._node.config.eviction_policy == "IsolatedLRU"

    def _shrink(self, tenant: str) -> None:
        if self._node.store.shrink(tenant):
            asyncio.get_running_loop().call_soon(self._shrink, tenant)


def _not_saved(request_id: int, failure: str) -> ErrorReply:
    return ErrorReply(
        request_id,
        RetryableError.code,
        "this holds until the server's next restart and no longer: the file of --quota-file cannot "
        f"be written ({failure})",
    )


def _check_limit(name: str, limit_bytes: int | None) -> None:
    if limit_bytes is not None and not 0 <= limit_bytes <= LIMIT_MAX_BYTES:
        raise MalformedError(f"{name} {limit_bytes} is not from 0 to {LIMIT_MAX_BYTES}")
