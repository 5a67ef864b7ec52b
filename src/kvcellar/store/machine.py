"""The store: one pure state machine that knows every chunk, who reads it and who writes it.

Calls go in, values come out; times are arguments, and no call waits. The server translates
messages into calls and the kernel's reports of deaths into `owner_died`. Because nothing in here
can be interleaved, every interleaving of clients is an order of calls, and the tests try them by
the thousand with `invariants.check` after each. What is expected (a miss, a full arena, a writer
that was second) is a value; errors are for clients that break the protocol.
"""

from collections.abc import Collection, Iterable

from kvcellar.errors import MalformedError, NotRegisteredError
from kvcellar.keys.digest import NamespaceId
from kvcellar.memory.slots import SlotAllocator
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES, ChunkState, CommitOutcome
from kvcellar.store.catalog import Catalog
from kvcellar.store.departures import Reason
from kvcellar.store.entries import Group, Namespace, OwnerId
from kvcellar.store.holdings import Holdings
from kvcellar.store.leases import Lease
from kvcellar.store.limits import StoreLimits
from kvcellar.store.namespaces import Namespaces
from kvcellar.store.policies import EvictionPolicy
from kvcellar.store.reservations import PendingChunk, Reservation
from kvcellar.store.room import Room
from kvcellar.store.search import find_reach
from kvcellar.store.statistics import StoreStatistics
from kvcellar.store.wire import (
    SEAL_BYTES,
    Hit,
    Reserved,
    check_reserve,
    count_chunks,
    count_keys,
    join_refs,
    read_places,
)

__all__ = ["Hit", "Reserved", "Store"]


