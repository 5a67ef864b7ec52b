"""The description of every page: OpenAPI 3.1, from one table.

A test compares it with the routes that the application really has and with what a real server
answers, so that it cannot say less or more. `api_pages` serves it as JSON and as a page.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcellar import __version__
from kvcellar.protocol.limits import PAGE_MAX

__all__ = ["OPERATIONS", "Operation", "description"]

# Any: JSON schemas.
Schema = Mapping[str, Any]

_IN_PATH = re.compile(r"\{(\w+)\}")
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_SWITCH: Schema = {"type": "boolean"}


def _object(*, optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _only(*values: str) -> Schema:
    return {"type": "string", "enum": [*values]}


_DETAIL = _object(detail=_TEXT)
_KEY = _object(
    chunk_hash_hex={"type": "string", "pattern": "^[0-9a-f]{64}$"},
    model_name=_TEXT,
    kv_rank=_WHOLE,
    object_group_id=_WHOLE,
    cache_salt=_TEXT,
)
_USE = {"disk_limit_gb": _NUMBER, "disk_usage_gb": _NUMBER}
_QUOTA = _object(
    optional=("disk_limit_gb", "disk_usage_gb"),
    cache_salt=_TEXT,
    limit_gb=_NUMBER,
    current_usage_gb=_NUMBER,
    exists=_SWITCH,
    **_USE,
)
_L1 = _object(
    is_healthy=_SWITCH,
    total_object_count=_WHOLE,
    memory_used_bytes=_WHOLE,
    memory_total_bytes=_WHOLE,
    memory_configured_bytes=_WHOLE,
    memory_usage_ratio=_NUMBER,
)
_STATUS = _object(
    is_healthy=_SWITCH,
    engine_type=_TEXT,
    chunk_size=_WHOLE,
    hash_algorithm=_TEXT,
    active_sessions=_WHOLE,
    storage_manager=_object(is_healthy=_SWITCH, l1_manager=_L1),
    kvcellar=_object(version=_TEXT, boot_id=_TEXT, node=_TEXT, parts={"type": "object"}),
)


class Operation(NamedTuple):
    """One method of one path.

    Attributes:
        method: in lower case.
        path: with `{name}` where a part varies.
        summary: what it does, one line.
        answer: schema of the answer; None for text.
        query: parameters behind the question mark, by name.
        body: schema of the body; None without one.
        is_guarded: only for this host, or for whoever has the admin token.
        is_unhealthy_503: its 503 has `reason` and not `detail`.
        success: the status of `answer`.
    """

    method: str
    path: str
    summary: str
    answer: Schema | None
    query: Mapping[str, Schema] = {}
    body: Schema | None = None
    is_guarded: bool = False
    is_unhealthy_503: bool = False
    success: int = 200


OPERATIONS = (
    Operation("get", "/", "Say what this is.", _object(status=_only("ok"), service=_TEXT)),
    Operation(
        "get",
        "/healthcheck",
        "Whether every part of the server works; 503 with the reason if not.",
        _object(status=_only("healthy")),
        is_unhealthy_503=True,
    ),
    Operation("get", "/status", "What the cache holds and who uses it.", _STATUS),
    Operation("get", "/metrics", "All metrics, for Prometheus.", None),
    Operation("get", "/version", "The release that runs.", None),
    Operation("get", "/config", "The settings, without secrets.", {"type": "object"}),
    Operation("get", "/openapi.json", "This description.", {"type": "object"}),
    Operation("get", "/docs", "This description, for people.", None),
    Operation(
        "post",
        "/cache/clear",
        "Forget every chunk in memory.",
        _object(
            status=_only("ok"),
            cleared=_object(tier=_TEXT),
            chunks=_WHOLE,
            size_bytes=_WHOLE,
        ),
        body=_object(optional=("tier", "force"), tier=_TEXT, force=_SWITCH),
        is_guarded=True,
    ),
    Operation(
        "get",
        "/cache/objects",
        "The complete objects in memory, a page at a time.",
        _object(
            adapter=_TEXT,
            shared=_SWITCH,
            entries=_list(_object(key=_KEY, size_bytes=_WHOLE)),
            next_page_token={"type": ["string", "null"]},
        ),
        query={
            "tier": _only("l1", "all"),
            "model_name": _TEXT,
            "page_size": {"type": "integer", "minimum": 1, "maximum": PAGE_MAX},
            "page_token": _TEXT,
            "adapter": _TEXT,
        },
        is_guarded=True,
    ),
    Operation(
        "delete",
        "/cache/objects",
        "Delete chunks by the keys of their objects, from memory and every tier; those in use "
        "only with force.",
        _object(optional=("error",), deleted=_WHOLE, skipped=_WHOLE, ok=_SWITCH, error=_TEXT),
        body=_object(
            optional=("tier", "force", "adapter"),
            keys={"type": "array", "items": {"anyOf": [_KEY, _TEXT]}, "maxItems": 10_000},
            tier=_only("l1", "l2", "all"),
            force=_SWITCH,
            adapter=_TEXT,
        ),
        is_guarded=True,
    ),
    Operation(
        "post",
        "/cache/prefetches",
        "Begin to fetch into memory what the tiers have of a prompt, by its tokens or its keys.",
        _object(
            request_id=_TEXT,
            chunks=_WHOLE,
            status=_only("pending", "noop"),
        ),
        body=_object(
            optional=("token_ids", "keys", "cache_salt", "source_tier", "target_tier"),
            model_name=_TEXT,
            world_size={"type": "integer", "minimum": 1},
            token_ids={"type": "array", "items": _WHOLE, "maxItems": 1_000_000},
            keys={"type": "array", "items": _TEXT, "maxItems": 65_536},
            cache_salt=_TEXT,
            source_tier=_only("l2"),
            target_tier=_only("l1"),
        ),
        is_guarded=True,
        success=202,
    ),
    Operation(
        "get",
        "/cache/prefetches/{request_id}",
        "What has become of a prefetch; 404 ten minutes after its end.",
        _object(
            optional=("found_keys", "total_keys"),
            request_id=_TEXT,
            status=_only("pending", "completed"),
            found_keys=_WHOLE,
            total_keys=_WHOLE,
        ),
    ),
    Operation(
        "get",
        "/quota",
        "Every tenant that has a quota.",
        _object(users={"type": "object"}),
        is_guarded=True,
    ),
    Operation("get", "/quota/{salt}", "One tenant's quota and use.", _QUOTA),
    Operation(
        "put",
        "/quota/{salt}",
        "Set a tenant's quota, in GB of 1024³ bytes.",
        _object(
            optional=("disk_limit_gb",),
            cache_salt=_TEXT,
            limit_gb=_NUMBER,
            status=_only("ok"),
            disk_limit_gb=_NUMBER,
        ),
        body=_object(optional=("disk_limit_gb",), limit_gb=_NUMBER, disk_limit_gb=_NUMBER),
        is_guarded=True,
    ),
    Operation(
        "delete",
        "/quota/{salt}",
        "Remove a tenant's quota; what it holds stays.",
        _object(cache_salt=_TEXT, status=_only("removed", "not_found")),
        is_guarded=True,
    ),
)
"""Every page, in the order in which they are shown."""


def description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvcellar",
            "version": __version__,
            "description": "What a kvcellar server answers over HTTP. Errors are "
            "{'detail': …}; 503 means that the control loop did not answer in time.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"admin": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in operation.query.items()
    ]
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in _IN_PATH.findall(operation.path)
    ]
    found: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        needs_body = bool(operation.body["required"])
        content = {"application/json": {"schema": operation.body}}
        found["requestBody"] = {"required": needs_body, "content": content}
    if operation.is_guarded:
        # Or without a token, from this host.
        found["security"] = [{"admin": []}, {}]
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    content = {"text/plain": {}} if answer is None else {"application/json": {"schema": answer}}
    reason = _object(status=_only("unhealthy"), reason=_TEXT)
    responses = {
        str(operation.success): {"description": "As asked.", "content": content},
        "503": _error("The control loop did not answer in time.")
        if not operation.is_unhealthy_503
        else {"description": "Not healthy.", "content": {"application/json": {"schema": reason}}},
    }
    if "{request_id}" in operation.path:
        responses["404"] = _error("There is no such one, or none any more.")
    if operation.query or operation.body is not None or "{salt}" in operation.path:
        responses["400"] = _error("A parameter or field is wrong; the text names it.")
    if operation.is_guarded:
        responses["403"] = _error("Only this host may do this.")
        responses["401"] = _error("The admin token is needed.")
    return dict(sorted(responses.items()))


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _DETAIL}}}
