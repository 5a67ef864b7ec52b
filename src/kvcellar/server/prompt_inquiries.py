"""Why a prompt would not hit that nobody has sent: asked with its keys and its sketch.

It is explained as a lookup that had just been made is, from what memory and the tiers have of it
now. Nothing is fetched, remembered or counted for it, but that the tiers take what they find for
used. Used by `requests`, on the control loop.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kvcellar.errors import LimitError, MalformedError, NotRegisteredError
from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.keys.groups import group_keys
from kvcellar.protocol.limits import KEYS_MAX, SKETCH_MAX_BYTES
from kvcellar.protocol.messages import Explained, ExplainPrompt, Reply, Role
from kvcellar.protocol.tier_messages import Find, Found, TierAnswer
from kvcellar.server.instances import Client
from kvcellar.server.misses import Explainer
from kvcellar.server.node import Node
from kvcellar.server.recent import LookupRecord, NamespaceFacts
from kvcellar.store.inspection import count_leading

__all__ = ["PromptInquiries"]

_SALT_BYTES = 8


class PromptInquiries:
    """Answers `explain_prompt`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._explainer = Explainer(node.recent, node.store.catalog.departures)

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply | None]]]:
        """Return who may ask what, and who answers it."""
        return {ExplainPrompt: (frozenset({Role.TOOL}), self._explain)}

    def _explain(self, client: Client, request: ExplainPrompt) -> Reply | None:
        _check(request)
        facts, tiers = self._node.recent.namespace(request.namespace), self._node.tiers
        if facts is None:
            raise NotRegisteredError("no engine has bound this namespace since the server's start")
        connection, groups = client.connection, range(len(facts.spans))
        every = b"".join([group_keys(request.keys, group) for group in groups])
        in_memory = count_leading(self._node.store, NamespaceId(request.namespace), every)
        # Of several KV groups one that needs all chunks says how far the tiers reach.
        keys = group_keys(request.keys, facts.spans.index(0) if 0 in facts.spans else 0)

        def found(answer: TierAnswer | None) -> None:
            runs = answer.runs if isinstance(answer, Found) else ()
            in_tiers = sum(run.count for run in runs)
            reply = self._conclude(request, facts, in_memory, in_tiers)
            if connection is not None and client.connection is connection:
                connection.push(reply)

        is_whole = in_memory * KEY_BYTES == len(keys)
        if not is_whole and tiers and tiers.ask(lambda id_: Find(id_, keys, in_memory), found):
            return None
        return self._conclude(request, facts, in_memory, 0)

    def _conclude(
        self, request: ExplainPrompt, facts: NamespaceFacts, in_memory: int, in_tiers: int
    ) -> Explained:
        node, now_s = self._node, self._node.clock.monotonic_s()
        found, count = in_memory + in_tiers, len(request.keys) // KEY_BYTES
        missing = request.keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
        wrong = node.parts() | node.degraded()
        record = LookupRecord(
            when_s=now_s,
            instance=facts.instance,
            namespace=request.namespace,
            request="",
            outcome="answered" if count else "short",
            tokens=request.tokens,
            keys=count,
            found=found,
            missing=missing,
            salt=request.salt,
            adapter=b"",
            items=b"",
            item_start=-1,
            unit_tokens=request.unit_tokens,
            sketch=request.sketch,
            is_written=missing in node.store.catalog.writers,
            broken=tuple(f"{name}: {text}" for name, text in wrong.items() if text),
        )
        miss = msgspec.to_builtins(self._explainer.explain(record, now_s=now_s))
        miss["evidence"] |= {
            "memory_tokens": in_memory * facts.chunk_tokens,
            "tier_tokens": in_tiers * facts.chunk_tokens,
        }
        return Explained(request.id, (miss,))


def _check(request: ExplainPrompt) -> None:
    count, rest = divmod(len(request.keys), KEY_BYTES)
    if rest:
        raise MalformedError(f"{len(request.keys)} bytes are no list of keys")
    if count > KEYS_MAX:
        raise LimitError(f"{count} keys in one request: send at most {KEYS_MAX}")
    if len(request.salt) > _SALT_BYTES:
        raise MalformedError(f"salt has more than {_SALT_BYTES} bytes")
    if len(request.sketch) > SKETCH_MAX_BYTES or len(request.sketch) % 4:
        raise MalformedError(f"sketch has {len(request.sketch)} bytes")
    if request.unit_tokens < 1 or request.tokens < 0:
        raise MalformedError("unit_tokens or tokens make no sense")