class Store:
    """Everything that a node's server knows of its chunks. Not thread-safe: one loop owns it.

    Attributes:
        epoch: rises with every clear.
        catalog: the chunks; for the invariants.
        leases: the read leases; for the invariants.
        reservations: the unfinished reservations; for the invariants.
        room: makes room before it is asked for.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        policy: EvictionPolicy,
        *,
        limits: StoreLimits | None = None,
    ) -> None:
        limits = limits or StoreLimits()
        self.epoch = 0
        self.catalog = Catalog(allocator, policy)
        self.leases: Holdings[Lease] = Holdings()
        self.reservations: Holdings[Reservation] = Holdings()
        self._limits = limits
        self._allocator = allocator
        self._namespaces = Namespaces(allocator, limits)
        self._counters = StoreStatistics()
        self.room = Room(
            self.catalog, self._counters, leases=self.leases, reservations=self.reservations
        )
        self._tick = 0

    @property
    def statistics(self) -> StoreStatistics:
        """Return the counters, with the gauges brought up to now; the store keeps the object."""
        counters = self._counters
        counters.leases = len(self.leases)
        counters.reservations = len(self.reservations)
        counters.chunks = self.catalog.chunks
        counters.objects = self.catalog.objects
        counters.namespaces = len(self._namespaces)
        counters.used_bytes = self._allocator.used_bytes
        counters.total_bytes = self._allocator.total_bytes
        return counters

    def add_step(self, offset: int, size_bytes: int) -> None:
        """Take in a growth step of the arena whose memory is there."""
        self._allocator.add_step(offset, size_bytes)
        self.room.steps.add(offset, size_bytes)
        self.catalog.shares.capacity_bytes += size_bytes

    def shrink(self, tenant: str) -> bool:
        """Evict some chunks of a tenant that holds more than its quota, which was lowered.

        Returns:
            Whether more of them can leave; call again then.
        """
        shares, before = self.catalog.shares, self._counters.evicted
        self.room.shrink(shares.tenant(tenant))
        return self._counters.evicted > before and shares.over_bytes(shares.tenant(tenant)) > 0

    def bind(
        self,
        namespace: NamespaceId,
        shard_bytes: tuple[int, ...],
        spans: tuple[int, ...] = (0,),
    ) -> None:
        """Make a namespace known; several instances may bind the same one.

        Args:
            namespace: 32 bytes.
            shard_bytes: bytes of each rank's shard of a chunk, in rank order, one KV group after
                the other.
            spans: for each KV group what a hit needs of it, see `Group.span`.

        Raises:
            MismatchError: it is known with other sizes.
            LimitError: such chunks can never be stored, or there are too many namespaces.
            MalformedError: the arguments are no namespace.
        """
        self._namespaces.bind(namespace, shard_bytes, spans)

    def namespace(self, identity: NamespaceId) -> Namespace | None:
        """Return what a namespace is made of, None where it is not bound."""
        return self._namespaces.get(identity)

    def lookup(self, owner: OwnerId, namespace: NamespaceId, keys: bytes, *, request: int) -> Hit:
        """Return the longest prefix that can be hit; what it needs is leased to `owner`.

        Args:
            owner: who asks.
            namespace: a bound one.
            keys: `KEY_BYTES` each, in prefix order, group after group, at most `KEYS_MAX`.
            request: id of the request, for heartbeats.

        Raises:
            NotRegisteredError: the namespace is not bound.
            MalformedError: `keys` is no list of keys.
            LimitError: there are too many of them.
        """
        space = self._namespaces.bound(namespace)
        counters = self._counters
        count = count_chunks(keys, groups=len(space.groups))
        counters.lookups += 1
        counters.chunks_asked += count
        if self.leases.count_of(owner) >= self._limits.leases_max:
            counters.lookups_refused += 1
            return Hit(0, 0, b"")
        self._tick = tick = self._tick + 1
        end, found = find_reach(self.catalog.entries, space.groups, keys, count=count)
        if not found:
            return Hit(0, 0, b"")
        for entry in found:
            entry.leases += 1
            entry.tick = tick
        counters.chunks_hit += end
        counters.leased_chunks += len(found)
        self.catalog.shares.touch(found[-1].tenant)
        refs = b"".join([entry.refs for entry in found])
        return Hit(end, self.leases.add(owner, Lease(request, found)), refs)

    def release(self, owner: OwnerId, leases: Iterable[int]) -> None:
        """End read leases; unknown ones and those of others are ignored."""
        for handle in leases:
            self._end_lease(owner, handle)

    def keep(
        self,
        owner: OwnerId,
        *,
        leases: Collection[int],
        reservations: Collection[int],
        seen: int,
    ) -> None:
        """End what a heartbeat does not list.

        A scheduler half lists a reservation until each rank has told it that its copy has ended,
        so the slots of one that is not listed are free at once.

        Args:
            owner: who sent it.
            leases: the handles of read leases that it uses.
            reservations: the handles of its reservations that are not done.
            seen: what a request with a higher id granted is spared: its reply may be on the way.
        """
        for handle in self.leases.unlisted(owner, leases, seen=seen):
            self._end_lease(owner, handle)
        for handle in self.reservations.unlisted(owner, reservations, seen=seen):
            held = self.reservations.get(handle)
            assert held is not None, handle
            held.out.clear()
            self._void(held)
            self._advance(held)

    def reserve(  # noqa: PLR0913 - the fields of one message, its sender and the time
        self,
        owner: OwnerId,
        namespace: NamespaceId,
        keys: bytes,
        *,
        parent: bytes,
        writers: tuple[OwnerId, ...],
        now_s: float,
        request: int,
        tenant: str = "",
        groups: bytes = b"",
    ) -> Reserved:
        """Reserve slots for all shards of the chunks that are new, as far as they fit.

        Args:
            owner: the scheduler half that asks.
            namespace: a bound one.
            keys: `KEY_BYTES` each, consecutive chunks in prefix order, at most `KEYS_MAX`.
            parent: key of the chunk before the first, for each KV group with span 0; or empty.
            writers: the living owner of each rank, in rank order.
            now_s: the time now, in seconds that never go back.
            request: id of the request, for heartbeats.
            tenant: on whose account the slots go.
            groups: the KV group of each key, a byte each; empty where all are of the first.

        Returns:
            A handle (0 if nothing was reserved), a `ChunkState` for each key, and `OFFSET_BYTES`
            for each shard of each RESERVED chunk.

        Raises:
            NotRegisteredError: the namespace is not bound.
            MismatchError: the instance has not one rank for each shard.
            MalformedError: `keys` or `parent` are no keys.
            LimitError: there are too many of them.
        """
        space = self._namespaces.bound(namespace)
        count = count_keys(keys)
        check_reserve(space, parent=parent, writers=writers, groups=groups, count=count)
        self._tick += 1
        self.catalog.departures.now_s = now_s
        pending = Reservation(
            owner,
            space,
            tenant=self.catalog.shares.tenant(tenant),
            writers=writers,
            reserved_s=now_s,
            request=request,
        )
        states = self._reserve_chunks(pending, keys, parent=parent, groups=groups)
        # A chunk behind a hole could not be found, so nothing after the first FULL is stored.
        self._counters.refused_full += count - len(states)
        states.extend([ChunkState.FULL] * (count - len(states)))
        if not pending.chunks:
            return Reserved(0, bytes(states), b"")
        self._counters.reserved += len(pending.chunks)
        self._counters.reserved_chunks += len(pending.chunks)
        pending.handle = self.reservations.add(owner, pending)
        offsets = b"".join([chunk.offsets for chunk in pending.chunks])
        return Reserved(pending.handle, bytes(states), offsets)

    def commit(self, owner: OwnerId, reservation: int, shard: int, seals: bytes) -> int:
        """Note that a rank has written its shard of every reserved chunk.

        The chunks are visible when the last rank has committed, all at once. Of two writers of a
        chunk the first to be complete is kept. A commit that comes twice changes nothing.

        Args:
            owner: the rank's worker half.
            reservation: the handle.
            shard: the rank.
            seals: uint64 little-endian for each reserved chunk, in order.

        Returns:
            A `CommitOutcome`; VISIBLE if at least one chunk became visible now.

        Raises:
            NotRegisteredError: the reservation is over, or never was.
            MalformedError: the shard is not this owner's, or the number of seals is wrong.
        """
        held = self._writing(owner, reservation, shard)
        if len(seals) != len(held.chunks) * SEAL_BYTES:
            raise MalformedError(
                f"commit of reservation {reservation}: {len(seals)} bytes of seals for "
                f"{len(held.chunks)} chunks: send {SEAL_BYTES} bytes for each"
            )
        if shard in held.out:
            held.out.discard(shard)
            held.seals[shard] = seals
        return self._advance(held)

    def abort(self, owner: OwnerId, reservation: int, shard: int) -> int:
        """Note that a rank will not write its shards and no longer touches their slots.

        Returns:
            DROPPED, always.

        Raises:
            NotRegisteredError: the reservation is over, or never was.
            MalformedError: the shard is not this owner's.
        """
        held = self._writing(owner, reservation, shard)
        held.out.discard(shard)
        self._void(held)
        return self._advance(held)

    def cancel(self, owner: OwnerId, reservation: int) -> None:
        """Drop a reservation that its scheduler half never handed to a rank; unknown: ignored.

        Its slots are free at once, unless some rank has already said something about it: then the
        claim is wrong, and the slots wait for the other ranks as after a failure.
        """
        held = self.reservations.get(reservation)
        if held is None or held.owner != owner:
            return
        if len(held.out) == len(held.writers):
            held.out.clear()
        self._void(held)
        self._advance(held)

    def remove_damaged(self, key: bytes, shard: int, offset: int) -> bool:
        """Remove a chunk whose seal did not match, if it still lies where the reader found it.

        Returns:
            Whether it was removed; a newer copy elsewhere is left alone.
        """
        entry = self.catalog.entries.get(key)
        if entry is None or not entry.refs or not 0 <= shard < len(entry.group.shard_bytes):
            return False
        at = shard * REF_BYTES
        if int.from_bytes(entry.refs[at : at + OFFSET_BYTES], "little") != offset:
            return False
        self.catalog.vacate(entry)
        self.catalog.departures.note(key, Reason.DAMAGED)
        self._counters.damaged += 1
        return True

    def clear(self, namespace: NamespaceId | None) -> tuple[int, int]:
        """Forget all chunks of a namespace, or all there are, and make reservations of it void.

        Returns:
            How many chunks went and the bytes of their slots; leased slots are freed when their
            leases end.
        """
        self.epoch += 1
        self._counters.clears += 1
        space = None if namespace is None else self._namespaces.get(namespace)
        if namespace is not None and space is None:
            return 0, 0
        for held in self.reservations:
            if space is None or held.namespace is space:
                self._void(held)
        gone = [
            entry
            for entry in self.catalog.entries.values()
            if entry.refs and (space is None or entry.group in space.groups)
        ]
        for entry in gone:
            self.catalog.vacate(entry)
        self.catalog.departures.note_clear(namespace or b"")
        self._counters.cleared += len(gone)
        return len(gone), sum(entry.group.chunk_bytes for entry in gone)

    def reader_left(self, owner: OwnerId) -> None:
        """End the read leases of an owner whose connection is gone.

        Its reservations stay: it may live, and so may its copies. No reply is on the way any
        more, so its next heartbeat, over whatever connection, lists them or ends them.
        """
        self.release(owner, self.leases.handles_of(owner))
        for held in self.reservations:
            if held.owner == owner:
                held.request = 0

    def owner_died(self, owner: OwnerId) -> None:
        """End everything that an owner held; it touches no slot any more.

        What it reserved is void; what it was to write is void unless it had committed. Slots wait
        for the other ranks of the reservation.
        """
        self.reader_left(owner)
        for held in list(self.reservations):
            unwritten = {shard for shard in held.out if held.writers[shard] == owner}
            if unwritten or held.owner == owner:
                held.out -= unwritten
                self._void(held)
                self._advance(held)

    def _end_lease(self, owner: OwnerId, handle: int) -> None:
        lease = self.leases.remove(owner, handle)
        if lease is None:
            return
        self._counters.leased_chunks -= len(lease.entries)
        for entry in lease.entries:
            entry.leases -= 1
            if not entry.leases and not entry.children:
                self.catalog.end_last_lease(entry)

    def _reserve_chunks(
        self, pending: Reservation, keys: bytes, *, parent: bytes, groups: bytes
    ) -> bytearray:
        """Return the states of the leading chunks, up to the first that is FULL."""
        states = bytearray()
        if self.reservations.count_of(pending.owner) >= self._limits.reservations_max:
            return states
        for key, group, above in read_places(pending.namespace, keys, parent, groups):
            state = self._reserve_chunk(pending, key, group, parent=above)
            if state == ChunkState.FULL:
                break
            states.append(state)
        return states

    def _reserve_chunk(
        self, pending: Reservation, key: bytes, group: Group, *, parent: bytes
    ) -> int:
        catalog = self.catalog
        entry = catalog.entries.get(key)
        if entry is not None:
            if entry.refs and entry.group is group:
                entry.tick = self._tick
                return ChunkState.PRESENT
            if not pending.may_write(entry, group):
                # A key names its namespace and tenant, so only a client that lies comes here.
                return ChunkState.BUSY
        writers = catalog.writers.get(key)
        if writers:
            age_s = pending.reserved_s - writers[-1].reserved_s
            if age_s < self._limits.writer_alone_s:
                self._counters.busy += 1
                return ChunkState.BUSY
        is_second = bool(writers)
        entry = catalog.link(key, group, parent=parent, tenant=pending.tenant)
        # A writer keeps its entry: making room may evict the last child that has kept it so far.
        catalog.add_writer(entry, pending)
        offsets = self.room.allocate(entry, pending)
        if offsets is None:
            catalog.drop_writer(entry.key, pending)
            catalog.departures.note(entry.key, Reason.FULL)
            return ChunkState.FULL
        self._counters.second_writers += is_second
        pending.chunks.append(PendingChunk(entry.key, offsets, group))
        return ChunkState.RESERVED

    def _writing(self, owner: OwnerId, reservation: int, shard: int) -> Reservation:
        held = self.reservations.get(reservation)
        if held is None:
            raise NotRegisteredError(f"reservation {reservation} is over or never was")
        if not 0 <= shard < len(held.writers) or held.writers[shard] != owner:
            raise MalformedError(
                f"shard {shard} of reservation {reservation} is not this client's to write: "
                "a worker commits the shard of its own rank"
            )
        return held

    def _void(self, held: Reservation) -> None:
        if held.is_void:
            return
        held.is_void = True
        self._counters.dropped += len(held.chunks)
        for chunk in held.chunks:
            self.catalog.departures.note(chunk.key, Reason.DROPPED)
            self.catalog.drop_writer(chunk.key, held)

    def _advance(self, held: Reservation) -> int:
        if held.out:
            return CommitOutcome.DROPPED if held.is_void else CommitOutcome.PENDING
        self.reservations.remove(held.owner, held.handle)
        self._counters.reserved_chunks -= len(held.chunks)
        if held.is_void:
            for chunk in held.chunks:
                self.catalog.free_reserved(held, chunk)
            return CommitOutcome.DROPPED
        return CommitOutcome.VISIBLE if self._publish(held) else CommitOutcome.DROPPED

    def _publish(self, held: Reservation) -> bool:
        self._tick += 1
        self.catalog.shares.touch(held.tenant)
        stored = 0
        for index, chunk in enumerate(held.chunks):
            entry = self.catalog.entries[chunk.key]
            if entry.refs:
                self.catalog.free_reserved(held, chunk)
            else:
                stored += 1
                refs = join_refs(chunk.offsets, held.seals, index)
                self.catalog.fill(entry, refs, tick=self._tick, tenant=held.tenant)
            self.catalog.drop_writer(chunk.key, held)
        self._counters.stored += stored
        self._counters.dropped += len(held.chunks) - stored
        return stored > 0
