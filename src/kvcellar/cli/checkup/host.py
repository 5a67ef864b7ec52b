"""What the host gives: memory, huge pages, limits, the kernel, processors.

Small files under /proc and /sys, and limits of this process, which a server that is started from
here inherits. Used by `kvcellar doctor`.
"""

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from kvcellar.cli.checkup.findings import Finding, note, ok, problem
from kvcellar.errors import ConfigError
from kvcellar.memory.limits import MemoryReader, check_l1_size, reserve_bytes
from kvcellar.units import GIB, format_bytes

__all__ = ["examine_host"]

_FILES_MIN = 1_024
_CPUS_MIN = 2
_HUGE = Path("sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KERNEL_FIX = "run it on Linux 5.3 or newer"


def examine_host(l1_bytes: int | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what was found.

    Args:
        l1_bytes: the size that a server is to have; None if that is not known.
        root: where /proc and /sys are.
    """
    yield _kernel()
    yield _memory(l1_bytes, root)
    yield _huge_pages(root)
    yield _open_files()
    yield _locked_memory()
    yield _processors()


def _kernel() -> Finding:
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if not missing:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            missing = [f"pidfd_open ({error.strerror})"]
    name = f"{platform.system()} {platform.release()}"
    if missing:
        return problem("kernel", f"{name} lacks {', '.join(missing)}", _KERNEL_FIX)
    return ok("kernel", name)


def _memory(l1_bytes: int | None, root: Path) -> Finding:
    try:
        memory = MemoryReader(root).read()
    except ValueError as error:
        return problem("memory", str(error), "mount /proc")
    found = (
        f"{format_bytes(memory.available_bytes)} free of {format_bytes(memory.total_bytes)} "
        f"(limit of {memory.total_from})"
    )
    most_bytes = memory.total_bytes - reserve_bytes(memory.total_bytes)
    if l1_bytes is None:
        return ok("memory", f"{found}; --l1-size-gb can be {max(most_bytes, 0) / GIB:.1f} at most")
    try:
        check_l1_size(l1_bytes, memory)
    except ConfigError as error:
        return problem("memory", found, str(error))
    if l1_bytes > memory.available_bytes:
        return problem(
            "memory",
            f"{found}, less than the {format_bytes(l1_bytes)} that L1 is to have",
            "stop what else uses memory, or lower --l1-size-gb; L1 waits until it is free",
        )
    return ok("memory", f"{found}; an L1 of {format_bytes(l1_bytes)} fits")


def _huge_pages(root: Path) -> Finding:
    try:
        text = (root / _HUGE).read_text(encoding="ascii")
    except OSError:
        return note("huge pages", "this kernel has none for shared memory")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in {"always", "within_size", "advise", "force"}:
        return ok("huge pages", f"shared memory: {chosen}")
    return note(
        "huge pages",
        f"shared memory: {chosen or 'unknown'}; small pages work, with more work for the kernel",
        f"echo within_size | sudo tee /{_HUGE}",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FILES_MIN:
        return problem(
            "open files",
            f"at most {hard} (ulimit -Hn); each engine process takes two",
            f"ulimit -Hn {_FILES_MIN * 64} as root, or LimitNOFILE= in the unit",
        )
    return ok("open files", f"ulimit -n {soft}, raised to {_shown(hard)} by the server")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return ok("locked memory", f"ulimit -l {_shown(soft)}; the server locks none")


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _processors() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < _CPUS_MIN:
        return note("processors", f"{count}: an engine and the server share it")
    return ok("processors", str(count))
