"""Prefetches: what a tool has fetched from the tiers before a prompt asks for it.

A prefetch has a name by which its end can be asked for, from the moment it is begun until some
minutes after it is over; the number of both is bounded. What it fetches it fetches as lookups do,
behind them. Used by `requests`, on the control loop.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import (
    ConfigError,
    LimitError,
    MalformedError,
    NotRegisteredError,
    TierBusyError,
    TierUnavailableError,
)
from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.keys.groups import group_keys
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import (
    AskPrefetch,
    NamespaceList,
    Namespaces,
    Prefetch,
    PrefetchNews,
    Reply,
    Role,
)
from kvcellar.protocol.prompts import NamespaceNote
from kvcellar.server.fetch_records import Prefix
from kvcellar.server.instances import Client
from kvcellar.server.node import Node
from kvcellar.store.inspection import count_leading
from kvcellar.tenancy.names import tenant_of

__all__ = ["KEPT_S", "RUNNING_MAX", "Prefetches"]

RUNNING_MAX = 64
RUNNING_MAX_BYTES = 16 * 1024 * 1024
"""The keys of all that run: a quarter of what all fetches may have."""
KEPT_MAX = 1_024
KEPT_S = 600.0
"""How long it is known what became of a prefetch that is over."""
_NAME_BYTES = 16
_TOOLS = frozenset({Role.TOOL})


@dataclass(eq=False, slots=True)
class _Known:
    """One prefetch; `ended_s` is None while it runs."""

    found: int
    total: int
    ended_s: float | None = None


class Prefetches:
    """Begins prefetches and says what became of them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._running: dict[bytes, _Known] = {}
        self._over: OrderedDict[bytes, _Known] = OrderedDict()
        self._bytes = 0

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply]]]:
        """Return who may ask what, and who answers it."""
        return {
            Namespaces: (_TOOLS, self._namespaces),
            Prefetch: (_TOOLS, self._begin),
            AskPrefetch: (_TOOLS, self._tell),
        }

    def _namespaces(self, _client: Client, request: Namespaces) -> Reply:
        known = self._node.recent.namespaces_of(request.model)
        notes = [
            NamespaceNote(name, facts.instance, facts.model, facts.world_size, facts.chunk_tokens)
            for name, facts in known.items()
        ]
        return NamespaceList(request.id, tuple(reversed(notes)))

    def _begin(self, _client: Client, request: Prefetch) -> Reply:
        tiers, store = self._node.tiers, self._node.store
        facts = self._node.recent.namespace(request.namespace)
        if tiers is None:
            raise ConfigError(
                "there is no tier to fetch from: start the server with --disk-path or --l2-adapter"
            )
        if facts is None:
            raise NotRegisteredError("no engine has bound this namespace since the server's start")
        total = _count(request.keys, groups=len(facts.spans))
        keys = b"".join([group_keys(request.keys, group) for group in range(len(facts.spans))])
        self._check_room(len(keys))
        namespace = NamespaceId(request.namespace)
        # It may have been forgotten since, as one that holds nothing.
        store.bind(namespace, facts.shard_bytes, facts.spans)
        found = count_leading(store, namespace, keys)
        name, known = os.urandom(_NAME_BYTES), _Known(found, total)
        if found == total:
            self._end(name, known)
            return self._news(request.id, name, known)
        prefix = Prefix(
            namespace, facts.shard_bytes, facts.spans, tenant_of(request.tenant), keys, found
        )
        self._running[name] = known
        self._bytes += len(keys)
        if not tiers.begin_prefetch(prefix, lambda: self._ended(name, prefix)):
            self._leave(name, prefix)
            raise TierUnavailableError(f"the tiers take no question now: {tiers.check() or 'busy'}")
        return self._news(request.id, name, known)

    def _check_room(self, size_bytes: int) -> None:
        if len(self._running) >= RUNNING_MAX or self._bytes + size_bytes > RUNNING_MAX_BYTES:
            raise TierBusyError(
                f"{len(self._running)} prefetches run already: ask again when some are over"
            )

    def _ended(self, name: bytes, prefix: Prefix) -> None:
        known = self._leave(name, prefix)
        known.found = count_leading(self._node.store, prefix.namespace, prefix.keys)
        self._end(name, known)

    def _leave(self, name: bytes, prefix: Prefix) -> _Known:
        self._bytes -= len(prefix.keys)
        return self._running.pop(name)

    def _end(self, name: bytes, known: _Known) -> None:
        known.ended_s = self._node.clock.monotonic_s()
        self._over[name] = known
        while len(self._over) > KEPT_MAX:
            self._over.popitem(last=False)

    def _tell(self, _client: Client, request: AskPrefetch) -> Reply:
        name = request.prefetch
        now_s = self._node.clock.monotonic_s()
        while self._over:
            oldest = next(iter(self._over.values()))
            assert oldest.ended_s is not None
            if now_s - oldest.ended_s < KEPT_S:
                break
            self._over.popitem(last=False)
        known = self._running.get(name) or self._over.get(name)
        return PrefetchNews(request.id) if known is None else self._news(request.id, name, known)

    def _news(self, request_id: int, name: bytes, known: _Known) -> PrefetchNews:
        is_over = known.ended_s is not None
        return PrefetchNews(request_id, name, is_over, known.found, known.total)


def _count(keys: bytes, *, groups: int) -> int:
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not count:
        raise MalformedError(f"{len(keys)} bytes are no list of keys")
    if count * groups > KEYS_MAX:
        raise LimitError(f"{count} keys in one request: send at most {KEYS_MAX // groups}")
    return count
