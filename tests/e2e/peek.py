"""Look into a running server's arena as one more engine of the node: read chunks, damage them.

It speaks the real protocol through the real client library and maps the real arena, so what it
reads is what an engine would load. It makes keys from tokens alone, in another process and with
other code around it than the engine that stored them, which is what keys promise.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from tests.e2e.cellar import Cellar

from kvcellar.client.handshake import open_session
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.client.session import Session
from kvcellar.clock import SystemClock
from kvcellar.keys.chain import ChunkChain
from kvcellar.keys.digest import KEY_BYTES, NamespaceId, request_seed
from kvcellar.layout.shard import PageRegion, ShardLayout
from kvcellar.protocol.messages import REF_BYTES, Bind, Goodbye, Lookup, Release, Role

__all__ = ["CHUNK_TOKENS", "Peek", "Place"]

CHUNK_TOKENS = 256
ANSWER_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where one shard of one chunk lies now, and the seal that its reader expects."""

    offset: int
    size_bytes: int
    seal: int


class Peek:
    """A client of role scheduler and one of role worker, in this process; use it with `with`."""

    def __init__(self, cellar: Cellar, *, shard_bytes: Sequence[int]) -> None:
        """Connect and take the one namespace that the server's engines are bound to.

        Args:
            cellar: the server; an engine is connected to it.
            shard_bytes: bytes of each rank's shard of a chunk.
        """
        self._shard_bytes = tuple(shard_bytes)
        self._namespace = _only_namespace(cellar)
        ranks = len(self._shard_bytes)
        name = f"peek-{os.urandom(4).hex()}"
        region = PageRegion("peek", self._shard_bytes[0])
        layout = ShardLayout(0, CHUNK_TOKENS, (region,), "peek")
        self._worker = _connect(
            cellar, Identity(Role.WORKER, name, "peek", world_size=ranks, layouts=(layout,))
        )
        self._scheduler = _connect(cellar, Identity(Role.SCHEDULER, name, "peek", world_size=ranks))
        self._scheduler.call(
            lambda id_: Bind(id_, self._namespace, CHUNK_TOKENS, self._shard_bytes),
            timeout_s=ANSWER_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for session in (self._scheduler, self._worker):
            session.call(Goodbye, timeout_s=ANSWER_S)
            session.close()
        self._worker.arena.close()

    def keys(self, tokens: Sequence[int], *, salt: str | None = None) -> list[bytes]:
        """Return the keys of the full chunks of a prompt."""
        chain = ChunkChain(
            request_seed(self._namespace, adapter=None, cache_salt=salt),
            chunk_tokens=CHUNK_TOKENS,
        )
        chain.extend(tokens, token_count=len(tokens))
        return [bytes(chain.key(index)) for index in range(chain.count)]

    def find(self, keys: Sequence[bytes]) -> list[tuple[Place, ...]]:
        """Return the places of the leading chunks that are stored, one for each shard.

        The lease is given back at once, so only what nobody evicts meanwhile stays there.
        """
        assert all(len(key) == KEY_BYTES for key in keys)
        reply = self._scheduler.call(lambda id_: Lookup(id_, b"".join(keys)), timeout_s=ANSWER_S)
        if reply.lease:
            self._scheduler.call(lambda id_: Release(id_, (reply.lease,)), timeout_s=ANSWER_S)
        ranks = len(self._shard_bytes)
        assert len(reply.refs) == reply.count * ranks * REF_BYTES
        places = [
            Place(offset, self._shard_bytes[index % ranks], seal)
            for index, (offset, seal) in enumerate(struct.iter_unpack("<QQ", reply.refs))
        ]
        return [tuple(places[at : at + ranks]) for at in range(0, len(places), ranks)]

    def chunks(self, tokens: Sequence[int], *, salt: str | None = None) -> dict[bytes, bytes]:
        """Return the stored chunks of a prompt: key to the bytes of all its shards."""
        keys = self.keys(tokens, salt=salt)
        found = self.find(keys)
        return {
            key: b"".join(self.read(place) for place in places)
            for key, places in zip(keys, found, strict=False)
        }

    def stored(self, sequences: Iterable[Sequence[int]]) -> dict[bytes, bytes]:
        """Return all stored chunks of some token sequences, also those behind a gap."""
        found = {}
        for tokens in sequences:
            for key in self.keys(tokens):
                for places in self.find([key]):
                    found[key] = b"".join(self.read(place) for place in places)
        return found

    def read(self, place: Place) -> bytes:
        """Return the bytes of one shard."""
        return bytes(self._slot(place))

    def write(self, place: Place, data: bytes) -> None:
        """Overwrite the bytes of one shard behind everybody's back."""
        self._slot(place)[:] = data

    def flip_bit(self, place: Place, bit: int) -> None:
        """Flip one bit of a shard, counted from its first byte's lowest bit."""
        self._slot(place)[bit // 8] ^= 1 << bit % 8

    def _slot(self, place: Place) -> memoryview:
        arena = self._worker.arena
        assert arena is not None
        return arena.view[place.offset : place.offset + place.size_bytes]


def _connect(cellar: Cellar, identity: Identity) -> Session:
    options = ClientOptions(host="127.0.0.1", port=cellar.port)
    return open_session(options, identity, client_id=os.urandom(16), clock=SystemClock())


def _only_namespace(cellar: Cellar) -> NamespaceId:
    instances = cellar.status()["kvcellar"]["instances"]
    namespaces = {instance["namespace"] for instance in instances if instance["namespace"]}
    assert len(namespaces) == 1, instances
    namespace = bytes.fromhex(namespaces.pop())
    assert len(namespace) == KEY_BYTES, namespace
    return NamespaceId(namespace)
