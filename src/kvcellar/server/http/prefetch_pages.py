"""`/cache/prefetches`: fetch into memory what the tiers have of a prompt, before it is sent.

The paths and shapes are LMCache's. What a prompt's chunks are called depends on the engine that
will ask for them, so that an engine of the model must have been here since the server's start; of
several the one that came last counts. Keys are made here, not on the control loop.
"""

from typing import Annotated

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcellar.keys.digest import NamespaceId, request_seed
from kvcellar.keys.tokens import token_keys
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import (
    AskPrefetch,
    NamespaceList,
    Namespaces,
    Prefetch,
    PrefetchNews,
)
from kvcellar.protocol.prompts import NamespaceNote
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.bodies import PageWrapper, RefusedError, key_of, read_body
from kvcellar.server.http.control_line import ControlLine
from kvcellar.tenancy.names import tenant_of

__all__ = ["PrefetchPages"]

ANSWER_TIMEOUT_S = 5.0
BODY_MAX_BYTES = 16 * 1024 * 1024
TOKENS_MAX = 1_000_000
_NAME_BYTES = 16

_Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]


class _PrefetchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /cache/prefetches; `keys` instead of `token_ids` is kvcellar's own."""

    model_name: str
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    token_ids: Annotated[list[_Token], msgspec.Meta(max_length=TOKENS_MAX)] | None = None
    keys: Annotated[list[str], msgspec.Meta(max_length=KEYS_MAX)] | None = None
    cache_salt: str = ""
    source_tier: str = "l2"
    target_tier: str = "l1"


class PrefetchPages:
    """/cache/prefetches and /cache/prefetches/{request_id}."""

    def __init__(self, line: ControlLine, admission: Admission) -> None:
        self._line = line
        self._admission = admission

    def routes(self, answered: PageWrapper) -> list[Route]:
        """Return the routes, each wrapped by `answered`."""
        return [
            Route("/cache/prefetches", answered(self.begin), methods=["POST"]),
            Route("/cache/prefetches/{request_id}", answered(self.tell), methods=["GET"]),
        ]

    async def begin(self, request: HttpRequest) -> Response:
        """Begin a prefetch and answer with its name."""
        self._admission.check(request)
        body = await read_body(request, _PrefetchBody, empty=None, size_max_bytes=BODY_MAX_BYTES)
        for name, tier, known in (
            ("source_tier", body.source_tier, "l2"),
            ("target_tier", body.target_tier, "l1"),
        ):
            if tier != known:
                raise RefusedError(400, f"{name}: {tier[:80]!r} is not possible; write {known}")
        if (body.token_ids is None) == (body.keys is None):
            raise RefusedError(400, "token_ids: write the prompt's tokens, or its chunks' keys")
        space = await self._namespace(body)
        keys = _keys(body, space)
        if not keys:
            return JSONResponse({"request_id": "", "chunks": 0, "status": "noop"}, 202)
        news = await self._line.call(
            lambda id_: Prefetch(id_, space.namespace, keys, tenant_of(body.cache_salt)),
            timeout_s=ANSWER_TIMEOUT_S,
        )
        assert isinstance(news, PrefetchNews), news
        status = "noop" if news.is_over else "pending"
        answer = {"request_id": news.prefetch.hex(), "chunks": news.total, "status": status}
        return JSONResponse(answer, 202)

    async def tell(self, request: HttpRequest) -> Response:
        """Answer with what has become of a prefetch; its name is all that one must know."""
        text: str = request.path_params["request_id"]
        try:
            name = bytes.fromhex(text)
        except ValueError:
            name = b""
        news = await self._line.call(
            lambda id_: AskPrefetch(id_, name[:_NAME_BYTES]), timeout_s=ANSWER_TIMEOUT_S
        )
        assert isinstance(news, PrefetchNews), news
        if not news.prefetch or news.prefetch != name:
            raise RefusedError(404, f"no prefetch {text[:80]!r} is known, or none any more")
        if not news.is_over:
            return JSONResponse({"request_id": text, "status": "pending"})
        counts = {"found_keys": news.found, "total_keys": news.total}
        return JSONResponse({"request_id": text, "status": "completed"} | counts)

    async def _namespace(self, body: _PrefetchBody) -> NamespaceNote:
        """Return the namespace that an engine as in the body bound last."""
        known = await self._line.call(
            lambda id_: Namespaces(id_, body.model_name), timeout_s=ANSWER_TIMEOUT_S
        )
        assert isinstance(known, NamespaceList), known
        if not body.model_name or not known.namespaces:
            raise RefusedError(
                404,
                f"model_name: no engine has served {body.model_name[:80]!r} since this server's "
                "start; /status names those that are here",
            )
        for space in known.namespaces:
            if space.world_size == body.world_size:
                return space
        sizes = sorted({space.world_size for space in known.namespaces})
        raise RefusedError(
            404, f"world_size: engines of this model have {sizes} ranks, not {body.world_size}"
        )


def _keys(body: _PrefetchBody, space: NamespaceNote) -> bytes:
    if body.keys is not None:
        return b"".join([key_of(text) for text in body.keys])
    assert body.token_ids is not None
    seed = request_seed(
        NamespaceId(space.namespace), adapter=None, cache_salt=body.cache_salt or None
    )
    return token_keys(seed, body.token_ids, chunk_tokens=space.chunk_tokens)
