"""Process descriptors: the kernel tells when a process ends, and cannot mistake it for another.

A pid is reused, a socket is kept open by a forked child, a timer guesses; a pidfd is right in all
three cases and across PID namespaces. The client opens its own and sends it with its hello; the
server checks what came and watches it.
"""

import os
import select
from pathlib import Path

__all__ = ["has_ended", "is_pidfd", "open_own_pidfd", "open_pidfd", "pidfd_pid"]


def open_own_pidfd() -> int | None:
    """Return a new pidfd of this process, or None where the kernel has none or forbids it.

    The caller closes it; it is closed on exec.
    """
    return open_pidfd(os.getpid())


def open_pidfd(pid: int) -> int | None:
    """Return a new pidfd of a process as seen from here, or None where there is none to have.

    The caller closes it; it is closed on exec.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        # AttributeError: a Python built against an older kernel's headers lacks the call.
        return None


def pidfd_pid(fd: int) -> int | None:
    """Return the pid behind a pidfd, or None when `fd` is no pidfd.

    -1 means that the process has ended and was reaped, 0 that it lives in a PID namespace that
    cannot be seen from here.
    """
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return None


def is_pidfd(fd: int) -> bool:
    """Return whether a descriptor, such as one that a peer sent, is a pidfd."""
    return pidfd_pid(fd) is not None


def has_ended(fd: int, *, timeout_s: float = 0.0) -> bool:
    """Return whether the process behind a pidfd has ended; blocks for up to `timeout_s`."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000.0))
