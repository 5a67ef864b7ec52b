"""What requests mean to the tiers: wait for a fetch, begin one, write behind, remove, wipe.

Apart from `requests`, which engines without tiers are served by as well: there each of these is
one comparison. Replies that come later go over the connection that the request came over.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcellar.errors import MalformedError
from kvcellar.keys.digest import NamespaceId
from kvcellar.protocol.messages import AwaitFetch, Clear, Cleared, LookupReply, Reply, Role
from kvcellar.server.instances import Client
from kvcellar.server.node import Node

__all__ = ["TierRequests"]


class TierRequests:
    """Answers what is about tiers; without any, as if they held nothing."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> Mapping[type, tuple[frozenset[str], Callable[[Client, Any], Reply | None]]]:
        """Return who may ask what, and who answers it."""
        return {AwaitFetch: (frozenset({Role.SCHEDULER}), self._await_fetch)}

    def clear(self, client: Client, request: Clear, cleared: Cleared) -> Reply | None:
        """Return the reply to a clear that has emptied the arena; None: it comes later."""
        tiers = self._node.tiers
        if tiers is None or not request.tiers:
            return cleared
        connection = client.connection

        def done(chunks: int) -> None:
            reply = Cleared(request.id, cleared.chunks, cleared.size_bytes, chunks)
            if connection is not None and client.connection is connection:
                connection.push(reply)

        tiers.wipe(NamespaceId(request.namespace) if request.namespace else None, done)
        return None

    def _await_fetch(self, client: Client, request: AwaitFetch) -> Reply | None:
        if not 0.0 <= request.wait_s < float("inf"):
            raise MalformedError(f"wait_s {request.wait_s} is no number of seconds")
        if self._node.tiers is None:
            return LookupReply(request.id, 0, 0, b"")
        return self._node.tiers.fetches.wait(client, request)
