"""Which chunks a folder holds, in the order of their use, and what they occupy: no I/O.

The file-system tier asks this before each access, so that a miss costs no system call, and keeps
its cap with the sums here. Everything that `du` would count is in them: chunks, chunks that are
being written (with room for the file system's own blocks), folders, and files that are not ours.
Every method takes one lock for some microseconds; the writers' order (room first, bytes then) is
the tier's business.
"""

import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from kvcellar.tiers.base import TENANTS_MAX, ChunkRecord
from kvcellar.tiers.turns import Turns

__all__ = ["ChunkIndex", "Presence"]


class Presence(Enum):
    """What is known about a key."""

    THERE = "there"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """The folder has not been read to its end: ask the file system."""


class _Entry:
    """One chunk's file.

    Attributes:
        occupied_bytes: what it takes on the medium.
        tenant: "" until its header was read.
        namespace: empty until its header was read.
        is_found: it was there at start and has not been used since.
        is_bad: it cannot be used nor removed; it only counts.
    """

    __slots__ = ("is_bad", "is_found", "namespace", "occupied_bytes", "tenant")

    def __init__(self, occupied_bytes: int, *, is_found: bool) -> None:
        self.occupied_bytes = occupied_bytes
        self.tenant = ""
        self.namespace = b""
        self.is_found = is_found
        self.is_bad = False


