"""Writes a chunk to a file and reads it back, proved: the only code that touches its bytes.

A file holds one record (`record`). Header and shards move in one vectored call between the file
and the caller's views; only the header and what is left of a shard below a whole page pass through
a small buffer of the thread's own. Called on the file-system tier's threads.
"""

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from kvcellar.memory.seal import seal
from kvcellar.tiers.base import ChunkRecord, ChunkWrite, ReadWant
from kvcellar.tiers.folder import BLOCK_BYTES
from kvcellar.tiers.record import (
    ALIGNMENT,
    SHARDS_MAX,
    RecordError,
    header_bytes,
    mismatch,
    pack_header,
    parse_header,
    record_bytes,
)

__all__ = ["DamagedRecordError", "occupied_bytes", "read_chunk", "read_header", "write_chunk"]

_IOVECS_MAX = 1024
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS = bytes(ALIGNMENT)

Parts = Sequence[memoryview]
Vectored = Callable[[int, Parts, int], int]
_Result = TypeVar("_Result")


class DamagedRecordError(Exception):
    """A file is not the record that it should be; the text says in what."""


class _Scratch(threading.local):
    """Aligned memory of one thread, for headers and for what is left of shards."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))

    def take(self, size_bytes: int) -> memoryview:
        """Return so many bytes; the thread's next call gives the same ones."""
        if self._view.nbytes < size_bytes:
            self._view = memoryview(mmap.mmap(-1, size_bytes))
        return self._view[:size_bytes]


_SCRATCH = _Scratch()


def occupied_bytes(path: Path) -> int:
    """Return what a file takes on its medium.

    Raises:
        OSError: it is not there, or cannot be asked.
    """
    return path.lstat().st_blocks * BLOCK_BYTES


def write_chunk(
    temporary: Path,
    path: Path,
    write: ChunkWrite,
    disk: AbstractContextManager[object],
    *,
    direct: bool,
) -> int:
    """Make a file that appears as a whole under `path`, replacing what is there.

    Args:
        temporary: where it is written first, on the same file system; gone afterwards.
        path: where it appears; its folder is made where it is missing.
        write: record and views.
        disk: held while the file is written.
        direct: with O_DIRECT.

    Returns:
        What the file occupies.

    Raises:
        OSError: nothing changed under `path`.
    """
    parts = _parts(write.record.shard_bytes, write.views, is_write=True)
    header = pack_header(write.record)
    parts[0][: len(header)] = header
    try:
        with disk:
            status = _write(temporary, parts, direct=direct)
        _with_folder(path.parent, lambda: temporary.replace(path))
    except BaseException:
        _forget(temporary)
        raise
    return max(status.st_size, status.st_blocks * BLOCK_BYTES)


def read_chunk(
    path: Path, want: ReadWant, disk: AbstractContextManager[object], *, direct: bool
) -> tuple[tuple[int, ...], int]:
    """Read a file into the views of `want` and prove every byte of it.

    Args:
        path: the file.
        want: what it has to be, and where to.
        disk: held while the file is read and not while its bytes are proved.
        direct: with O_DIRECT.

    Returns:
        The shards' seals, and what the file occupies.

    Raises:
        DamagedRecordError: the file is not what was stored under this key.
        OSError: it is not there, or cannot be read.
    """
    parts = _parts(want.shard_bytes, want.views, is_write=False)
    with disk:
        occupied = _read(path, parts, record_bytes(want.shard_bytes), direct=direct)
    return _prove(want, parts), occupied


def read_header(path: Path, key: bytes) -> ChunkRecord:
    """Return the record of a file without its shards, and without counting as a use of it.

    Raises:
        DamagedRecordError: it is not a record of this key, or not as long as it says.
        OSError: it is not there, or cannot be read.
    """
    try:
        fd = os.open(path, _READ | os.O_NOATIME)
    except PermissionError:
        # Somebody else's file: only its owner may read without leaving a trace.
        fd = os.open(path, _READ)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedRecordError("not a file")
        # Only what is needed: the rest must not push anything out of the page cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        header = os.pread(fd, ALIGNMENT, 0)
        if status.st_size > len(header):
            header += os.pread(fd, _further_bytes(header), len(header))
    finally:
        os.close(fd)
    try:
        record = parse_header(header)
    except RecordError as error:
        raise DamagedRecordError(str(error)) from error
    if record.key != key:
        raise DamagedRecordError("the record of another key")
    if status.st_size != record_bytes(record.shard_bytes):
        raise DamagedRecordError(f"{status.st_size} bytes, not those of its shards")
    return record


