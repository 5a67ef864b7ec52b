"""The folder of a file-system tier: its owner, its file names, and what was in it at start.

A chunk is `<first two digits>/<64 digits>.kv` below the base, a write begins as
`<64 digits>.<number>.tmp` in the folder for temporary files, and `.owner` names the process that
holds the lock. Anything else there is a stray: counted, and left alone. The tier calls this;
walking is done in slices on the tier's own thread.
"""

import errno
import fcntl
import mmap
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcellar.errors import TierOwnedError
from kvcellar.telemetry.logs import EventLog
from kvcellar.tiers.record import ALIGNMENT

__all__ = ["BLOCK_BYTES", "SUFFIX", "Folder", "Seen"]

BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own blocks are."""
SUFFIX = ".kv"
_OWNER = ".owner"
_CHUNK = re.compile(r"[0-9a-f]{64}\.kv", re.ASCII)
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp", re.ASCII)
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_log = EventLog("kvcellar.tiers")


class Seen(NamedTuple):
    """One thing that a walk met.

    Attributes:
        kind: "chunk", "folder" or "stray".
        name: of a folder below the base, "." for the base itself; a chunk's digits.
        occupied_bytes: what it takes.
        used_s: when a chunk was last used or written, in seconds since 1970.
    """

    kind: str
    name: str
    occupied_bytes: int
    used_s: float


class Folder:
    """One base folder, held by this process unless it is shared."""

    def __init__(self, base: Path, temporary: str, *, is_shared: bool) -> None:
        """Make the folders, take the lock, and remove what writes of a dead process left.

        Args:
            base: made with mode 0700 where it is missing.
            temporary: name of the folder for temporary files, below the base.
            is_shared: other processes use it as well: no lock is taken and no temporary file
                removed.

        Raises:
            TierOwnedError: another process has it.
            OSError: it cannot be made or read.
        """
        self.base = base
        self.temporary = base / temporary
        self._is_shared = is_shared
        self._lock_fd = -1
        self._lock_fd = self._lock()
        self._device = base.stat().st_dev
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def path(self, key: bytes) -> Path:
        """Return where a chunk is, or would be."""
        name = key.hex()
        return self.base / name[:2] / f"{name}{SUFFIX}"

    def temporary_path(self, key: bytes, number: int) -> Path:
        """Return where a write begins; `number` makes it unique in this process."""
        return self.temporary / f"{key.hex()}.{number}.tmp"

    def occupied_bytes(self, name: str) -> int:
        """Return what a folder itself takes; 0 where it cannot be asked."""
        try:
            return (self.base / name).lstat().st_blocks * BLOCK_BYTES
        except OSError:
            return 0

    def check_device(self) -> None:
        """Make sure that the base is still on the file system that was opened.

        A disk that was unmounted leaves an empty folder on the one below: nothing there is missing
        chunks of ours, and nothing must be written there.

        Raises:
            OSError: ENODEV when it is not.
        """
        if self.base.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, "another file system is mounted on base_path now")

    def can_bypass_the_page_cache(self) -> bool:
        """Return whether files here can be written and read with O_DIRECT; tries it once."""
        path = self.temporary / f"{'0' * 64}.{os.getpid()}.tmp"
        page = mmap.mmap(-1, ALIGNMENT)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            try:
                written = os.pwritev(fd, [page], 0)
                return written == os.preadv(fd, [page], 0) == ALIGNMENT
            finally:
                os.close(fd)
                path.unlink()
        except OSError as error:
            # A full or read-only file system says nothing about O_DIRECT; EINVAL says no.
            return error.errno not in {errno.EINVAL, errno.ENOTSUP}
        finally:
            page.close()

    def walk(self) -> Iterator[Seen]:
        """Yield everything below the base, folders included; what vanishes meanwhile is left out.

        Blocks between two yields for some system calls only. Not ours to enter (another file
        system, no permission) counts with what it takes itself.
        """
        device = self.base.stat().st_dev
        pending = [""]
        while pending:
            name = pending.pop()
            path = self.base / name
            try:
                status = path.lstat()
                occupied_bytes = status.st_blocks * BLOCK_BYTES
                yield Seen("folder", name or ".", occupied_bytes, 0.0)
                if status.st_dev != device:
                    continue
                with os.scandir(path) as entries:
                    for entry in entries:
                        below = f"{name}/{entry.name}" if name else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(below)
                        else:
                            yield from _see(entry, name)
            except OSError as error:
                _log.debug("folder not read", folder=name, reason=error.strerror)

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> int:
        """Return the descriptor that holds the lock, -1 where there is nothing to lock."""
        try:
            self.base.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _READ_ONLY or not self.base.is_dir():
                raise
        if self._is_shared:
            return -1
        path = self.base / _OWNER
        try:
            # Read-only, so that the file system can be made so while we hold it.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Read-only: chunks can be served, and nobody can write them behind our back.
            if error.errno not in _READ_ONLY:
                raise
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 256, 0).decode("utf-8", "replace").strip() or "another process"
            os.close(fd)
            raise TierOwnedError(
                f"base_path {self.base} is used by {owner}: stop it, choose another folder, or "
                'write "shared": true where several servers are to use one folder'
            ) from None
        except BaseException:
            os.close(fd)
            raise
        try:
            path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        except OSError as error:
            # A full disk must not keep us from reading.
            _log.warning("owner not written", reason=error.strerror)
        return fd

    def _prepare(self) -> None:
        try:
            self.temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            # Full or read-only: chunks can still be read, and writes will say why they fail.
            _log.warning("folder for temporary files not made", reason=error.strerror)
            return
        if self._is_shared:
            return
        removed = 0
        with os.scandir(self.temporary) as entries:
            for entry in entries:
                if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    try:
                        Path(entry.path).unlink()
                    except OSError as error:
                        _log.warning("temporary file not removed", reason=error.strerror)
                    else:
                        removed += 1
        if removed:
            _log.info("removed unfinished writes", files=removed, base_path=self.base)


def _see(entry: os.DirEntry[str], folder: str) -> Iterator[Seen]:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return
    occupied_bytes = status.st_blocks * BLOCK_BYTES
    is_chunk = _CHUNK.fullmatch(entry.name) and entry.name[:2] == folder
    if is_chunk and stat.S_ISREG(status.st_mode):
        used_s = max(status.st_atime, status.st_mtime)
        yield Seen("chunk", entry.name.removesuffix(SUFFIX), occupied_bytes, used_s)
    else:
        yield Seen("stray", entry.name, occupied_bytes, 0.0)
