"""Start real programs for a test, wait for them with deadlines, and leave nothing of them behind.

Each program runs in a session of its own, with its output in a file and a mark in its environment,
so that whatever it spawned can be found again, also after the program itself was killed. It takes
both: a cache server's child has a session of its own, and a process that sets its title, as vLLM's
do, overwrites the kernel's copy of its environment. Used by `cellar` and `engine`; knows neither.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

__all__ = ["NO_REUSE", "ROOT", "Program", "Surroundings", "eventually", "free_port"]

ROOT = Path(__file__).parent.parent.parent
POLL_S = 0.02
NO_REUSE = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: a program that closes an idle one just then fails no test."""

# As in an activated virtual environment: the commands of the interpreter that runs the tests.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
_MARK = "E2E_PROGRAM"
_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_VLLM_NAMES = ("vllm_dist_", "psm_", "sem.mp-")
_LIBC = ctypes.CDLL(None, use_errno=True)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(probe: Callable[[], object], timeout_s: float, *, what: str) -> object:
    """Return the first true value of `probe`, asked again and again; fail after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            message = f"not within {timeout_s:g} s: {what} (last seen: {value!r})"
            raise AssertionError(message)
        time.sleep(POLL_S)


class Program:
    """One program under test, with all that it spawns.

    Attributes:
        name: for messages and the log's name.
        log: the file with its output; appended to over several lives.
        pid: of its newest life.
        ports: those that it listens on while it lives.
    """

    def __init__(self, name: str, command: Sequence[str], *, folder: Path) -> None:
        self.name = name
        self.command = [str(word) for word in command]
        self.log = folder / f"{name}.log"
        self.pid = 0
        self.ports: tuple[int, ...] = ()
        self._mark = secrets.token_hex(8)
        self._popen: subprocess.Popen[bytes] | None = None
        self._lives: list[int] = []

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it; returns at once. It ends with this process, however that ends."""
        assert not self.is_alive, f"{self.name} runs already"
        # The kernel would end it with the thread that started it.
        assert threading.current_thread() is threading.main_thread()
        with self.log.open("ab") as log:
            self._lives.append(log.tell())
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PATH": _PATH, _MARK: self._mark, **(environment or {})},
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread of ours holds a lock here.
            )
        self.pid = self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether the program's own process runs (its children may outlive it)."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The newest life's exit code, None while it runs; negative for a signal."""
        return None if self._popen is None else self._popen.poll()

    def members(self) -> list[psutil.Process]:
        """Return every live process of the program, its own first."""
        if self._popen is None:
            # Its pid would be 0, which is the session of the machine's first process.
            return []
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = os.getsid(process.pid) == self.pid or (
                    process.environ().get(_MARK) == self._mark
                )
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
        return sorted(found, key=lambda process: process.pid != self.pid)

    def wait_until(self, probe: Callable[[], object], timeout_s: float, *, what: str) -> None:
        """Wait for `probe`; fail with the log's tail when the program dies or is too slow."""
        deadline = time.monotonic() + timeout_s
        while not probe():
            if not self.is_alive:
                message = f"{self.name} ended with {self.exit_code} before {what}:\n{self.tail()}"
                raise AssertionError(message)
            if time.monotonic() > deadline:
                message = f"{self.name}: no {what} within {timeout_s:g} s:\n{self.tail()}"
                raise AssertionError(message)
            time.sleep(POLL_S)

    def wait_for_end(self, timeout_s: float) -> int:
        """Return the exit code once the program has ended by itself."""
        assert self._popen is not None
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{self.name} still runs after {timeout_s:g} s:\n{self.tail()}"
            raise AssertionError(message) from None

    def stop(self, timeout_s: float = 30.0) -> float:
        """Ask it to end (SIGTERM) and wait for all of it; returns the seconds that took.

        Raises:
            AssertionError: something of it was still there at the deadline; it is killed then.
        """
        started = time.monotonic()
        if self.is_alive:
            self.signal(signal.SIGTERM)
        try:
            eventually(self._is_gone, timeout_s, what=f"the end of {self.name}")
        except AssertionError:
            left = [f"{process.pid} {' '.join(process.cmdline())}" for process in self.members()]
            self.kill_all()
            message = f"{self.name} left {left} {timeout_s:g} s after SIGTERM:\n{self.tail()}"
            raise AssertionError(message) from None
        return time.monotonic() - started

    def close(self) -> None:
        """Let go of what talks to the program; it is not used any more."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program's own process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the program's own process and reap it; its children notice by themselves."""
        assert self._popen is not None
        self.signal(signal.SIGKILL)
        self._popen.wait(10)

    def kill_all(self) -> None:
        """SIGKILL everything of it at once, as a host that loses power would."""
        for process in self.members():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        eventually(self._is_gone, 10.0, what=f"the death of {self.name}")

    def freeze(self) -> None:
        """SIGSTOP everything of it."""
        for process in self.members():
            process.suspend()

    def thaw(self) -> None:
        """SIGCONT everything of it."""
        for process in self.members():
            process.resume()

    def output(self) -> str:
        """Return what the newest life has written."""
        return self.log.read_bytes()[self._lives[-1] :].decode(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """Return the last lines that it wrote."""
        return "\n".join(self.output().splitlines()[-lines:])

    def _is_gone(self) -> bool:
        return not self.is_alive and not self.members()


def _end_with_parent() -> None:
    """Have the kernel end the child should the tests' own process be killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Surroundings:
    """What the machine's shared places held at one moment, to see later what was left in them.

    Other programs come and go meanwhile, so of files only what no live process uses counts as left
    behind. vLLM's own segments and semaphores do not: its workers are killed before they can
    unlink them, with or without a connector. The project has no names there at all.
    """

    def __init__(self) -> None:
        self._memory = frozenset(_shared_memory())

    def remove_what_vllm_leaves(self) -> None:
        """Unlink what vLLM's killed processes left in shared memory since this object was made."""
        for name in self._unused():
            if name.startswith(_VLLM_NAMES):
                (_SHARED_MEMORY / name).unlink(missing_ok=True)

    def left_behind(self, ports: Sequence[int] = ()) -> list[str]:
        """Return what is there now and was not then: files, and whatever listens on `ports`."""
        left = [f"/dev/shm/{name}" for name in self._unused() if not name.startswith(_VLLM_NAMES)]
        left += [f"port {port}" for port in _listening_ports() & set(ports)]
        # A server's Unix socket has its port in its name.
        sockets = _unix_sockets()
        left += [name for name in sockets for port in ports if f"kvcellar/{port}/" in name]
        return sorted(left)

    def _unused(self) -> list[str]:
        # First the names, then who uses them: what is made meanwhile is not in either.
        found = _shared_memory()
        used = _used_shared_memory()
        return [name for name in found if name not in self._memory and found[name] not in used]


def _shared_memory() -> dict[str, int]:
    """Return what is in /dev/shm, by name, with its inode."""
    found = {}
    for path in _SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.lstat().st_ino
    return found


def _used_shared_memory() -> set[int]:
    """Return the inodes in /dev/shm that a live process maps or has open.

    Not their names: a semaphore is made under another name and linked to its own, and the kernel
    goes on calling it by the first.
    """
    inodes = set()
    device = _SHARED_MEMORY.stat().st_dev
    for process in psutil.process_iter():
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            lines = (folder / "maps").read_text(encoding="utf-8").splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        with contextlib.suppress(OSError):
            for fd in list((folder / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    info = fd.stat()
                    inodes |= {info.st_ino} if info.st_dev == device else set()
    return inodes


def _unix_sockets() -> set[str]:
    """Return the names of all bound Unix sockets; abstract ones begin with @."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]
    return {words[7] for words in (line.split() for line in lines) if len(words) > 7}


def _listening_ports() -> set[int]:
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports
