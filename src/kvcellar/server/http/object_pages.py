"""`/cache/objects`: what L1 holds, a page at a time, and deletion by key, in LMCache's shapes.

An object is one shard of a chunk, and its key names the chunk and the rank; deleting one deletes
the chunk, because the other shards alone are of no use. Without another wish it goes from memory
and from every tier: a chunk that stays on a disk is not deleted. A tenant's salt is not shown:
chunks know it only as a digest, and whoever may see it may list quotas.
"""

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcellar.protocol.limits import PAGE_MAX
from kvcellar.protocol.messages import Delete, Deleted, ObjectList, Objects
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.bodies import PageWrapper, RefusedError, key_of, read_body
from kvcellar.server.http.control_line import ControlLine

__all__ = ["ObjectPages"]

ANSWER_TIMEOUT_S = 5.0
DELETE_TIMEOUT_S = 30.0
PAGE_DEFAULT = 500
KEYS_MAX = 10_000
BODY_MAX_BYTES = 4 * 1024 * 1024
_PLACES_MAX = 2**48
# See `protocol.messages.Deleted`.
_DELETED, _UNSURE = 1, 3


class _ObjectKey(msgspec.Struct, frozen=True):
    """As it is listed; only the chunk's hash is read."""

    chunk_hash_hex: str


class _DeleteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of DELETE /cache/objects."""

    keys: tuple[_ObjectKey | str, ...]
    tier: str = "all"
    force: bool = False
    adapter: str | int | None = None


class ObjectPages:
    """/cache/objects."""

    def __init__(self, line: ControlLine, admission: Admission) -> None:
        self._line = line
        self._admission = admission

    def routes(self, answered: PageWrapper) -> list[Route]:
        """Return the routes, each wrapped by `answered`."""
        return [
            Route("/cache/objects", answered(self.all), methods=["GET"]),
            Route("/cache/objects", answered(self.delete), methods=["DELETE"]),
        ]

    async def all(self, request: HttpRequest) -> Response:
        """Answer with a page of the complete objects.

        A chunk's key tells whoever can compute it that the prompt was sent here, so that listing
        needs what a change needs.
        """
        self._admission.check(request)
        given = dict(request.query_params)
        unknown = given.keys() - {"tier", "adapter", "model_name", "page_size", "page_token"}
        if unknown:
            raise RefusedError(400, f"{min(unknown)} is no parameter of this page")
        _check_tier(given.get("tier", "l1"), "l1", "all")
        count = _number("page_size", given.get("page_size", str(PAGE_DEFAULT)), 1, PAGE_MAX)
        at = _number("page_token", given.get("page_token") or "0", 0, _PLACES_MAX)
        model = given.get("model_name", "")
        reply = await self._line.call(
            lambda id_: Objects(id_, at, count, model), timeout_s=ANSWER_TIMEOUT_S
        )
        assert isinstance(reply, ObjectList), reply
        entries = [entry for chunk in reply.objects for entry in _entries(chunk)]
        return JSONResponse(
            {
                "adapter": "l1",
                "shared": False,
                "entries": entries,
                "next_page_token": str(reply.next_at) if reply.next_at else None,
            }
        )

    async def delete(self, request: HttpRequest) -> Response:
        """Delete chunks by the keys of their objects."""
        self._admission.check(request)
        body = await read_body(request, _DeleteBody, empty=None, size_max_bytes=BODY_MAX_BYTES)
        _check_tier(body.tier, "l1", "l2", "all")
        if len(body.keys) > KEYS_MAX:
            raise RefusedError(400, f"keys: {len(body.keys)} of them; at most {KEYS_MAX}")
        keys = dict.fromkeys(_chunk_key(given) for given in body.keys)
        reply = await self._line.call(
            lambda id_: Delete(id_, b"".join(keys), body.force, body.tier),
            timeout_s=DELETE_TIMEOUT_S,
        )
        assert isinstance(reply, Deleted), reply
        gone = {key for key, state in zip(keys, reply.states, strict=True) if state == _DELETED}
        deleted = sum(_chunk_key(given) in gone for given in body.keys)
        answer: dict[str, object] = {
            "deleted": deleted,
            "skipped": len(body.keys) - deleted,
            "ok": True,
        }
        unsure = reply.states.count(_UNSURE)
        if unsure:
            answer |= {"ok": False, "error": f"a tier cannot be reached; it may keep {unsure} keys"}
        return JSONResponse(answer)


def _entries(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "key": {
                "chunk_hash_hex": chunk["key"].hex(),
                "model_name": chunk["model"],
                "kv_rank": rank,
                "object_group_id": 0,
                "cache_salt": "",
            },
            "size_bytes": size_bytes,
        }
        for rank, size_bytes in enumerate(chunk["shard_bytes"])
    ]


def _chunk_key(given: _ObjectKey | str) -> bytes:
    return key_of(given if isinstance(given, str) else given.chunk_hash_hex)


def _check_tier(tier: str, *known: str) -> None:
    if tier not in known:
        raise RefusedError(400, f"tier: {tier[:80]!r} is none of {', '.join(known)}")


def _number(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise RefusedError(400, f"{name}: {text[:80]!r} is not from {low} to {high}")
    return int(text)
