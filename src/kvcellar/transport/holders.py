"""Which process listens on a TCP port of this host, as far as this user may know.

Read from /proc: the port's sockets, then who has them open. Processes of other users hide their
descriptors, so the answer may be that nobody can be named. Asked when a port is taken and by
`kvcellar doctor`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Holder", "port_holder"]

_LISTENING = "0A"
_TABLES = ("tcp", "tcp6")


class Holder(NamedTuple):
    """A process: its id and the start of its command line."""

    pid: int
    command: str


def port_holder(port: int, proc: Path = Path("/proc")) -> Holder | None:
    """Return a process that listens on `port`, None if none can be seen.

    Reads the descriptors of every process of this user: some ten milliseconds, no blocking.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not wanted:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in wanted for fd in (folder / "fd").iterdir()):
                return Holder(int(folder.name), _command(folder))
    return None


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in _TABLES:
        text = ""
        with contextlib.suppress(OSError):
            text = (proc / "net" / table).read_text(encoding="ascii")
        for line in text.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _command(folder: Path) -> str:
    words = (folder / "cmdline").read_bytes().split(b"\0")
    text = b" ".join(words).decode("utf-8", "replace").strip()
    return text[:120] or (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
