"""Which growth step of the arena to empty when no free run is long enough.

Slots never straddle a step, and neighbours that are free merge inside one, so emptying a step of
all that may be moved is sure to make a run as long as the longest stretch without anything that
may not. The scan is linear in the catalogue; `Room` asks for it only when evicting leaves in the
policy's order has met its bound, which takes shards of different sizes.
"""

from collections.abc import Iterable

from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES
from kvcellar.store.entries import Entry

__all__ = ["StepMap"]


class _StepUse:
    """What lies in one step that may be moved."""

    __slots__ = ("entries", "ticks")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ticks = 0


class StepMap:
    """The growth steps that are there."""

    def __init__(self, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._ends: dict[int, int] = {}

    def add(self, offset: int, size_bytes: int) -> None:
        """Take note of a step; the last one of an arena may be shorter than the others."""
        self._ends[offset // self._step_bytes] = offset + size_bytes

    def coldest(
        self,
        needed_bytes: int,
        *,
        movable: Iterable[Entry],
        fixed: Iterable[tuple[int, int]],
    ) -> list[Entry]:
        """Return what to evict so that a free run of `needed_bytes` exists for sure.

        Args:
            needed_bytes: at most a step.
            movable: complete entries that may be evicted.
            fixed: (offset, bytes) of everything in slots besides.

        Returns:
            All movable entries of one step (once for each shard there), of the steps that can
            help the one whose entries were used least recently in the mean; empty if none can.
        """
        uses = {step: _StepUse() for step in self._with_gap(needed_bytes, fixed)}
        step_bytes = self._step_bytes
        for entry in movable:
            refs, tick = entry.refs, entry.tick
            for at in range(0, len(refs), REF_BYTES):
                offset = int.from_bytes(refs[at : at + OFFSET_BYTES], "little")
                use = uses.get(offset // step_bytes)
                if use is not None:
                    use.entries.append(entry)
                    use.ticks += tick
        filled = [use for use in uses.values() if use.entries]
        if not filled:
            return []
        return min(filled, key=lambda use: use.ticks / len(use.entries)).entries

    def _with_gap(self, needed_bytes: int, fixed: Iterable[tuple[int, int]]) -> list[int]:
        by_step: dict[int, list[tuple[int, int]]] = {step: [] for step in self._ends}
        for offset, size_bytes in fixed:
            by_step[offset // self._step_bytes].append((offset, size_bytes))
        found = []
        for step, extents in by_step.items():
            free_from = step * self._step_bytes
            for offset, size_bytes in [*sorted(extents), (self._ends[step], 0)]:
                if offset - free_from >= needed_bytes:
                    found.append(step)
                    break
                free_from = offset + size_bytes
        return found
