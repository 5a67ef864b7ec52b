"""The pages about quotas, in LMCache's paths and shapes: GB are 1024³ bytes.

What a salt is called in a path is decoded from percent-encoding once; `_default` is the tenant
without a salt. `disk_limit_gb` and `disk_usage_gb` are kvcellar's own and shown where they say
more than LMCache's fields. Setting, removing and listing need what a change needs; asking for a
salt that one knows does not.
"""

import math
from collections.abc import Callable

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcellar.protocol.messages import QuotaList, Quotas, SetQuota
from kvcellar.protocol.quotas import QuotaFacts
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.bodies import PageWrapper, RefusedError, read_body
from kvcellar.server.http.control_line import ControlLine
from kvcellar.tenancy.names import shown_name, tenant_of
from kvcellar.units import GIB

__all__ = ["QuotaPages"]

ANSWER_TIMEOUT_S = 5.0
LIMIT_MAX_GB = 1e9


class _QuotaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /quota/{salt}."""

    limit_gb: float
    disk_limit_gb: float | None = None


class QuotaPages:
    """/quota and /quota/{salt}."""

    def __init__(self, line: ControlLine, admission: Admission) -> None:
        self._line = line
        self._admission = admission

    def routes(self, answered: PageWrapper) -> list[Route]:
        """Return the routes, each wrapped by `answered`."""
        # A salt may hold slashes; encoded or not, they come here as slashes.
        return [
            Route("/quota", answered(self.all), methods=["GET"]),
            Route("/quota/{salt:path}", answered(self.put), methods=["PUT"]),
            Route("/quota/{salt:path}", answered(self.get), methods=["GET"]),
            Route("/quota/{salt:path}", answered(self.delete), methods=["DELETE"]),
        ]

    async def all(self, request: HttpRequest) -> Response:
        """Answer with every tenant that has a quota."""
        self._admission.check(request)
        users = {}
        for facts in await self._ask(Quotas):
            users[shown_name(facts.tenant)] = {
                "limit_gb": _gb(facts.limit_bytes or 0),
                "current_usage_gb": _gb(facts.used_bytes),
                **_disk(facts),
            }
        return JSONResponse({"users": users})

    async def get(self, request: HttpRequest) -> Response:
        """Answer with one tenant's quota and use, whether it has a quota or not."""
        salt, tenant = _salt(request)
        (facts,) = await self._ask(lambda id_: Quotas(id_, tenant))
        return JSONResponse(
            {
                "cache_salt": salt,
                "limit_gb": _gb(facts.limit_bytes or 0),
                "current_usage_gb": _gb(facts.used_bytes),
                "exists": facts.limit_bytes is not None,
                **_disk(facts),
            }
        )

    async def put(self, request: HttpRequest) -> Response:
        """Set a tenant's quota."""
        self._admission.check(request)
        salt, tenant = _salt(request)
        body = await read_body(request, _QuotaBody, empty=None)
        limit_bytes = _bytes("limit_gb", body.limit_gb)
        disk_gb = body.disk_limit_gb
        disk_limit_bytes = None if disk_gb is None else _bytes("disk_limit_gb", disk_gb)
        await self._ask(lambda id_: SetQuota(id_, tenant, limit_bytes, disk_limit_bytes))
        answer = {"cache_salt": salt, "limit_gb": body.limit_gb, "status": "ok"}
        if disk_gb is not None:
            answer["disk_limit_gb"] = disk_gb
        return JSONResponse(answer)

    async def delete(self, request: HttpRequest) -> Response:
        """Remove a tenant's quota; what it holds stays."""
        self._admission.check(request)
        salt, tenant = _salt(request)
        (before,) = await self._ask(lambda id_: SetQuota(id_, tenant, None))
        status = "not_found" if before.limit_bytes is None else "removed"
        return JSONResponse({"cache_salt": salt, "status": status})

    async def _ask(self, make: Callable[[int], Quotas | SetQuota]) -> tuple[QuotaFacts, ...]:
        reply = await self._line.call(make, timeout_s=ANSWER_TIMEOUT_S)
        assert isinstance(reply, QuotaList), reply
        return reply.quotas


def _salt(request: HttpRequest) -> tuple[str, str]:
    """Return the salt as it was written, and its tenant."""
    salt: str = request.path_params["salt"]
    if not salt:
        raise RefusedError(400, "the path names no salt: write /quota/SALT, or /quota/_default")
    return salt, tenant_of(salt)


def _bytes(name: str, size_gb: float) -> int:
    if not math.isfinite(size_gb) or not 0 <= size_gb <= LIMIT_MAX_GB:
        raise RefusedError(
            400, f"{name}: {size_gb:g} is not from 0 to {LIMIT_MAX_GB:g}; write GB of 1024³ bytes"
        )
    return int(size_gb * GIB)


def _gb(size_bytes: int) -> float:
    return size_bytes / GIB


def _disk(facts: QuotaFacts) -> dict[str, float]:
    shown = {}
    if facts.disk_limit_bytes is not None:
        shown["disk_limit_gb"] = _gb(facts.disk_limit_bytes)
    if facts.disk_used_bytes:
        shown["disk_usage_gb"] = _gb(facts.disk_used_bytes)
    return shown
