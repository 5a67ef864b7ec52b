"""Stands in for an engine: both halves of an instance over the real client library.

It stores chunks of any size and looks them up, as a connector would, without an engine. The
measurements of lookups and of the server's memory use it, and so does the load in the background.
"""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvcellar import __version__
from kvcellar.bench.programs import BenchError, pause
from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.layout.shard import PageRegion, ShardLayout
from kvcellar.protocol.messages import (
    OFFSET_BYTES,
    Bind,
    ChunkState,
    Commit,
    CommitReply,
    Heartbeat,
    HeartbeatReply,
    Lookup,
    LookupReply,
    Release,
    Reply,
    Reserve,
    ReserveReply,
    Role,
)

__all__ = ["StandIn", "random_keys"]

_CHUNK_TOKENS = 256
_WAIT_S = 10.0
_GROWTH_S = 30.0
_PRESENT_OR_RESERVED = {ChunkState.PRESENT, ChunkState.RESERVED}

FillSlots = Callable[[memoryview, list[int]], bytes]
"""Writes the slots at these offsets of the arena and returns their seals, 8 bytes each."""


def random_keys(count: int) -> bytes:
    """Return keys that no other run uses."""
    return os.urandom(KEY_BYTES * count)


class StandIn:
    """One instance with one rank."""

    def __init__(self, port: int, *, name: str, shard_bytes: int) -> None:
        """Connect and bind a namespace of its own.

        Args:
            port: of a server on this host.
            name: of the instance.
            shard_bytes: of each chunk.
        """
        clock = SystemClock()
        options = ClientOptions(host="127.0.0.1", port=port)
        software = f"kvcellar {__version__} bench"
        layout = ShardLayout(0, _CHUNK_TOKENS, (PageRegion("all", shard_bytes),), "bench")
        self._kept: list[int] = []
        self._worker = Link(
            options, Identity(Role.WORKER, name, software, layouts=(layout,)), clock=clock
        )
        self._scheduler = Link(
            options,
            Identity(Role.SCHEDULER, name, software),
            clock=clock,
            held=lambda: (tuple(self._kept), ()),
        )
        self._worker.start()
        self._scheduler.start()
        self.worker = self._worker.wait_ready(_WAIT_S)
        self.scheduler = self._scheduler.wait_ready(_WAIT_S)
        namespace = os.urandom(KEY_BYTES)
        self.scheduler.call(
            lambda i: Bind(i, namespace, _CHUNK_TOKENS, (shard_bytes,)), timeout_s=_WAIT_S
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scheduler.close()
        self._worker.close()

    def wait_for_memory(self, size_bytes: int) -> None:
        """Wait until the arena has so many bytes; a store before that would be refused.

        Raises:
            BenchError: it does not grow that far.
        """
        step_bytes = self.scheduler.welcome.step_bytes
        for _ in range(int(_GROWTH_S / 0.05)):
            reply = self.scheduler.call(
                lambda i: Heartbeat(i, tuple(self._kept), (), 0), timeout_s=_WAIT_S
            )
            assert isinstance(reply, HeartbeatReply), reply
            if reply.steps_ready * step_bytes >= size_bytes:
                return
            pause(0.05)
        raise BenchError(f"the arena has not grown to {size_bytes} bytes in {_GROWTH_S:g} s")

    def store(self, keys: bytes, *, parent: bytes = b"", fill: FillSlots | None = None) -> int:
        """Store consecutive chunks and return how many were new.

        Args:
            keys: theirs.
            parent: key of the chunk before them.
            fill: writes the slots; without it they keep whatever is in them.

        Raises:
            BenchError: there was no room for all of them.
        """
        reply = self.scheduler.call(lambda i: Reserve(i, keys, parent), timeout_s=_WAIT_S)
        assert isinstance(reply, ReserveReply), reply
        if not set(reply.states) <= _PRESENT_OR_RESERVED:
            raise BenchError("the arena has no room for what the benchmark stores")
        offsets = [
            int.from_bytes(reply.offsets[at : at + OFFSET_BYTES], "little")
            for at in range(0, len(reply.offsets), OFFSET_BYTES)
        ]
        if not offsets:
            return 0
        if fill is None:
            seals = bytes(OFFSET_BYTES * len(offsets))
        else:
            assert self.worker.arena is not None
            seals = fill(self.worker.arena.view, offsets)
        committed = self.worker.call(
            lambda i: Commit(i, reply.reservation, 0, seals, 0.0), timeout_s=_WAIT_S
        )
        assert isinstance(committed, CommitReply), committed
        return len(offsets)

    def lookup(self, keys: bytes) -> LookupReply:
        """Look up a prefix; the lease is the caller's to release."""
        reply = self.scheduler.call(lambda i: Lookup(i, keys), timeout_s=_WAIT_S)
        assert isinstance(reply, LookupReply), reply
        return reply

    def release(self, lease: int) -> None:
        """Give a lease back."""
        self.scheduler.call(lambda i: Release(i, (lease,)), timeout_s=_WAIT_S)

    def keep(self, keys: bytes) -> None:
        """Hold a lease on a prefix for as long as this lives, so that nothing evicts it."""

        def note(reply: Reply) -> None:
            assert isinstance(reply, LookupReply), reply
            self._kept.append(reply.lease)

        # Noted before the reply counts as seen, or a heartbeat of this moment would end the lease.
        self.scheduler.call(lambda i: Lookup(i, keys), timeout_s=_WAIT_S, record=note)
