"""The namespaces that the store knows, and what it takes to become one.

A namespace is bound before its first lookup, with the sizes of its shards, so that a model whose
chunks can never be stored is refused at start, with both sizes, and not by a cache that stays
empty. Asked by the store with every request.
"""

from collections.abc import Iterator

from kvcellar.errors import LimitError, MalformedError, MismatchError, NotRegisteredError
from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.memory.slots import SlotAllocator
from kvcellar.protocol.limits import GROUPS_MAX, KEYS_MAX, WORLD_SIZE_MAX
from kvcellar.store.entries import Group, Namespace
from kvcellar.store.limits import StoreLimits
from kvcellar.units import format_bytes

__all__ = ["Namespaces"]


class Namespaces:
    """All bound namespaces, by their 32 bytes."""

    def __init__(self, allocator: SlotAllocator, limits: StoreLimits) -> None:
        self._allocator = allocator
        self._limits = limits
        self._known: dict[bytes, Namespace] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, identity: NamespaceId) -> Namespace | None:
        """Return a namespace, None if it is not bound."""
        return self._known.get(identity)

    def bound(self, identity: NamespaceId) -> Namespace:
        """Return a namespace.

        Raises:
            NotRegisteredError: it is not bound.
        """
        space = self._known.get(identity)
        if space is None:
            raise NotRegisteredError(f"namespace {identity.hex()[:16]} is not known: bind it first")
        return space

    def bind(
        self, identity: NamespaceId, shard_bytes: tuple[int, ...], spans: tuple[int, ...]
    ) -> None:
        """Make a namespace known; see `Store.bind`."""
        known = self._known.get(identity)
        if known is None:
            groups = tuple(self._groups(identity, shard_bytes, spans))
            if len(self._known) >= self._limits.namespaces_max:
                self._forget_empty()
            self._known[identity] = Namespace(identity, groups)
            return
        sizes = tuple(size for group in known.groups for size in group.shard_bytes)
        if (sizes, tuple(group.span for group in known.groups)) != (shard_bytes, spans):
            raise MismatchError(
                f"namespace {identity.hex()[:16]} is known with shards of {sizes} bytes in "
                f"{len(known.groups)} KV groups, not {shard_bytes} in {len(spans)}: both instances "
                "must run the same model the same way"
            )

    def _groups(
        self, identity: NamespaceId, shard_bytes: tuple[int, ...], spans: tuple[int, ...]
    ) -> Iterator[Group]:
        count, rest = divmod(len(shard_bytes), len(spans) or 1)
        if len(identity) != KEY_BYTES or rest or not 1 <= count <= WORLD_SIZE_MAX:
            raise MalformedError(
                f"bind of a namespace of {len(identity)} bytes with {len(shard_bytes)} shards in "
                f"{len(spans)} KV groups: it has {KEY_BYTES} bytes and, in each group, as many "
                f"shards from 1 to {WORLD_SIZE_MAX}"
            )
        if not 1 <= len(spans) <= GROUPS_MAX or max(map(abs, spans)) > KEYS_MAX:
            raise MalformedError(
                f"bind with spans {spans[:8]}: from 1 to {GROUPS_MAX}, none over {KEYS_MAX} chunks"
            )
        for at, span in zip(range(0, len(shard_bytes), count), spans, strict=True):
            sizes = shard_bytes[at : at + count]
            yield Group(identity, sizes, self._slots(sizes), span=span)

    def _slots(self, shard_bytes: tuple[int, ...]) -> tuple[int, ...]:
        if min(shard_bytes) < 1:
            raise MalformedError(f"bind with shards of {shard_bytes} bytes: each has at least 1")
        slots = tuple(self._allocator.slot_bytes(size) for size in shard_bytes)
        step_bytes = self._allocator.step_bytes
        if max(slots) > step_bytes:
            raise LimitError(
                f"a rank's shard of a chunk takes {format_bytes(max(slots))}, more than a growth "
                f"step of the arena ({format_bytes(step_bytes)}): lower --chunk-size or raise "
                "--l1-size-gb"
            )
        arena_bytes = self._limits.arena_bytes
        if arena_bytes is not None and sum(slots) > arena_bytes:
            raise LimitError(
                f"a chunk takes {format_bytes(sum(slots))} over all ranks, more than the arena "
                f"({format_bytes(arena_bytes)}): raise --l1-size-gb or lower --chunk-size"
            )
        return slots

    def _forget_empty(self) -> None:
        # Each reset of a cache makes a new namespace. Forgetting one without entries costs its
        # instance a new bind, if it is still in use.
        for identity, space in list(self._known.items()):
            if not any(group.entries for group in space.groups):
                del self._known[identity]
        if len(self._known) >= self._limits.namespaces_max:
            raise LimitError(
                f"{len(self._known)} namespaces hold chunks, as many as there may be: clear the "
                "cache"
            )
