"""Makes room on a medium before a chunk is written, so that the cap holds at every moment.

Writers come one after another: each waits until what has to leave is really gone, and only then
writes. Without a cap, 5 % of the file system stay free, whoever else uses it.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvcellar.tiers.index import ChunkIndex

__all__ = ["Room"]

_FREE_SHARE = 0.05
# What a file system may take for itself with a new file: a folder, a page of a folder, extents.
OVERHEAD_BYTES = 16 * 1024
# A medium on which nothing can be removed must not be tried to its end.
_REFUSALS_MAX = 8


class Room:
    """The cap of one folder."""

    def __init__(
        self,
        index: ChunkIndex,
        base: Path,
        evict: Callable[[bytes], object],
        *,
        cap_bytes: int,
        may_evict: bool,
    ) -> None:
        """Prepare.

        Args:
            index: what is there.
            base: a folder of the file system, where there is no cap.
            evict: removes one chunk and tells the index, or fails to. Blocks.
            cap_bytes: 0 for none.
            may_evict: whether chunks leave for new ones.
        """
        self._index = index
        self._base = base
        self._evict = evict
        self._cap_bytes = cap_bytes
        self._may_evict = may_evict
        index.set_capacity(cap_bytes or _capacity_bytes(base))
        self._turn = threading.Lock()
        self.evicted = 0
        """Chunks that left to make room."""

    def reserve(self, key: bytes, record_bytes: int, tenant: str = "") -> bool | None:
        """Reserve room for a tenant's record, evicting as much as needed.

        A tenant with a quota makes room for itself first.

        Returns:
            True when it may be written; `end_write` or `drop_write` of the index follows. False
            when there is no room; None when the key is there already.

        Raises:
            OSError: the file system cannot be asked.
        """
        needed_bytes = record_bytes + OVERHEAD_BYTES
        with self._turn:
            if not self._index.begin_write(key, needed_bytes, tenant):
                return None
            try:
                has_room = self._shrink(tenant) and self._make(needed_bytes)
            except BaseException:
                self._index.drop_write(key)
                raise
            if not has_room:
                self._index.drop_write(key)
            return has_room

    def free(self, needed_bytes: int) -> bool:
        """Evict so many bytes because the medium is full; False when that was not possible."""
        with self._turn:
            return self._leave(needed_bytes)

    def shrink(self, tenant: str) -> None:
        """Evict what a tenant holds above its quota, which was lowered."""
        with self._turn:
            self._shrink(tenant)

    def trim(self) -> None:
        """Evict what is above the cap, after a start with a smaller one. May raise OSError."""
        with self._turn:
            self._make(0)

    def _make(self, needed_bytes: int) -> bool:
        missing_bytes = self._missing_bytes(needed_bytes)
        if missing_bytes <= 0:
            return True
        # Without a cap the figure is the file system's, which may free what was removed later:
        # evict once, and believe the second look.
        return self._leave(missing_bytes) and self._missing_bytes(needed_bytes) <= 0

    def _missing_bytes(self, needed_bytes: int) -> int:
        """Return how much too little there is; the reservation is in the index already."""
        if self._cap_bytes:
            return self._index.used_bytes - self._cap_bytes
        state = os.statvfs(self._base)
        floor_bytes = int(state.f_blocks * state.f_frsize * _FREE_SHARE)
        return floor_bytes + needed_bytes - state.f_bavail * state.f_frsize

    def _leave(self, missing_bytes: int) -> bool:
        """Evict the least recently used chunks until so many bytes are gone."""
        if not self._may_evict or self._index.evictable_bytes < missing_bytes:
            return False
        goal_bytes = self._index.used_bytes - missing_bytes
        self._leave_while(lambda: self._index.used_bytes > goal_bytes, self._index.oldest)
        return self._index.used_bytes <= goal_bytes

    def _shrink(self, tenant: str) -> bool:
        """Evict the tenant's least recently used chunks until it is within its quota."""
        if not self._index.over_bytes(tenant):
            return True
        if self._may_evict:
            self._leave_while(
                lambda: self._index.over_bytes(tenant) > 0, lambda: self._index.oldest_of(tenant)
            )
        return not self._index.over_bytes(tenant)

    def _leave_while(
        self, is_needed: Callable[[], bool], choose: Callable[[], bytes | None]
    ) -> None:
        refusals = 0
        while is_needed() and refusals < _REFUSALS_MAX:
            key = choose()
            if key is None:
                return
            before_bytes = self._index.used_bytes
            self._evict(key)
            if self._index.used_bytes < before_bytes:
                self.evicted += 1
            else:
                refusals += 1


def _capacity_bytes(base: Path) -> int:
    state = os.statvfs(base)
    return int(state.f_blocks * state.f_frsize * (1 - _FREE_SHARE))
