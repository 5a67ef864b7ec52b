"""Deletion of chunks by their keys, in memory and in every tier behind it.

What is in use in memory stays, there and behind it, unless it is forced. The reply waits for the
tiers, so that a chunk that is said to be deleted cannot be found any more. Used by `requests`, on
the control loop.
"""

from collections.abc import Callable
from typing import Any

from kvcellar.errors import ConfigError, LimitError, MalformedError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import Delete, Deleted, Reply, Role
from kvcellar.server.instances import Client
from kvcellar.server.node import Node
from kvcellar.store.departures import Reason
from kvcellar.store.inspection import Deletion, delete_chunk
from kvcellar.telemetry.logs import EventLog

__all__ = ["Deletions"]

_TIERS = frozenset({"l1", "l2", "all"})

_log = EventLog("kvcellar.server")


class Deletions:
    """Answers `delete`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # Any: each method takes its own message; the table pairs them.
    def table(self) -> dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply | None]]]:
        """Return who may ask what, and who answers it."""
        return {Delete: (frozenset({Role.TOOL}), self._delete)}

    def _delete(self, client: Client, request: Delete) -> Reply | None:
        keys = _keys(request)
        store, tiers = self._node.store, self._node.tiers
        if request.tier == "l2" and tiers is None:
            raise ConfigError("tier: there is none behind memory; leave the field out")
        store.catalog.departures.now_s = self._node.clock.monotonic_s()
        states = dict.fromkeys(keys, Deletion.ABSENT)
        if request.tier != "l2":
            states = {key: delete_chunk(store, key, force=request.force) for key in states}
        if tiers is None or request.tier == "l1":
            return self._answer(client, request, keys, states)
        asked = [key for key, state in states.items() if state != Deletion.IN_USE]
        connection = client.connection

        def done(behind: bytes) -> None:
            for key, state in zip(asked, behind, strict=True):
                if state and not states[key]:
                    store.catalog.departures.note(key, Reason.DELETED)
                states[key] = Deletion.UNSURE if state == _MAY_BE_KEPT else states[key] or state
            reply = self._answer(client, request, keys, states)
            if connection is not None and client.connection is connection:
                connection.push(reply)

        tiers.delete(asked, done)
        return None

    def _answer(
        self, client: Client, request: Delete, keys: list[bytes], states: dict[bytes, int]
    ) -> Reply:
        found = bytes(states[key] for key in keys)
        _log.info(
            "deleted by key",
            chunks=found.count(Deletion.DELETED),
            asked=len(keys),
            tier=request.tier,
            pid=client.hello.pid,
        )
        return Deleted(request.id, found)


_MAY_BE_KEPT = 2
"""See `protocol.tier_messages.Gone`."""


def _keys(request: Delete) -> list[bytes]:
    packed = request.keys
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise MalformedError(f"{len(packed)} bytes are no list of keys")
    if count > KEYS_MAX:
        raise LimitError(f"{count} keys in one request: send at most {KEYS_MAX}")
    if request.tier not in _TIERS:
        raise MalformedError(f"tier {request.tier[:32]!r} is none of {', '.join(sorted(_TIERS))}")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