class ChunkIndex:
    """The chunks of one folder; thread-safe."""

    def __init__(self, *, is_shared: bool = False, is_isolated: bool = False) -> None:
        """Make an empty one.

        Args:
            is_shared: others write to the folder, so files may be found at any time.
            is_isolated: chunks leave by their tenants' shares and not by their use alone.
        """
        self._is_shared = is_shared
        self._is_isolated = is_isolated
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._writing: dict[bytes, tuple[int, str]] = {}  # key -> reserved bytes, for whom
        self._turns = Turns()
        self._capacity_bytes = 0
        self._namespaces: dict[bytes, bytes] = {}
        self._fixed: dict[str, int] = {}  # folders by name, and "" for files that are not ours
        self._leaving: dict[bytes, int] = {}  # key -> bytes of a file that is being removed
        self._chunk_bytes = 0
        self._bad_bytes = 0
        self._bad = 0
        # Keys removed while the folder is read: what the reader saw before must not come back.
        self._gone: set[bytes] | None = set()

    @property
    def is_complete(self) -> bool:
        """Return True once the folder has been read to its end."""
        return self._gone is None

    @property
    def used_bytes(self) -> int:
        """Return what everything occupies, writes that run included."""
        with self._lock:
            return self._used_bytes()

    @property
    def evictable_bytes(self) -> int:
        """Return what the chunks occupy that could be removed."""
        with self._lock:
            return self._chunk_bytes

    def __len__(self) -> int:
        return len(self._entries) - self._bad

    def all_keys(self) -> tuple[bytes, ...]:
        """Return the keys that are there, the least recently used first."""
        with self._lock:
            return tuple(key for key, entry in self._entries.items() if not entry.is_bad)

    def tenant_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the largest tenants; the others and unknown ones under ""."""
        with self._lock:
            return self._turns.tenant_bytes(TENANTS_MAX)

    def set_capacity(self, capacity_bytes: int) -> None:
        """Say how much the folder may hold; tenants share what is not taken by other things."""
        with self._lock:
            self._capacity_bytes = capacity_bytes

    def set_limits(self, limits: Mapping[str, int | None]) -> None:
        """Give these tenants quotas, or take them away with None; kept if it is isolated."""
        with self._lock:
            self._turns.set_limits(limits)

    def over_bytes(self, tenant: str) -> int:
        """Return by how much a tenant is over its quota, writes that run included."""
        with self._lock:
            return self._turns.over_bytes(tenant) if self._is_isolated else 0

    def oldest_of(self, tenant: str) -> bytes | None:
        """Return which of a tenant's keys has to leave first, None when there is none."""
        with self._lock:
            return self._turns.next_of(tenant)

    def look(self, key: bytes) -> Presence:
        """Return whether a key is there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                return Presence.MISSING if entry.is_bad else Presence.THERE
            if self._gone is None or key in self._gone or key in self._leaving:
                return Presence.MISSING
            return Presence.UNKNOWN

    def may_have_file(self, key: bytes) -> bool:
        """Return whether there may be a file of this key, if only a useless one."""
        with self._lock:
            return key in self._entries or self._gone is not None or self._is_shared

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make keys the most recently used, the first of them last of all."""
        with self._lock:
            for key in reversed(keys):
                entry = self._entries.get(key)
                if entry is not None:
                    entry.is_found = False
                    self._entries.move_to_end(key)
                    if not entry.is_bad:
                        self._turns.use(key, entry.tenant)

    def begin_write(self, key: bytes, reserved_bytes: int, tenant: str = "") -> bool:
        """Reserve bytes for a tenant's new chunk; False when it is there or being written."""
        with self._lock:
            entry = self._entries.get(key)
            if key in self._writing or key in self._leaving:
                return False
            if entry is not None and not entry.is_bad:
                return False
            self._writing[key] = (reserved_bytes, tenant)
            self._turns.reserve(tenant, reserved_bytes)
            return True

    def end_write(self, record: ChunkRecord, occupied_bytes: int) -> None:
        """Turn a reservation into a chunk that is there, and occupies so much."""
        with self._lock:
            self._end_reservation(record.key)
            self._forget(record.key)
            entry = _Entry(occupied_bytes, is_found=False)
            self._name(entry, record)
            self._add(record.key, entry)

    def drop_write(self, key: bytes) -> None:
        """Give a reservation back: nothing was written."""
        with self._lock:
            self._end_reservation(key)

    def found(self, key: bytes, occupied_bytes: int) -> None:
        """Take in a file that was there; the oldest of all until `order_found`.

        Once the folder is counted that happens only where others write to it.
        """
        with self._lock:
            if key in self._entries or key in self._writing or key in self._leaving:
                return
            if not self._is_shared if self._gone is None else key in self._gone:
                return
            self._add(key, _Entry(occupied_bytes, is_found=True))
            self._put_first(key, "")

    def order_found(self, newest_first: Iterable[bytes]) -> None:
        """Order what was found and not used since; in slices, newest first of all."""
        with self._lock:
            for key in newest_first:
                entry = self._entries.get(key)
                if entry is not None and entry.is_found and not entry.is_bad:
                    self._put_first(key, entry.tenant)

    def complete(self) -> None:
        """Say that the folder was read to its end."""
        with self._lock:
            self._gone = None

    def name(self, record: ChunkRecord) -> None:
        """Say whose a chunk is that was found."""
        with self._lock:
            entry = self._entries.get(record.key)
            if entry is not None and not entry.namespace and not entry.is_bad:
                self._turns.remove(record.key, entry.tenant, entry.occupied_bytes)
                self._name(entry, record)
                self._turns.add(record.key, entry.tenant, entry.occupied_bytes)
                if entry.is_found:
                    # Headers are read newest first.
                    self._turns.put_first(record.key, entry.tenant)

    def keys_of(self, namespace: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of a namespace (of all when it is empty), and those not known yet."""
        sure, unsure = [], []
        with self._lock:
            for key, entry in self._entries.items():
                if not namespace or entry.namespace == namespace:
                    sure.append(key)
                elif not entry.namespace:
                    unsure.append(key)
        return sure, unsure

    def oldest(self) -> bytes | None:
        """Return the key that has to leave first, None when there is none."""
        with self._lock:
            if self._is_isolated:
                taken_bytes = sum(self._fixed.values()) + self._bad_bytes
                self._turns.shares.capacity_bytes = max(0, self._capacity_bytes - taken_bytes)
                return self._turns.next()
            return next((key for key, entry in self._entries.items() if not entry.is_bad), None)

    def take(self, key: bytes) -> bool:
        """Take a chunk out before its file is removed; it counts until `left`.

        Returns:
            Whether the caller is to remove the file: False when another is about to, or is
            writing it. From True on nobody else touches that file until `left`.
        """
        with self._lock:
            if key in self._leaving or key in self._writing:
                return False
            entry = self._entries.get(key)
            self._leaving[key] = entry.occupied_bytes if entry is not None else 0
            self._forget(key)
            return True

    def left(self, key: bytes, *, is_gone: bool) -> None:
        """Say what became of a file that was taken; one that stays only counts from now on."""
        with self._lock:
            occupied_bytes = self._leaving.pop(key)
            if self._gone is not None:
                self._gone.add(key)
            if not is_gone:
                entry = _Entry(occupied_bytes, is_found=False)
                entry.is_bad = True
                self._entries[key] = entry
                self._bad_bytes += occupied_bytes
                self._bad += 1

    def set_fixed(self, name: str, occupied_bytes: int) -> None:
        """Say what a folder occupies."""
        assert name
        with self._lock:
            self._fixed[name] = occupied_bytes

    def add_stray(self, occupied_bytes: int) -> None:
        """Count a file that is not ours; it stays where it is."""
        with self._lock:
            self._fixed[""] = self._fixed.get("", 0) + occupied_bytes

    def check(self) -> None:
        """Assert every invariant; linear, for tests."""
        with self._lock:
            good = [entry for entry in self._entries.values() if not entry.is_bad]
            bad = [entry for entry in self._entries.values() if entry.is_bad]
            assert self._bad_bytes == sum(entry.occupied_bytes for entry in bad)
            assert self._chunk_bytes == sum(entry.occupied_bytes for entry in good)
            assert self._bad == len(bad)
            sums: Counter[str] = Counter()
            for entry in good:
                sums[entry.tenant] += max(entry.occupied_bytes, 1)
            for reserved_bytes, tenant in self._writing.values():
                sums[tenant] += reserved_bytes
            held = {one.name: one.used_bytes for one in self._turns.shares if one.used_bytes}
            assert held == dict(+sums), (held, sums)
            self._turns.check()
            assert all(value >= 0 for value in self._fixed.values()), self._fixed

    def _used_bytes(self) -> int:
        moving_bytes = sum(reserved for reserved, _ in self._writing.values())
        moving_bytes += sum(self._leaving.values())
        return self._chunk_bytes + self._bad_bytes + sum(self._fixed.values()) + moving_bytes

    def _add(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self._chunk_bytes += entry.occupied_bytes
        self._turns.add(key, entry.tenant, entry.occupied_bytes)

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.is_bad:
            self._bad -= 1
            self._bad_bytes -= entry.occupied_bytes
            return
        self._chunk_bytes -= entry.occupied_bytes
        self._turns.remove(key, entry.tenant, entry.occupied_bytes)

    def _put_first(self, key: bytes, tenant: str) -> None:
        self._entries.move_to_end(key, last=False)
        self._turns.put_first(key, tenant)

    def _end_reservation(self, key: bytes) -> None:
        reserved_bytes, tenant = self._writing.pop(key)
        self._turns.unreserve(tenant, reserved_bytes)

    def _name(self, entry: _Entry, record: ChunkRecord) -> None:
        # A million chunks share a few names: keep one object of each.
        entry.tenant = sys.intern(record.tenant)
        entry.namespace = self._namespaces.setdefault(record.namespace, record.namespace)
