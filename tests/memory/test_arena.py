"""The arena on the real kernel: sealed files, real memory, real threads, another process."""

import errno
import fcntl
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvcellar.errors import ArenaMapError
from kvcellar.memory.arena import Arena, ArenaGrower, ArenaView
from kvcellar.memory.limits import Memory
from kvcellar.units import GIB, MIB

PAGE = 4096
SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
PLENTY = Memory(64 * GIB, 64 * GIB, "the machine", "the machine")
DEADLINE_S = 20.0


@pytest.fixture
def arena():
    made = Arena.create(80 * MIB, 32 * MIB)
    yield made
    made.close()


def held_bytes(arena):
    return os.fstat(arena.fd).st_blocks * 512


class Steps:
    """Collects what a grower hands out."""

    def __init__(self):
        self.ranges = []
        self._condition = threading.Condition()

    def __call__(self, offset, size_bytes):
        with self._condition:
            self.ranges.append((offset, size_bytes))
            self._condition.notify_all()

    def wait_for(self, count):
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.ranges) >= count, DEADLINE_S)


# The file.


def test_an_arena_far_larger_than_memory_is_there_at_once_and_takes_none():
    size_bytes = 8192 * GIB
    arena = Arena.create(size_bytes, GIB)
    assert os.fstat(arena.fd).st_size == size_bytes
    assert arena.step_count == 8192
    view = ArenaView(arena.fd, size_bytes)
    assert view.view.nbytes == size_bytes
    assert held_bytes(arena) == 0
    view.close()
    arena.close()


def test_nobody_can_shrink_grow_or_reseal_the_file(arena):
    for size_bytes in (0, 79 * MIB, 81 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_file_has_no_name_and_is_not_inherited(arena):
    assert os.fstat(arena.fd).st_nlink == 0
    assert not os.get_inheritable(arena.fd)


def test_the_last_step_ends_with_the_arena(arena):
    ranges = [arena.step_range(index) for index in range(arena.step_count)]
    assert ranges == [(0, 32 * MIB), (32 * MIB, 32 * MIB), (64 * MIB, 16 * MIB)]
    with pytest.raises(AssertionError):
        arena.step_range(3)


def test_a_step_brings_its_own_memory_and_keeps_what_is_there(arena):
    view = ArenaView(arena.fd, arena.size_bytes)
    view.view[33 * MIB] = 7
    arena.grow_step(1)
    assert held_bytes(arena) == 32 * MIB
    assert view.view[33 * MIB] == 7
    arena.grow_step(2)
    assert held_bytes(arena) == 48 * MIB
    view.close()


@pytest.mark.parametrize(("size_bytes", "step_bytes"), [(0, PAGE), (PAGE + 1, PAGE), (PAGE, 0)])
def test_sizes_are_whole_pages(size_bytes, step_bytes):
    with pytest.raises(AssertionError):
        Arena.create(size_bytes, step_bytes)


def test_an_arena_that_the_kernel_refuses_is_said_with_its_size():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB, limits[1]))
    try:
        with pytest.raises(ArenaMapError, match=r"2\.00 GiB: File too large"):
            Arena.create(2 * GIB, GIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() == before


def test_an_arena_that_no_process_can_map_is_refused():
    arena = Arena.create((1 << 63) - PAGE, GIB)
    with pytest.raises(ArenaMapError, match="cannot be mapped"):
        ArenaView(arena.fd, arena.size_bytes)
    arena.close()


def test_closing_twice_closes_once(arena):
    arena.close()
    taken = os.open("/dev/null", os.O_RDONLY)
    arena.close()
    os.fstat(taken)
    os.close(taken)
    with pytest.raises(AssertionError):
        _ = arena.fd


# The view.


def sealed_file(size_bytes, seals):
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_two_views_share_their_bytes_after_the_descriptor_is_gone(arena):
    copy = os.dup(arena.fd)
    first = ArenaView(copy, arena.size_bytes)
    os.close(copy)
    second = ArenaView(arena.fd, arena.size_bytes)
    first.view[5 * MIB : 5 * MIB + 4] = b"kept"
    assert bytes(second.view[5 * MIB : 5 * MIB + 4]) == b"kept"
    first.close()
    second.close()


def test_another_process_writes_into_the_arena(arena):
    code = (
        "import sys; from kvcellar.memory.arena import ArenaView\n"
        "view = ArenaView(int(sys.argv[1]), int(sys.argv[2]))\n"
        "view.view[100:105] = b'hello'; view.close()"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(arena.fd), str(arena.size_bytes)],
        pass_fds=[arena.fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=DEADLINE_S,
    )
    view = ArenaView(arena.fd, arena.size_bytes)
    assert bytes(view.view[100:105]) == b"hello"
    view.close()


@pytest.mark.parametrize("seals", [0, SHRINK | SEAL, GROW | SEAL, SHRINK | GROW])
def test_a_file_that_lacks_a_seal_is_not_mapped(seals):
    fd = sealed_file(MIB, seals)
    with pytest.raises(ArenaMapError, match="lacks a seal"):
        ArenaView(fd, MIB)
    os.close(fd)


@pytest.mark.parametrize("size_bytes", [0, PAGE, MIB - PAGE, MIB + PAGE, 4 * GIB, -MIB])
def test_a_file_of_another_size_is_not_mapped(size_bytes):
    fd = sealed_file(MIB, SHRINK | GROW | SEAL)
    with pytest.raises(ArenaMapError, match=f"has {MIB} bytes, the server said {size_bytes}"):
        ArenaView(fd, size_bytes)
    os.close(fd)


def test_a_file_that_cannot_be_written_is_not_mapped():
    fd = sealed_file(MIB, fcntl.F_SEAL_WRITE | SHRINK | GROW | SEAL)
    with pytest.raises(ArenaMapError, match="cannot be mapped"):
        ArenaView(fd, MIB)
    os.close(fd)


def test_a_descriptor_of_something_else_is_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ArenaMapError, match="no sealed memory file"):
        ArenaView(fd, MIB)
    os.close(fd)
    with pytest.raises(ArenaMapError, match="no sealed memory file"):
        ArenaView(fd, MIB)


