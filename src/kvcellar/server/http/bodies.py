"""What a page is; what callers send to one, read in bounds, and how it is refused.

Used by the pages.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

__all__ = [
    "BODY_MAX_BYTES",
    "Page",
    "PageWrapper",
    "RefusedError",
    "key_of",
    "pretty_json",
    "read_body",
]

Page = Callable[[HttpRequest], Awaitable[Response]]
"""Answers a request, or raises what has an answer."""
PageWrapper = Callable[[Page], Page]
"""Makes a page that raises nothing of one that may."""

BODY_MAX_BYTES = 65_536
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")

BodyT = TypeVar("BodyT")


class RefusedError(Exception):
    """A request that is wrong, with the status, the text and the headers to answer."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


async def read_body(
    request: HttpRequest,
    kind: type[BodyT],
    *,
    empty: BodyT | None,
    size_max_bytes: int = BODY_MAX_BYTES,
) -> BodyT:
    """Return the JSON body of a request.

    Args:
        request: it is read to its end.
        kind: what it must be.
        empty: what no body at all means; None if there must be one.
        size_max_bytes: a larger one is refused.

    Raises:
        RefusedError: it is too large or not what it must be; the text names the field.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > size_max_bytes:
            raise RefusedError(413, f"the body is larger than {size_max_bytes} bytes")
    if not content.strip() and empty is not None:
        return empty
    try:
        return msgspec.json.decode(bytes(content), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(400, f"the body is wrong: {error}") from error


def key_of(text: str) -> bytes:
    """Return a chunk's key as it is written in JSON.

    Raises:
        RefusedError: it is none.
    """
    if not _HEX_KEY.fullmatch(text):
        raise RefusedError(400, f"keys: {text[:80]!r} is no key; write its 64 hex digits")
    return bytes.fromhex(text)


# Any: whatever is JSON.
def pretty_json(page: Any) -> Response:  # noqa: ANN401 - as said.
    """Return an answer that people can read as well."""
    text = msgspec.json.format(msgspec.json.encode(page), indent=2)
    return Response(text, media_type="application/json")
