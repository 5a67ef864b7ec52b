"""The pages: what is asked over HTTP, in LMCache's paths and shapes where it has them.

Each page asks the control loop one question with a deadline and answers whatever comes of it:
nothing here holds state, and a control loop that is frozen makes 503s, not hanging connections.
`admission` decides who may change anything. Errors are `{"detail": …}`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvcellar import __version__
from kvcellar.errors import KVCellarError, RetryableError
from kvcellar.protocol.messages import Clear, Cleared, Status, StatusReply
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.api_pages import ApiPages
from kvcellar.server.http.bodies import Page, RefusedError, read_body
from kvcellar.server.http.config_pages import ConfigPages
from kvcellar.server.http.control_line import ControlLine
from kvcellar.server.http.object_pages import ObjectPages
from kvcellar.server.http.prefetch_pages import PrefetchPages
from kvcellar.server.http.quota_pages import QuotaPages
from kvcellar.telemetry.aliases import Alias, render_aliases
from kvcellar.telemetry.metrics import CONTENT_TYPE, render

__all__ = ["Look", "make_app"]

ANSWER_TIMEOUT_S = 1.0
CLEAR_TIMEOUT_S = 30.0


class _ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /cache/clear; `force` is LMCache's: leased chunks always leave at once here."""

    tier: str = "l1"
    force: bool = False


class Look(NamedTuple):
    """What the pages show that the control loop is not asked for.

    Attributes:
        config: the settings without secrets.
        aliases: other names of metrics.
    """

    config: Mapping[str, Any] = {}
    aliases: tuple[Alias, ...] = ()


def make_app(line: ControlLine, admission: Admission, look: Look | None = None) -> Starlette:
    """Return the application: pages that ask over `line`, and change things as `admission` says."""
    look = look or Look()
    pages = _Pages(line, admission, look)
    routes = [
        Route("/", _answered(pages.root)),
        Route("/healthcheck", _answered(pages.health)),
        Route("/status", _answered(pages.status)),
        Route("/metrics", _answered(pages.metrics)),
        Route("/version", _answered(pages.version)),
        Route("/cache/clear", _answered(pages.clear), methods=["POST"]),
        *QuotaPages(line, admission).routes(_answered),
        *ObjectPages(line, admission).routes(_answered),
        *PrefetchPages(line, admission).routes(_answered),
        *ConfigPages(look.config).routes(_answered),
        *ApiPages().routes(_answered),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_such_page, 405: _no_such_page})


class _Pages:
    def __init__(self, line: ControlLine, admission: Admission, look: Look) -> None:
        self._line = line
        self._look = look
        self._admission = admission

    async def root(self, _request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "service": "kvcellar HTTP API"})

    async def version(self, _request: HttpRequest) -> Response:
        return PlainTextResponse(__version__)

    async def health(self, _request: HttpRequest) -> Response:
        try:
            page = await self._page()
        except KVCellarError as error:
            return _unhealthy(str(error))
        broken = [
            f"{name}: {reason}" for name, reason in page["kvcellar"]["parts"].items() if reason
        ]
        if broken:
            return _unhealthy("; ".join(broken))
        # A tier that is down costs hits and nothing else: to restart the server would cost more.
        degraded = page["kvcellar"]["degraded"]
        return JSONResponse({"status": "healthy"} | ({"degraded": degraded} if degraded else {}))

    async def status(self, _request: HttpRequest) -> Response:
        page = await self._page()
        page.pop("metrics")
        return JSONResponse(page)

    async def metrics(self, _request: HttpRequest) -> Response:
        page = await self._page()
        text = render(page["metrics"]) + render_aliases(page["metrics"], self._look.aliases)
        return Response(text, media_type=CONTENT_TYPE)

    async def clear(self, request: HttpRequest) -> Response:
        self._admission.check(request)
        body = await read_body(request, _ClearBody, empty=_ClearBody())
        if body.tier not in {"l1", "all"}:
            raise RefusedError(
                400,
                f"tier: {body.tier!r} cannot be cleared; write 'l1' for memory or 'all' for the "
                "tiers behind it too",
            )
        is_all = body.tier == "all"
        reply = await self._line.call(
            lambda id_: Clear(id_, tiers=is_all), timeout_s=CLEAR_TIMEOUT_S
        )
        assert isinstance(reply, Cleared), reply
        answer = {
            "status": "ok",
            "cleared": {"tier": body.tier},
            "chunks": reply.chunks,
            "size_bytes": reply.size_bytes,
        }
        if is_all and reply.tier_chunks < 0:
            detail = "memory is cleared; the tiers cannot be reached now and may keep some"
            return JSONResponse({"detail": detail}, 503)
        return JSONResponse(answer | ({"tier_chunks": reply.tier_chunks} if is_all else {}))

    # Any: the shape of the page is documented in telemetry.status.
    async def _page(self) -> dict[str, Any]:
        reply = await self._line.call(Status, timeout_s=ANSWER_TIMEOUT_S)
        assert isinstance(reply, StatusReply), reply
        return reply.status


def _answered(page: Page) -> Page:
    """Wrap a page so that every failure that has a name becomes an answer."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await page(request)
        except RefusedError as error:
            return JSONResponse({"detail": error.detail}, error.status, error.headers)
        except RetryableError as error:
            return JSONResponse({"detail": str(error)}, 503)
        except KVCellarError as error:
            return JSONResponse({"detail": str(error)}, 400)

    return answer


async def _no_such_page(request: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return JSONResponse({"detail": f"{request.method} {request.url.path} is not here"}, status)


def _unhealthy(reason: str) -> Response:
    return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
