"""What people ask of a server: why something missed, and what it holds.

Apart from `requests`, which engines are waiting for. Each answer is bounded: a page of a listing
looks at a limited number of places, an explanation at a limited number of lookups.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from kvcellar.errors import MalformedError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.limits import KEYS_MAX, PAGE_MAX, SKETCH_MAX_BYTES, TEXT_MAX
from kvcellar.protocol.messages import (
    Explain,
    Explained,
    LookupNote,
    ObjectList,
    Objects,
    Ok,
    Reply,
    Role,
)
from kvcellar.server.instances import Client
from kvcellar.server.misses import Explainer, Miss
from kvcellar.server.node import Node
from kvcellar.server.recent import LookupRecord
from kvcellar.store.entries import Entry
from kvcellar.store.inspection import list_chunks
from kvcellar.telemetry.logs import EventLog

__all__ = ["Inquiries"]

EXPLAINED_MAX = 50
_DIGEST_BYTES = 8
_TOOLS = frozenset({Role.TOOL})

_log = EventLog("kvcellar.server")


class Inquiries:
    """Answers what tools ask, and keeps what scheduler halves say about their lookups."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = node.store
        self._explainer = Explainer(node.recent, node.store.catalog.departures)

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply]]]:
        """Return who may ask what, and who answers it."""
        return {
            LookupNote: (frozenset({Role.SCHEDULER}), self._note),
            Explain: (_TOOLS, self._explain),
            Objects: (_TOOLS, self._objects),
        }

    def _note(self, client: Client, request: LookupNote) -> Reply:
        _check_note(request)
        instance = client.instance
        now_s = self._node.clock.monotonic_s()
        self._store.catalog.departures.now_s = now_s
        wrong = self._node.parts() | self._node.degraded()
        record = LookupRecord(
            when_s=now_s,
            instance=client.hello.instance_id,
            namespace=(instance.namespace if instance is not None else None) or b"",
            request=request.request,
            outcome=request.outcome,
            tokens=request.tokens,
            keys=request.keys,
            found=request.found,
            missing=request.missing,
            salt=request.salt,
            adapter=request.adapter,
            items=request.items,
            item_start=request.item_start,
            unit_tokens=request.unit_tokens,
            sketch=request.sketch,
            is_written=request.missing in self._store.catalog.writers,
            broken=tuple(f"{name}: {text}" for name, text in wrong.items() if text),
        )
        older = self._node.recent.add(record)
        self._count(record, older, instance.chunk_tokens if instance is not None else 0)
        if self._node.config.log_misses:
            self._log_miss(self._explainer.explain(record, now_s=now_s))
        return Ok(request.id)

    def _count(self, record: LookupRecord, older: LookupRecord | None, chunk_tokens: int) -> None:
        meters = self._node.meters
        found_before = older.found if older is not None else 0
        meters.lookup_tokens += record.tokens if older is None else 0
        meters.lookup_hit_tokens += max(0, record.found - found_before) * chunk_tokens

    def _log_miss(self, miss: Miss) -> None:
        if miss.reason != "hit":
            _log.info(
                "lookup missed",
                request=miss.request,
                instance=miss.instance,
                tokens=miss.tokens,
                hit_tokens=miss.hit_tokens,
                reason=miss.reason,
                because=miss.text,
            )

    def _explain(self, _client: Client, request: Explain) -> Reply:
        count = min(max(request.count, 0), EXPLAINED_MAX)
        now_s = self._node.clock.monotonic_s()
        wanted = (
            self._explainer.explain(record, now_s=now_s)
            for record in self._node.recent.newest_first()
            if request.request in record.request
        )
        # Asked for by name, a request that hit is an answer too.
        chosen = (miss for miss in wanted if request.request or miss.reason != "hit")
        return Explained(
            request.id, tuple(msgspec.to_builtins(miss) for miss in islice(chosen, count))
        )

    def _objects(self, _client: Client, request: Objects) -> Reply:
        if request.at < 0 or not 1 <= request.count <= PAGE_MAX:
            raise MalformedError(
                f"a page of {request.count} from {request.at}: write 1 to {PAGE_MAX} from 0 on"
            )
        recent = self._node.recent
        namespaces = recent.namespaces_of(request.model).keys() if request.model else None
        page = list_chunks(self._store, request.at, count=request.count, namespaces=namespaces)
        return ObjectList(request.id, tuple(self._object(e) for e in page.chunks), page.next_at)

    # Any: plain data of the message.
    def _object(self, entry: Entry) -> dict[str, Any]:
        facts = self._node.recent.namespace(entry.group.namespace)
        return {
            "key": entry.key,
            "model": facts.model if facts is not None else "",
            "shard_bytes": list(entry.group.shard_bytes),
        }


def _check_note(note: LookupNote) -> None:
    for name in ("request", "outcome"):
        if len(getattr(note, name)) > TEXT_MAX:
            raise MalformedError(f"{name} has more than {TEXT_MAX} characters")
    for name in ("salt", "adapter", "items"):
        if len(getattr(note, name)) > _DIGEST_BYTES:
            raise MalformedError(f"{name} has more than {_DIGEST_BYTES} bytes")
    if len(note.missing) not in {0, KEY_BYTES}:
        raise MalformedError(f"missing has {len(note.missing)} bytes, not 0 or {KEY_BYTES}")
    if len(note.sketch) > SKETCH_MAX_BYTES or len(note.sketch) % 4:
        raise MalformedError(f"sketch has {len(note.sketch)} bytes")
    if note.unit_tokens < 1 or not 0 <= note.found <= note.keys <= KEYS_MAX or note.tokens < 0:
        raise MalformedError("unit_tokens, found, keys or tokens make no sense")
