"""How much memory there is, and how much of it is free: the machine's and each control group's.

In a container the kernel reports the whole machine's memory, while the container's group is
killed at its own limit; so both are read, for every group from this process's own up to the root
and for both generations of control groups, and the smallest figure counts. The server checks
`--l1-size-gb` with it at start, and the arena grows only into what it says is free. Parsing is
pure; `MemoryReader` is the one door to /proc and /sys.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from kvcellar.errors import ConfigError
from kvcellar.units import GIB, MIB, format_bytes

__all__ = [
    "CgroupMount",
    "Memory",
    "MemoryReader",
    "check_l1_size",
    "group_folders",
    "parse_groups",
    "parse_meminfo",
    "parse_mounts",
    "parse_stat",
    "read_memory",
    "reserve_bytes",
]

Generation = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory as the tightest of all limits leaves it.

    Attributes:
        total_bytes: the most that this process and those it shares a limit with can have.
        available_bytes: what can be taken now without swapping or being killed; page cache that
            the kernel would give up counts as available.
        total_from: whose limit `total_bytes` is, for people.
        available_from: whose limit `available_bytes` is, for people.
    """

    total_bytes: int
    available_bytes: int
    total_from: str
    available_from: str


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """A mounted hierarchy of control groups that can limit memory.

    Attributes:
        generation: 1 or 2.
        root: the group that is mounted, as paths in /proc/self/cgroup name it.
        mount_point: where.
    """

    generation: Generation
    root: str
    mount_point: str


def reserve_bytes(total_bytes: int) -> int:
    """Return what the arena leaves free for others: a twentieth, 256 MiB to 8 GiB."""
    return min(max(total_bytes // 20, 256 * MIB), 8 * GIB)


def parse_meminfo(text: str) -> Memory:
    """Return the machine's memory from the text of /proc/meminfo.

    Raises:
        ValueError: MemTotal or MemAvailable is missing.
    """
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    if len(found) != 2:
        raise ValueError("/proc/meminfo has no MemTotal or no MemAvailable")
    total_bytes = int(found["MemTotal"]) * 1024
    return Memory(total_bytes, int(found["MemAvailable"]) * 1024, "the machine", "the machine")


def parse_groups(text: str) -> dict[Generation, str]:
    """Return this process's memory group in each generation, from /proc/self/cgroup's text."""
    groups: dict[Generation, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            groups[1] = path
        elif number == "0" and not controllers:
            groups[2] = path
    return groups


def parse_mounts(text: str) -> list[CgroupMount]:
    """Return the mounted hierarchies that can limit memory, from /proc/self/mountinfo's text."""
    mounts: list[CgroupMount] = []
    for line in text.splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.partition(" ")
        if kind == "cgroup2":
            generation: Generation = 2
        elif kind == "cgroup" and "memory" in options.split(" ")[-1].split(","):
            generation = 1
        else:
            continue
        root, mount_point = (_unescape(field) for field in fields.split(" ")[3:5])
        mounts.append(CgroupMount(generation, root, mount_point))
    return mounts


def group_folders(mounts: Iterable[CgroupMount], groups: dict[Generation, str]) -> list[str]:
    """Return the folders of this process's groups and all groups above, as far as mounted.

    Args:
        mounts: see `parse_mounts`.
        groups: see `parse_groups`. A group outside of what is mounted (another namespace's) is
            looked for at the mount point itself, which is what a container sees as its own.
    """
    folders: list[str] = []
    for mount in mounts:
        group = PurePosixPath(groups.get(mount.generation, mount.root))
        below = PurePosixPath()
        if group.is_relative_to(mount.root) and ".." not in group.parts:
            below = group.relative_to(mount.root)
        folders += [str(PurePosixPath(mount.mount_point, part)) for part in (below, *below.parents)]
    return list(dict.fromkeys(folders))


def parse_stat(text: str) -> int:
    """Return the bytes that the kernel would give up before it kills, from a memory.stat's text.

    The arena's own pages are not among them: shared memory is not on the lists of files.
    """
    found = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    # The first generation counts a group alone without the prefix, with those below it with it.
    prefix = "total_" if "total_inactive_file" in found else ""
    names = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
    return sum(int(found.get(name, 0)) for name in names)


class MemoryReader:
    """Reads how much memory there is, as often as asked; small files, no blocking.

    A process seldom changes its group, so the folders are found once.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        proc = root / "proc"
        self._meminfo = proc / "meminfo"
        groups = parse_groups(_text(proc / "self" / "cgroup"))
        mounts = parse_mounts(_text(proc / "self" / "mountinfo"))
        self._folders = group_folders(mounts, groups)

    def read(self) -> Memory:
        """Return the memory as it is now.

        Raises:
            ValueError: /proc/meminfo cannot be read or understood; no Linux has that.
        """
        machine = parse_meminfo(_text(self._meminfo))
        groups = [
            found
            for folder in self._folders
            if (found := self._group(folder, machine.total_bytes)) is not None
        ]
        tightest = min([machine, *groups], key=lambda memory: memory.total_bytes)
        fullest = min([machine, *groups], key=lambda memory: memory.available_bytes)
        return Memory(
            tightest.total_bytes, fullest.available_bytes, tightest.total_from, fullest.total_from
        )

    def _group(self, folder: str, machine_bytes: int) -> Memory | None:
        """Return what one group allows, None where it has no limit below the machine's."""
        path = self._root / folder.lstrip("/")
        limits = [
            int(text)
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (text := _text(path / name).strip()).isdigit()
        ]
        limit_bytes = min(limits, default=machine_bytes)
        if limit_bytes >= machine_bytes:
            return None
        used = _text(path / "memory.current") or _text(path / "memory.usage_in_bytes")
        if not used:
            return None
        taken_bytes = int(used) - parse_stat(_text(path / "memory.stat"))
        name = f"the control group {folder}"
        return Memory(limit_bytes, max(0, limit_bytes - taken_bytes), name, name)


def read_memory() -> Memory:
    """Return this machine's memory as it is now, seen from this process."""
    return MemoryReader().read()


def check_l1_size(size_bytes: int, memory: Memory | None = None) -> None:
    """Refuse an L1 that could never be filled.

    Args:
        size_bytes: the size asked for.
        memory: read now when not given.

    Raises:
        ConfigError: L1 is larger than the memory there is; the message has both numbers.
    """
    memory = memory or read_memory()
    # Growth never takes the reserve, so an L1 that needs it would wait for ever.
    most_bytes = memory.total_bytes - reserve_bytes(memory.total_bytes)
    if size_bytes <= most_bytes:
        return
    most_gb = most_bytes * 100 // GIB / 100
    raise ConfigError(
        f"--l1-size-gb: an L1 of {format_bytes(size_bytes)} does not fit into the memory there is, "
        f"{format_bytes(memory.total_bytes)} (limit of {memory.total_from}), less a reserve of "
        f"{format_bytes(reserve_bytes(memory.total_bytes))}; "
        + (f"set --l1-size-gb to {most_gb:g} or less" if most_gb > 0 else "give it more memory")
        + ", the engines' own needs not counted"
    )


def _text(path: Path) -> str:
    """Return a file's text, "" where there is none: a group can vanish while it is read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