def test_a_view_closes_twice_and_then_has_no_bytes(arena):
    view = ArenaView(arena.fd, arena.size_bytes)
    before = open_files()
    view.close()
    view.close()
    assert view.is_closed
    assert open_files() == before - 1
    with pytest.raises(AssertionError):
        _ = view.view


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_bytes_that_someone_holds_outlive_the_view(arena):
    view = ArenaView(arena.fd, arena.size_bytes)
    held = view.view[0:4]
    held[:] = b"held"
    before = open_files()
    view.close()
    assert bytes(held) == b"held"
    assert open_files() == before
    held.release()
    assert open_files() == before - 1


# Growth.


def test_growth_hands_out_each_step_in_order_and_ends(arena, caplog):
    caplog.set_level(logging.INFO)
    steps = Steps()
    grower = ArenaGrower(arena, steps, read_memory=lambda: PLENTY)
    grower.start()
    steps.wait_for(3)
    assert grower.stop(DEADLINE_S)
    assert steps.ranges == [arena.step_range(index) for index in range(3)]
    assert held_bytes(arena) == arena.size_bytes
    assert grower.is_done
    assert grower.failure is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_step_is_handed_out_only_with_all_its_memory(arena):
    held = []
    steps = Steps()

    def on_step(offset, size_bytes):
        held.append(held_bytes(arena))
        assert grower.steps_ready == len(held) - 1
        steps(offset, size_bytes)

    grower = ArenaGrower(arena, on_step, read_memory=lambda: PLENTY)
    grower.start()
    steps.wait_for(3)
    assert grower.stop(DEADLINE_S)
    assert grower.failure is None
    assert [size >= end * MIB for size, end in zip(held, (32, 64, 80), strict=True)] == [True] * 3


def test_growth_waits_for_memory_says_so_once_and_goes_on(arena, caplog):
    reserve_bytes = 512 * MIB
    free_bytes = [reserve_bytes + 32 * MIB - 1]
    looks = threading.Semaphore(0)

    def read():
        looks.release()
        total_bytes = 20 * reserve_bytes
        return Memory(total_bytes, free_bytes[0], "the machine", "the control group /x")

    steps = Steps()
    grower = ArenaGrower(arena, steps, read_memory=read, poll_s=0.001)
    grower.start()
    for _ in range(5):
        assert looks.acquire(timeout=DEADLINE_S)
    assert steps.ranges == []
    assert held_bytes(arena) == 0
    assert grower.waits_for_bytes == 1
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert text.startswith("arena waits for memory ")
    assert "544.00 MiB" in text
    assert "/x" in text

    free_bytes[0] += 1
    steps.wait_for(3)
    assert grower.stop(DEADLINE_S)
    assert grower.waits_for_bytes == 0
    assert len(caplog.records) == 1