def _write(path: Path, parts: Parts, *, direct: bool) -> os.stat_result:
    """Write a new file, and return its status."""
    flags = _WRITE | (os.O_DIRECT if direct else 0)
    fd = _with_folder(path.parent, lambda: os.open(path, flags, 0o600))
    try:
        if _move(os.pwritev, fd, parts) != sum(map(len, parts)):
            raise OSError(errno.ENOSPC, "not all of it was written")
        return os.fstat(fd)
    finally:
        os.close(fd)


def _read(path: Path, parts: Parts, size_bytes: int, *, direct: bool) -> int:
    """Read a whole file of exactly this size, and return what it occupies."""
    try:
        fd = os.open(path, _READ | (os.O_DIRECT if direct else 0))
    except OSError as error:
        # What is no file fails in many ways: a link with ELOOP, a pipe or folder with EINVAL.
        if stat.S_ISREG(path.lstat().st_mode):
            raise
        raise DamagedRecordError("not a file") from error
    try:
        status = os.fstat(fd)
        if status.st_size != size_bytes or not stat.S_ISREG(status.st_mode):
            raise DamagedRecordError(f"{status.st_size} bytes instead of {size_bytes}")
        if _move(os.preadv, fd, parts) != size_bytes:
            raise DamagedRecordError("it ends too early")
        return status.st_blocks * BLOCK_BYTES
    finally:
        os.close(fd)


def _further_bytes(header: bytes) -> int:
    """Return how much of a header may follow its first page; the claim is checked afterwards."""
    claimed_bytes = int.from_bytes(header[12:16], "little")
    return max(0, min(claimed_bytes, header_bytes(SHARDS_MAX)) - len(header))


def _parts(
    shard_bytes: Sequence[int], views: Sequence[memoryview], *, is_write: bool
) -> list[memoryview]:
    """Return the pieces of memory that make a record: all aligned, all whole pages.

    The first is the header. Of a shard that is no whole number of pages the rest passes through
    the scratch memory; for a write it is put there, followed by zeros.
    """
    assert len(views) == len(shard_bytes), (len(views), shard_bytes)
    head_bytes = header_bytes(len(shard_bytes))
    rests = sum(1 for size in shard_bytes if size % ALIGNMENT)
    scratch = _SCRATCH.take(head_bytes + rests * ALIGNMENT)
    parts = [scratch[:head_bytes]]
    used = head_bytes
    for size, view in zip(shard_bytes, views, strict=True):
        whole = view.cast("B")
        assert len(whole) == size, (len(whole), size)
        body_bytes = size // ALIGNMENT * ALIGNMENT
        if body_bytes:
            parts.append(whole[:body_bytes])
        if body_bytes < size:
            page = scratch[used : used + ALIGNMENT]
            used += ALIGNMENT
            if is_write:
                page[: size - body_bytes] = whole[body_bytes:]
                page[size - body_bytes :] = _ZEROS[size - body_bytes :]
            parts.append(page)
    return parts


def _prove(want: ReadWant, parts: Parts) -> tuple[int, ...]:
    """Check a record that was read, and copy the rests of its shards to their views.

    Raises:
        DamagedRecordError: something does not match.
    """
    try:
        record = parse_header(parts[0])
    except RecordError as error:
        raise DamagedRecordError(str(error)) from error
    field = mismatch(record, want)
    if field:
        raise DamagedRecordError(f"another {field}")
    rest_pages = iter(page for page in parts[1:] if page.obj is parts[0].obj)
    shards = zip(want.shard_bytes, want.views, record.seals, strict=True)
    for index, (size, view, expected) in enumerate(shards):
        rest_bytes = size % ALIGNMENT
        if rest_bytes:
            page = next(rest_pages)
            view.cast("B")[size - rest_bytes :] = page[:rest_bytes]
            if page[rest_bytes:] != _ZEROS[rest_bytes:]:
                raise DamagedRecordError(f"bytes behind shard {index}")
        if seal(view, want.key, index) != expected:
            raise DamagedRecordError(f"the seal of shard {index} does not match")
    return record.seals


def _move(call: Vectored, fd: int, parts: Parts) -> int:
    """Read or write all parts from the file's beginning on; returns the bytes moved.

    Raises:
        OSError: the kernel's.
    """
    done = 0
    pending = list(parts)
    while pending:
        moved = call(fd, pending[:_IOVECS_MAX], done)
        if moved <= 0:
            break
        done += moved
        while pending and moved >= len(pending[0]):
            moved -= len(pending.pop(0))
        if moved:
            pending[0] = pending[0][moved:]
    return done


def _with_folder(folder: Path, act: Callable[[], _Result]) -> _Result:
    """Do something in a folder, and make the folder if that was missing."""
    try:
        return act()
    except FileNotFoundError:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return act()


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # The next start removes it; a medium that fails has been reported by the caller.
        return
