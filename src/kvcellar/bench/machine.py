"""What the figures were measured on: the machine, how busy it was, and the versions.

A figure without them says nothing. The load is read before and after each part.
"""

import contextlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from kvcellar import __version__
from kvcellar.memory.limits import read_memory
from kvcellar.units import format_bytes

__all__ = ["children_of", "load_average", "machine_facts", "memory_of", "version_of"]

_SHOWN = ("torch", "vllm", "numpy", "numba", "msgspec")


def machine_facts() -> dict[str, str]:
    """Return what to show above the figures."""
    memory = read_memory()
    cores = len(os.sched_getaffinity(0))
    versions = [f"kvcellar {__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {found}" for name in _SHOWN if (found := version_of(name))]
    return {
        "machine": f"{_cpu_model()}, {cores} cores, {format_bytes(memory.total_bytes)}, "
        f"{platform.system()} {platform.release()}",
        "versions": ", ".join(versions),
    }


def load_average() -> str:
    """Return how many processes wanted a core over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def version_of(distribution: str) -> str:
    """Return a distribution's version in this environment, empty where it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text(encoding="ascii").split()]


def memory_of(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes: Rss, Pss (shared pages divided), Private.

    Shared memory that it has not mapped, such as the arena, is in none of them.
    """
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            fields[name] = int(rest.split()[0]) * 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"Rss": fields["Rss"], "Pss": fields["Pss"], "Private": private}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{sys.platform} {platform.machine()}"
