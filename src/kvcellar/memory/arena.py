"""The arena: one anonymous shared-memory file that holds every slot of a node.

The server creates it sparse, which takes no time at any size, and `ArenaGrower` fills it with
memory in the background, step by step, while the server answers already. A client gets the
descriptor over the Unix socket and maps it with `ArenaView`. The file has no name, so nothing is
left behind when all processes are killed, and it is sealed against shrinking, so no process can
make another's access to it fault. The server itself never maps it and touches no byte of it.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from kvcellar.errors import ArenaMapError
from kvcellar.memory.limits import Memory, MemoryReader, reserve_bytes
from kvcellar.telemetry.logs import EventLog
from kvcellar.units import MIB, format_bytes

__all__ = ["Arena", "ArenaGrower", "ArenaView"]

_LOG = EventLog("kvcellar.memory")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# What one fallocate takes: 3 ms at 5 GB/s, and still below 50 ms on the slowest machine seen, so
# that a stop is answered in time.
_PIECE_BYTES = 16 * MIB
# What is faulted between two looks at how much memory is free. It is half of the smallest
# reserve, so other processes that grow meanwhile do not end at the limit.
_UNCHECKED_BYTES = 128 * MIB


class Arena:
    """The server's side: owns the file and brings its memory in."""

    def __init__(self, fd: int, size_bytes: int, *, step_bytes: int) -> None:
        """Take over `fd`; use `create`."""
        self._fd = fd
        self.size_bytes = size_bytes
        self.step_bytes = step_bytes
        self.step_count = -(-size_bytes // step_bytes)

    @classmethod
    def create(cls, size_bytes: int, step_bytes: int) -> "Arena":
        """Make a new arena without memory; instantaneous at any size.

        Args:
            size_bytes: a multiple of the page size.
            step_bytes: likewise; see `slots.step_size_bytes`.

        Raises:
            ArenaMapError: the kernel refuses; the message has its reason.
        """
        assert size_bytes > 0, size_bytes
        assert size_bytes % mmap.PAGESIZE == 0, size_bytes
        assert step_bytes > 0, step_bytes
        assert step_bytes % mmap.PAGESIZE == 0, step_bytes
        try:
            fd = os.memfd_create("kvcellar-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaMapError(f"no anonymous shared memory: {error.strerror}") from error
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise ArenaMapError(
                f"no arena of {format_bytes(size_bytes)}: {error.strerror}"
            ) from error
        return cls(fd, size_bytes, step_bytes=step_bytes)

    @property
    def fd(self) -> int:
        """Return the descriptor to send to clients; it stays the arena's."""
        assert self._fd >= 0, "the arena is closed"
        return self._fd

    def step_range(self, index: int) -> tuple[int, int]:
        """Return offset and size of a step; the last may be shorter than the others."""
        assert 0 <= index < self.step_count, (index, self.step_count)
        offset = index * self.step_bytes
        return offset, min(self.step_bytes, self.size_bytes - offset)

    def grow_step(self, index: int) -> None:
        """Bring the memory of one whole step in; what is there already stays as it is.

        Blocks (about 0.2 s a GiB) without the GIL. Whether the pages are huge is the kernel's
        choice (/sys/kernel/mm/transparent_hugepage/shmem_enabled).

        Raises:
            OSError: ENOMEM or ENOSPC when there is not enough memory; parts may have come.
        """
        offset, size_bytes = self.step_range(index)
        for position in range(offset, offset + size_bytes, _PIECE_BYTES):
            self.grow_range(position, min(_PIECE_BYTES, offset + size_bytes - position))

    def grow_range(self, offset: int, size_bytes: int) -> None:
        """Bring the memory of one range in, or none of it; see `grow_step`."""
        os.posix_fallocate(self.fd, offset, size_bytes)

    def close(self) -> None:
        """Let go of the file; may be called twice.

        Its memory is freed with the last process that maps it. If that is this call, it blocks
        for 0.15 s a GiB, without the GIL.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ArenaGrower:
    """Fills the arena from its first step to its last, as far as memory is free now.

    One thread: the kernel holds the file's lock while it allocates, so several are no faster
    (5.6 GB/s with one, 5.0 with eight on 16 cores), and touching pages from several threads is
    slower still. The thread waits while memory is short, for as long as that takes: another
    process, or the clients of a server that died, may give some back.
    """

    def __init__(
        self,
        arena: Arena,
        on_step: Callable[[int, int], None],
        *,
        read_memory: Callable[[], Memory] | None = None,
        poll_s: float = 0.25,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            arena: must stay open until `stop` returned.
            on_step: called with offset and size of each step that is ready, in order, on the
                grower's thread: hand it to the loop and return.
            read_memory: how much memory there is; the machine's and the control groups'.
            poll_s: how often to look again while memory is short.
        """
        self._arena = arena
        self._on_step = on_step
        self._read_memory = read_memory or MemoryReader().read
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arena-grower", daemon=True)
        self._unchecked_bytes = 0
        self._has_logged_wait = False
        self.steps_ready = 0
        """Steps handed to `on_step`; from any thread."""
        self.waits_for_bytes = 0
        """Memory that has to become free before growth goes on, 0 while it does."""
        self.failure: str | None = None
        """Why growth ended early, for the health check; None while all is well."""

    @property
    def is_done(self) -> bool:
        """Return True when the whole arena has memory."""
        return self.steps_ready == self._arena.step_count

    def start(self) -> None:
        """Begin to grow in the background; call it once."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End the thread, whatever it waits for; usually within 50 ms. May be called twice.

        Returns:
            Whether the thread has ended; only then may the arena be closed.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.is_done and self._grow(self.steps_ready):
                offset, size_bytes = self._arena.step_range(self.steps_ready)
                self._on_step(offset, size_bytes)
                self.steps_ready += 1
        except Exception as error:  # noqa: BLE001 - the thread ends here; the health check tells.
            self.failure = f"{type(error).__name__}: {error}"
            _LOG.error("arena growth failed", reason=self.failure, steps_ready=self.steps_ready)
            return
        if self.is_done:
            _LOG.info("arena is whole", size=format_bytes(self._arena.size_bytes))

    def _grow(self, index: int) -> bool:
        """Bring one step in, waiting for memory as long as it takes; False when stopped."""
        offset, size_bytes = self._arena.step_range(index)
        end = offset + size_bytes
        self._unchecked_bytes = 0
        while offset < end and not self._stopping.is_set():
            piece_bytes = min(_PIECE_BYTES, end - offset)
            if self._may_take(piece_bytes, end - offset) and self._fault(offset, piece_bytes):
                offset += piece_bytes
            else:
                self._stopping.wait(self._poll_s)
        return offset == end

    def _may_take(self, piece_bytes: int, step_bytes: int) -> bool:
        """Tell whether the rest of a step fits into what is free, less the reserve."""
        if piece_bytes <= self._unchecked_bytes:
            self._unchecked_bytes -= piece_bytes
            return True
        memory = self._read_memory()
        needed_bytes = step_bytes + reserve_bytes(memory.total_bytes)
        missing_bytes = max(0, needed_bytes - memory.available_bytes)
        self.waits_for_bytes = missing_bytes
        if missing_bytes:
            self._log_wait(
                f"{format_bytes(missing_bytes)} more must be free first: a step and the reserve "
                f"take {format_bytes(needed_bytes)}, {format_bytes(memory.available_bytes)} are "
                f"available (limit of {memory.available_from})"
            )
            return False
        self._unchecked_bytes = _UNCHECKED_BYTES - piece_bytes
        return True

    def _fault(self, offset: int, piece_bytes: int) -> bool:
        try:
            self._arena.grow_range(offset, piece_bytes)
        except OSError as error:
            if error.errno not in {errno.ENOMEM, errno.ENOSPC}:
                raise
            # The look at what is free was too hopeful; the next try looks again.
            self._unchecked_bytes = 0
            self.waits_for_bytes = piece_bytes
            self._log_wait(f"the kernel has no memory: {error.strerror}")
            return False
        self.waits_for_bytes = 0
        return True

    def _log_wait(self, reason: str) -> None:
        if self._has_logged_wait:
            return
        self._has_logged_wait = True
        ready_bytes = self.steps_ready * self._arena.step_bytes
        _LOG.warning(
            "arena waits for memory",
            reason=reason,
            ready=format_bytes(ready_bytes),
            size=format_bytes(self._arena.size_bytes),
        )


class ArenaView:
    """A client's side: the whole arena as writable bytes.

    Only ranges of steps that the server has announced may be touched: the rest has no memory yet.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map an arena; touches no memory and takes no time at any size.

        Args:
            fd: as the server sent it; it stays the caller's and may be closed at once.
            size_bytes: as the server said.

        Raises:
            ArenaMapError: the file has another size, lacks a seal (whoever shrinks a mapped file
                kills those who read it) or cannot be mapped; the message has the reason.
        """
        _check_file(fd, size_bytes)
        self.size_bytes = size_bytes
        try:
            mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaMapError(
                f"the arena of {format_bytes(size_bytes)} cannot be mapped: {error}"
            ) from error
        self._mapping: mmap.mmap | None = mapping
        self._view: memoryview | None = memoryview(mapping)

    @property
    def view(self) -> memoryview:
        """Return the arena's bytes, writable, for slices and for `numpy.frombuffer`."""
        assert self._view is not None, "the arena's view is closed"
        return self._view

    @property
    def is_closed(self) -> bool:
        """Return True after `close`."""
        return self._view is None

    def close(self) -> None:
        """Unmap the arena; may be called twice.

        What was made from `view` and still lives (a slice, an array) keeps the mapping alive until
        it is gone, so that no access can ever fault. Unmapping takes 30 ms for each GiB that was
        touched, 150 ms when this was the last that held the file, and does not hold the GIL.
        """
        view, self._view = self._view, None
        mapping, self._mapping = self._mapping, None
        if view is None or mapping is None:
            return
        try:
            view.release()
            mapping.close()
        except BufferError:
            # Someone still holds bytes: the mapping goes with the last reference to it.
            return


def _check_file(fd: int, size_bytes: int) -> None:
    """Raise ArenaMapError unless `fd` is a sealed file of exactly this size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found_bytes = os.fstat(fd).st_size
    except OSError as error:
        raise ArenaMapError(
            f"the arena's descriptor is no sealed memory file: {error.strerror}"
        ) from error
    # The seals come first: the size of a file that they hold cannot change after this look.
    if seals & _SEALS != _SEALS:
        raise ArenaMapError(f"the arena's file lacks a seal: {seals:#x}, expected {_SEALS:#x}")
    if size_bytes <= 0 or found_bytes != size_bytes:
        raise ArenaMapError(
            f"the arena's file has {found_bytes} bytes, the server said {size_bytes}"
        )
