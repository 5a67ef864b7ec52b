"""The pages: what is asked over HTTP, in LMCache's paths and shapes where it has them.

Each page asks the control loop one question with a deadline and answers whatever comes of it:
nothing here holds state, and a control loop that is frozen makes 503s, not hanging connections.
Only loopback may change anything. Errors are `{"detail": …}`.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvcellar import __version__
from kvcellar.errors import KVCellarError, RetryableError
from kvcellar.protocol.messages import Clear, Cleared, Status, StatusReply
from kvcellar.server.http.control_line import ControlLine
from kvcellar.telemetry.metrics import CONTENT_TYPE, render

__all__ = ["make_app"]

ANSWER_TIMEOUT_S = 1.0
CLEAR_TIMEOUT_S = 30.0
BODY_MAX_BYTES = 65_536


class _ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /cache/clear; `force` is LMCache's: leased chunks always leave at once here."""

    tier: str = "l1"
    force: bool = False


class _RefusedError(Exception):
    """A request that is wrong, with the status and the text to answer."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def make_app(line: ControlLine) -> Starlette:
    """Return the application whose pages ask over `line`."""
    pages = _Pages(line)
    routes = [
        Route("/", _answered(pages.root)),
        Route("/healthcheck", _answered(pages.health)),
        Route("/status", _answered(pages.status)),
        Route("/metrics", _answered(pages.metrics)),
        Route("/version", _answered(pages.version)),
        Route("/cache/clear", _answered(pages.clear), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_such_page, 405: _no_such_page})


class _Pages:
    def __init__(self, line: ControlLine) -> None:
        self._line = line

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
        return _unhealthy("; ".join(broken)) if broken else JSONResponse({"status": "healthy"})

    async def status(self, _request: HttpRequest) -> Response:
        page = await self._page()
        page.pop("metrics")
        return JSONResponse(page)

    async def metrics(self, _request: HttpRequest) -> Response:
        page = await self._page()
        return Response(render(page["metrics"]), media_type=CONTENT_TYPE)

    async def clear(self, request: HttpRequest) -> Response:
        _require_loopback(request)
        _require_no_foreign_page(request)
        body = await _clear_body(request)
        if body.tier != "l1":
            raise _RefusedError(
                400, f"tier: {body.tier!r} is not here; the only tier of kvcellar 0.1 is 'l1'"
            )
        reply = await self._line.call(Clear, timeout_s=CLEAR_TIMEOUT_S)
        assert isinstance(reply, Cleared), reply
        return JSONResponse(
            {
                "status": "ok",
                "cleared": {"tier": "l1"},
                "chunks": reply.chunks,
                "size_bytes": reply.size_bytes,
            }
        )

    # Any: the shape of the page is documented in telemetry.status.
    async def _page(self) -> dict[str, Any]:
        reply = await self._line.call(Status, timeout_s=ANSWER_TIMEOUT_S)
        assert isinstance(reply, StatusReply), reply
        return reply.status


def _answered(
    page: Callable[[HttpRequest], Awaitable[Response]],
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Wrap a page so that every failure that has a name becomes an answer."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await page(request)
        except _RefusedError as error:
            return JSONResponse({"detail": error.detail}, error.status)
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


def _require_loopback(request: HttpRequest) -> None:
    host = request.client.host if request.client is not None else ""
    if not _is_loopback(host):
        raise _RefusedError(403, f"only this host may change anything; {host} is another")


def _require_no_foreign_page(request: HttpRequest) -> None:
    """Refuse what a browser on this host sends for a page that came from elsewhere."""
    origin = request.headers.get("origin")
    if origin is not None and not _is_loopback(urlsplit(origin).hostname or ""):
        raise _RefusedError(403, f"a page of {origin} may not change anything here")
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    # A name that a page had pointed at this host; a number cannot be pointed elsewhere.
    if not _is_loopback(host) and _address(host) is None:
        raise _RefusedError(403, f"Host {host}: call localhost or an address of this host")


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


async def _clear_body(request: HttpRequest) -> _ClearBody:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > BODY_MAX_BYTES:
            raise _RefusedError(413, f"the body is larger than {BODY_MAX_BYTES} bytes")
    if not content.strip():
        return _ClearBody()
    try:
        return msgspec.json.decode(bytes(content), type=_ClearBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _RefusedError(400, f"the body is wrong: {error}") from error