class FullArena(Arena):
    """An arena for which the kernel has no memory at first."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.failures = []

    def grow_range(self, offset, size_bytes):
        if self.failures:
            raise OSError(self.failures.pop(), "no memory for this test")
        super().grow_range(offset, size_bytes)


def test_a_kernel_without_memory_is_asked_again(caplog):
    arena = FullArena.create(48 * MIB, 32 * MIB)
    arena.failures = [errno.ENOSPC, errno.ENOMEM, errno.ENOMEM]
    looks = []
    steps = Steps()
    grower = ArenaGrower(arena, steps, read_memory=lambda: looks.append(1) or PLENTY, poll_s=0.001)
    grower.start()
    steps.wait_for(2)
    assert grower.stop(DEADLINE_S)
    assert grower.failure is None
    assert held_bytes(arena) == 48 * MIB
    assert len(looks) == 2 + 3, "one look a step, and one after each refusal"
    assert len(caplog.records) == 1
    arena.close()


def test_a_failure_that_is_not_about_memory_is_kept_for_the_health_check(caplog):
    arena = FullArena.create(48 * MIB, 32 * MIB)
    arena.failures = [errno.EIO]
    grower = ArenaGrower(arena, Steps(), read_memory=lambda: PLENTY)
    grower.start()
    grower._thread.join(DEADLINE_S)
    assert grower.failure == "OSError: [Errno 5] no memory for this test"
    assert not grower.is_done
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert grower.stop()
    arena.close()


def test_a_stop_ends_a_wait_at_once(arena):
    looked = threading.Event()

    def read():
        looked.set()
        return Memory(GIB, 0, "the machine", "the machine")

    grower = ArenaGrower(arena, Steps(), read_memory=read, poll_s=3600)
    grower.start()
    assert looked.wait(DEADLINE_S)
    assert grower.stop(DEADLINE_S)
    assert grower.stop()


class GatedArena(Arena):
    """An arena whose first piece arrives when the test says so."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def grow_range(self, offset, size_bytes):
        super().grow_range(offset, size_bytes)
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)


def test_a_stop_inside_a_step_waits_for_one_piece_only():
    arena = GatedArena.create(GIB, GIB)
    steps = Steps()
    grower = ArenaGrower(arena, steps, read_memory=lambda: PLENTY)
    grower.start()
    assert arena.entered.wait(DEADLINE_S)
    assert not grower.stop(0.0)
    arena.gate.set()
    assert grower.stop(DEADLINE_S)
    assert steps.ranges == []
    assert held_bytes(arena) == 16 * MIB
    arena.close()


def test_free_memory_is_looked_at_again_within_a_step():
    """A step of 1 GiB may begin when it fits, and must stop when others took the memory."""
    arena = Arena.create(GIB, GIB)
    looks = threading.Semaphore(0)
    answers = [64 * GIB, 64 * GIB]

    def read():
        looks.release()
        free_bytes = answers.pop(0) if answers else 0
        return Memory(64 * GIB, free_bytes, "the machine", "the machine")

    grower = ArenaGrower(arena, Steps(), read_memory=read, poll_s=0.001)
    grower.start()
    for _ in range(4):
        assert looks.acquire(timeout=DEADLINE_S)
    assert held_bytes(arena) == 256 * MIB
    assert grower.stop(DEADLINE_S)
    arena.close()


def test_a_grower_that_never_started_stops(arena):
    assert ArenaGrower(arena, Steps(), read_memory=lambda: PLENTY).stop()


def test_the_server_side_needs_neither_numpy_nor_numba():
    code = (
        "import sys\n"
        "import kvcellar.memory.slots, kvcellar.memory.arena, kvcellar.memory.limits\n"
        "print(sorted({'numpy', 'numba', 'torch', 'kvcellar.memory.seal'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert output.stdout.strip() == "[]"
