"""The catalogue: which chunks exist, how they hang together, and whose slots are whose.

Entries form a forest by their parents' keys. An entry stays as long as one of three holds: it is
complete, a reservation is writing it, another entry has it as parent. The last keeps the count of
children right when a parent is removed and stored again, and with it the promise that a tail
leaves before its head. Eviction candidates are told to the policy here, where they become so, and
slots go back to the allocator here and in `Room`, nowhere else; so do the tenants' accounts go
down here and up there. Called by the store only.
"""

from kvcellar.memory.slots import SlotAllocator
from kvcellar.store.departures import Departures
from kvcellar.store.entries import Entry, Group
from kvcellar.store.policies import EvictionPolicy
from kvcellar.store.reservations import PendingChunk, Reservation
from kvcellar.tenancy.ranking import Tenant

__all__ = ["Catalog"]


class Catalog:
    """All entries of all namespaces.

    Attributes:
        allocator: where slots come from.
        policy: who says what leaves.
        shares: the tenants' accounts, which are the policy's.
        entries: by key.
        writers: the reservations that can still make a key complete, oldest first.
        departures: why keys that are asked for are not here.
        chunks: complete entries.
        objects: their shards.
    """

    def __init__(self, allocator: SlotAllocator, policy: EvictionPolicy) -> None:
        self.allocator = allocator
        self.policy = policy
        self.shares = policy.shares
        self.entries: dict[bytes, Entry] = {}
        self.writers: dict[bytes, list[Reservation]] = {}
        self.departures = Departures()
        self.chunks = 0
        self.objects = 0

    def link(self, key: bytes, group: Group, *, parent: bytes, tenant: Tenant) -> Entry:
        """Return the entry of `key`, made and hung below `parent` if need be.

        From here on the parent is no leaf, so making room for a chunk never evicts its own
        prefix. An entry that nothing keeps needs a writer next, or goes with what it is linked to.
        """
        entry = self.entries.get(key)
        if entry is None:
            entry = self._add(key, group, tenant)
        if not entry.parent and parent:
            above = self.entries.get(parent) or self._add(parent, group, tenant)
            if above.group is group and not self._descends(above, entry):
                entry.parent = above.key
                above.children += 1
                self.policy.withdraw(above)
        return entry

    def add_writer(self, entry: Entry, reservation: Reservation) -> None:
        """Note that `reservation` can make `entry` complete."""
        self.writers.setdefault(entry.key, []).append(reservation)

    def drop_writer(self, key: bytes, reservation: Reservation) -> None:
        """Note that it cannot, or has done so."""
        writers = self.writers[key]
        writers.remove(reservation)
        if not writers:
            del self.writers[key]
            self._prune(self.entries[key])

    def fill(self, entry: Entry, refs: bytes, *, tick: int, tenant: Tenant) -> None:
        """Make an entry complete: from now on a lookup finds it, and `tenant` holds its slots."""
        assert not entry.refs, entry.key.hex()
        entry.refs = refs
        entry.tenant = tenant
        entry.tick = tick
        self.chunks += 1
        self.objects += len(entry.group.shard_bytes)
        self._offer_leaf(entry)

    def vacate(self, entry: Entry) -> None:
        """Make a complete entry incomplete: no lookup finds it any more.

        Its slots are free at once, or at the end of its last lease. In that case the leases keep
        the old record, out of the catalogue, and a new one takes its place among the entries.
        """
        assert entry.refs, entry.key.hex()
        self.chunks -= 1
        self.objects -= len(entry.group.shard_bytes)
        self.policy.withdraw(entry)
        if entry.leases:
            heir = Entry(entry.key, entry.group, entry.tenant)
            heir.parent = entry.parent
            heir.children = entry.children
            self.entries[entry.key] = heir
            entry.children = 0
            self._prune(heir)
        else:
            self._free_slots(entry)
            self._prune(entry)

    def end_last_lease(self, entry: Entry) -> None:
        """Do what is due when nobody leases a childless record any more."""
        if self.is_listed(entry):
            self._offer_leaf(entry)
        else:
            self._free_slots(entry)

    def is_listed(self, entry: Entry) -> bool:
        """Return whether the record is in the catalogue; one that is not lives by its leases."""
        return self.entries.get(entry.key) is entry

    def free_reserved(self, held: Reservation, chunk: PendingChunk) -> None:
        """Give the slots of a reserved chunk back."""
        for offset, taken_bytes in chunk.extents():
            self.allocator.free(offset, taken_bytes)
        self.shares.discharge(held.tenant, chunk.group.chunk_bytes)

    def _add(self, key: bytes, group: Group, tenant: Tenant) -> Entry:
        entry = Entry(key, group, tenant)
        self.entries[key] = entry
        group.entries += 1
        return entry

    def _prune(self, entry: Entry) -> None:
        # Drop an entry that nothing keeps any more, and what it alone kept.
        above: Entry | None = entry
        while above and not (above.refs or above.children or above.key in self.writers):
            below = above
            del self.entries[below.key]
            below.group.entries -= 1
            above = self.entries[below.parent] if below.parent else None
            if above:
                above.children -= 1
                self._offer_leaf(above)

    def _descends(self, entry: Entry, ancestor: Entry) -> bool:
        # Keys are hashes of their parents, so only a client that lies can ask for a cycle; it
        # would keep its entries for ever. One without children has nothing below it.
        if entry is ancestor:
            return True
        if not ancestor.children:
            return False
        while entry.parent:
            entry = self.entries[entry.parent]
            if entry is ancestor:
                return True
        return False

    def _offer_leaf(self, entry: Entry) -> None:
        if entry.refs and not entry.children and not entry.leases:
            self.policy.offer(entry)

    def _free_slots(self, entry: Entry) -> None:
        refs, entry.refs = entry.refs, b""
        for offset, taken_bytes in entry.group.extents_of_refs(refs):
            self.allocator.free(offset, taken_bytes)
        self.shares.discharge(entry.tenant, entry.group.chunk_bytes)
