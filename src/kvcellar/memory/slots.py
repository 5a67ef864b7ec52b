"""Which byte ranges of the arena are free: one allocator for shards of any size.

The arena arrives in growth steps. Each step is registered with a GPU by itself, so a slot lies
within one step and free runs are merged inside a step and never across its border. Free runs are
listed by exact size: in the steady state, where a freed slot has the size that is wanted next, an
allocation pops a list. The store calls this from the server's loop. It keeps nothing per
allocated slot, because the catalogue knows each slot's offset and size and memory for each key
has to stay small. What it does keep are the free runs of each step in order of their offsets, so
that memory that is freed twice (and would be given to two writers) is found every time. Pure.
"""

from bisect import bisect_left, insort

from kvcellar.units import GIB, MIB, align_up

__all__ = ["SLOT_ALIGNMENT", "SlotAllocator", "step_size_bytes"]

SLOT_ALIGNMENT = 4096
"""Slots begin at, and take, whole pages of this many bytes."""


def step_size_bytes(total_bytes: int) -> int:
    """Return the growth step for an arena: 1 GiB from 8 GiB on, an eighth of it below.

    A step is a multiple of 2 MiB (a huge page) and at least 64 MiB; an arena smaller than that is
    one step. No shard may be larger than a step.
    """
    if total_bytes >= 8 * GIB:
        return GIB
    return min(total_bytes, max(64 * MIB, align_up(total_bytes // 8, 2 * MIB)))


class SlotAllocator:
    """Hand out byte ranges of the arena and take them back.

    Offsets and sizes are multiples of `SLOT_ALIGNMENT`; sizes asked for are rounded up to it. Not
    thread-safe: one loop owns it. Misuse (memory freed twice, memory that is not the arena's) is
    a programmer's error and fails an assertion with the values.
    """

    def __init__(self, step_bytes: int) -> None:
        assert step_bytes > 0, step_bytes
        assert step_bytes % SLOT_ALIGNMENT == 0, step_bytes
        self.step_bytes = step_bytes
        self._step_ends: dict[int, int] = {}  # step index -> offset at which its memory ends
        self._step_runs: dict[int, list[int]] = {}  # step index -> offsets of free runs, sorted
        self._run_bytes: dict[int, int] = {}  # offset of a free run -> its size
        # A dict stands for an ordered set: both its last key and a given key leave in O(1).
        self._runs_by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of _runs_by_size, sorted
        self._free_bytes = 0
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all steps so far."""
        return self._total_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes in no slot; they may be scattered."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes in slots, rounding included."""
        return self._total_bytes - self._free_bytes

    def largest_free_bytes(self) -> int:
        """Return the size of the largest slot that could be allocated now."""
        return self._sizes[-1] if self._sizes else 0

    def slot_bytes(self, size_bytes: int) -> int:
        """Return what a slot for `size_bytes` takes."""
        return align_up(size_bytes, SLOT_ALIGNMENT)

    def add_step(self, offset: int, size_bytes: int) -> None:
        """Take in a growth step whose memory is there.

        Args:
            offset: in the arena, a multiple of `step_bytes`.
            size_bytes: `step_bytes`, or less for the arena's last step.
        """
        index, remainder = divmod(offset, self.step_bytes)
        assert offset >= 0, offset
        assert remainder == 0, (offset, self.step_bytes)
        assert index not in self._step_ends, (offset, size_bytes)
        assert 0 < size_bytes <= self.step_bytes, (size_bytes, self.step_bytes)
        assert size_bytes % SLOT_ALIGNMENT == 0, size_bytes
        self._step_ends[index] = offset + size_bytes
        self._step_runs[index] = []
        self._total_bytes += size_bytes
        self._free_bytes += size_bytes
        self._insert(self._step_runs[index], offset, size_bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a new slot, or None when no free run is long enough.

        The most recently freed run of exactly this size is taken, else the smallest longer one
        is cut. The bytes of the slot are undefined.
        """
        assert size_bytes > 0, size_bytes
        wanted_bytes = align_up(size_bytes, SLOT_ALIGNMENT)
        position = bisect_left(self._sizes, wanted_bytes)
        if position == len(self._sizes):
            return None
        run_bytes = self._sizes[position]
        # popitem, not the last key and a del: a del leaves a gap that each later look for the
        # last key has to cross again.
        offset, _ = self._runs_by_size[run_bytes].popitem()
        self._drop_size_if_empty(run_bytes)
        del self._run_bytes[offset]
        runs = self._step_runs[offset // self.step_bytes]
        run_index = bisect_left(runs, offset)
        if run_bytes > wanted_bytes:
            # The rest takes the run's place in the order of offsets.
            runs[run_index] = offset + wanted_bytes
            self._list(offset + wanted_bytes, run_bytes - wanted_bytes)
        else:
            del runs[run_index]
        self._free_bytes -= wanted_bytes
        return offset

    def free(self, offset: int, size_bytes: int) -> None:
        """Take a slot back.

        Args:
            offset: as `allocate` returned it.
            size_bytes: as it was given to `allocate`.
        """
        assert size_bytes > 0, (offset, size_bytes)
        freed_bytes = align_up(size_bytes, SLOT_ALIGNMENT)
        start, end = offset, offset + freed_bytes
        index = offset // self.step_bytes
        assert offset % SLOT_ALIGNMENT == 0, (offset, size_bytes)
        assert end <= self._step_ends.get(index, -1), ("outside", offset, size_bytes)

        runs = self._step_runs[index]
        position = bisect_left(runs, start)
        if position < len(runs):
            following = runs[position]
            assert following >= end, ("free already", offset, size_bytes)
            if following == end:
                end += self._unlist(following)
                del runs[position]
        if position > 0:
            previous = runs[position - 1]
            previous_end = previous + self._run_bytes[previous]
            assert previous_end <= start, ("free already", offset, size_bytes)
            if previous_end == start:
                start = previous
                self._unlist(previous)
                del runs[position - 1]
        self._insert(runs, start, end - start)
        self._free_bytes += freed_bytes

    def check(self) -> None:
        """Assert every invariant; linear in the number of free runs, for tests."""
        free_bytes = 0
        seen: dict[int, int] = {}
        for index, runs in self._step_runs.items():
            end_before = -1
            for offset in runs:
                run_bytes = self._run_bytes[offset]
                assert run_bytes > 0, (offset, run_bytes)
                assert (offset | run_bytes) % SLOT_ALIGNMENT == 0, (offset, run_bytes)
                assert offset // self.step_bytes == index, (offset, index)
                assert offset > end_before, ("overlap or unmerged neighbour", end_before, offset)
                end_before = offset + run_bytes
                assert end_before <= self._step_ends[index], (offset, run_bytes)
                free_bytes += run_bytes
                seen[offset] = run_bytes
        assert seen == self._run_bytes
        assert free_bytes == self._free_bytes, (free_bytes, self._free_bytes)
        by_size = {
            offset: size for size, offsets in self._runs_by_size.items() for offset in offsets
        }
        assert by_size == self._run_bytes
        assert all(self._runs_by_size.values()), "an empty list is kept"
        assert sorted(self._runs_by_size) == self._sizes
        steps_bytes = sum(end - index * self.step_bytes for index, end in self._step_ends.items())
        assert steps_bytes == self._total_bytes, (steps_bytes, self._total_bytes)
        assert 0 <= self._free_bytes <= self._total_bytes

    def _insert(self, runs: list[int], offset: int, run_bytes: int) -> None:
        insort(runs, offset)
        self._list(offset, run_bytes)

    def _list(self, offset: int, run_bytes: int) -> None:
        self._run_bytes[offset] = run_bytes
        same_size = self._runs_by_size.get(run_bytes)
        if same_size is None:
            self._runs_by_size[run_bytes] = {offset: None}
            insort(self._sizes, run_bytes)
        else:
            same_size[offset] = None

    def _unlist(self, offset: int) -> int:
        """Take a free run out of the lists by size, and return its size."""
        run_bytes = self._run_bytes.pop(offset)
        del self._runs_by_size[run_bytes][offset]
        self._drop_size_if_empty(run_bytes)
        return run_bytes

    def _drop_size_if_empty(self, run_bytes: int) -> None:
        if not self._runs_by_size[run_bytes]:
            del self._runs_by_size[run_bytes]
            del self._sizes[bisect_left(self._sizes, run_bytes)]
