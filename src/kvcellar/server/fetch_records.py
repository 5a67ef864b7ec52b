"""What a fetch is made of while it runs: its own record, a batch that is being read, who waits.

Kept by `fetches`, which says what each of them means.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.server.fetch_legs import Leg, Legs
from kvcellar.server.instances import Client, Connection
from kvcellar.store.entries import OwnerId

__all__ = ["Batch", "Fetch", "Later", "Prefix", "Waiter"]


class Later(Protocol):
    """Something that was put off, as `loop.call_later` returns it."""

    def cancel(self) -> None:
        """Do not do it."""
        ...


class Prefix(NamedTuple):
    """Chunks that a prefetch is to bring.

    Attributes:
        namespace: a bound one.
        shard_bytes: see `Bind.shard_bytes`.
        spans: see `Bind.spans`.
        tenant: on whose account the chunks go.
        keys: 32 bytes a chunk, in prefix order, KV group after KV group.
        found: leading chunks that are in the arena.
    """

    namespace: NamespaceId
    shard_bytes: tuple[int, ...]
    spans: tuple[int, ...]
    tenant: str
    keys: bytes
    found: int


@dataclass(eq=False, slots=True)
class Waiter:
    """Whoever wants to know what a fetch came to."""

    connection: Connection
    request_id: int
    alarm: Later | None = None


@dataclass(eq=False, slots=True)
class Fetch:
    """One fetch.

    Attributes:
        handle: its name on the wire.
        client: for whom; None for a prefetch.
        namespace: of the keys.
        legs: what is left to ask for.
        tenant: on whose account the chunks go.
        leg: what is being asked for; places are those of its keys.
        found: leading chunks that the lookup found.
        owner: the life of the tier process that it belongs to.
        at: the next chunk to ask for.
        end: so far it will get.
        runs: (end, tier): which tier has the chunks before `end`.
        out: batches that are being read.
        came: keys that became visible.
        waiters: see there.
        is_reading: it counts towards the fetches in flight.
        is_over: nothing more will come.
        on_end: is called then.
    """

    handle: int
    client: Client | None
    namespace: NamespaceId
    legs: Legs
    tenant: str
    leg: Leg
    found: int
    owner: OwnerId
    began_s: float
    at: int = 0
    end: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    out: int = 0
    came: list[bytes] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    is_reading: bool = False
    is_over: bool = False
    on_end: Callable[[], None] | None = None

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """The bytes of each shard of a chunk of the leg."""
        return self.legs.sizes(self.leg)

    def key(self, index: int) -> bytes:
        """Return the leg's key at a place, from 0."""
        return self.leg.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


@dataclass(eq=False, slots=True)
class Batch:
    """Chunks that are being read together.

    Attributes:
        fetch: whose.
        reservation: holds their slots.
        places: which chunks of the fetch, in order.
        followers: fetches that want the same chunks.
        is_void: some of them were deleted meanwhile.
    """

    fetch: Fetch
    reservation: int
    places: list[int]
    followers: list[Fetch] = field(default_factory=list)
    is_void: bool = False
