"""A child process of the server: start it, notice its end, start it again.

The HTTP process and the tier process are such children. Each has a socket pair to the control
process and whatever descriptors it inherits. One that ends is started again at once, then ever
later while it keeps failing; meanwhile `check` says why.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import kvcellar
from kvcellar.clock import Clock
from kvcellar.telemetry.logs import EventLog

__all__ = ["ChildProcess", "Program"]

_BACKOFF_MIN_S = 0.1
_BACKOFF_MAX_S = 10.0
_STEADY_S = 30.0
_REAP_S = 1.0

_CODE = "import sys; sys.path.append({root!r}); from {module} import main; main({arguments})"

_log = EventLog("kvcellar.server")


class Program(NamedTuple):
    """What runs in a child.

    Attributes:
        name: of the process, for people, as in "HTTP".
        module: its `main` is called with the descriptor of its end of the line, then with
            `arguments`.
        fds: descriptors that it inherits under the same numbers; they stay the parent's.
        arguments: plain values.
    """

    name: str
    module: str
    fds: Sequence[int]
    arguments: Sequence[object]


class ChildProcess:
    """Keeps one child running."""

    def __init__(
        self,
        program: Program,
        *,
        attach: Callable[[socket.socket, Callable[[], None]], None],
        on_end: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            program: what runs in it.
            attach: serves our end of its line; calls back when that line has ended.
            on_end: called whenever it has ended, or could not be started, but by `stop`. The
                kernel has let go of all its memory then.
            clock: for the backoff.
        """
        self._program = program
        self._attach = attach
        self._on_end = on_end
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started_s = 0.0
        self._backoff_s = _BACKOFF_MIN_S
        self._retry: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._reason = f"the {program.name} process has not started"

    @property
    def pid(self) -> int:
        """Return its process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def check(self) -> str:
        """Return what is wrong with it, empty text where nothing is."""
        return self._reason

    def start(self) -> None:
        """Start the process; it serves some tenths of a second later."""
        self._retry = None
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            arguments = (theirs.fileno(), *self._program.arguments)
            code = _CODE.format(
                root=str(Path(kvcellar.__file__).parents[1]),
                module=self._program.module,
                arguments=", ".join(repr(argument) for argument in arguments),
            )
            # A session of its own, so that Ctrl-C in a terminal reaches the control process alone.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code.
                [sys.executable, "-P", "-c", code],
                pass_fds=[theirs.fileno(), *self._program.fds],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._failed(f"cannot start: {error}")
            return
        finally:
            theirs.close()
        self._started_s = self._clock.monotonic_s()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._reason = ""
        # The line's end means the same as the process's: without it, it can answer nothing.
        process = self._process
        self._attach(ours, lambda: process.kill() if process.returncode is None else None)

    def kill(self) -> None:
        """End the process, which is started again as if it had ended by itself."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process; blocks for a moment, since nothing may outlive the server.

        No orderly end: what it could still answer, it would have to ask us for. One that the
        kernel holds in a system call (a dead mount) is left to the kernel after a second.
        """
        self._is_stopping = True
        if self._retry is not None:
            self._retry.cancel()
        process = self._process
        if process is None:
            return
        self._release()
        process.kill()
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            _log.warning("child process does not end", process=self._program.name, pid=process.pid)

    def _ended(self) -> None:
        process = self._process
        assert process is not None
        self._release()
        self._process = None
        code = process.wait()
        if not self._is_stopping:
            self._failed(f"ended with code {code}")

    def _release(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _failed(self, reason: str) -> None:
        if self._clock.monotonic_s() - self._started_s > _STEADY_S:
            self._backoff_s = _BACKOFF_MIN_S
        self._reason = f"the {self._program.name} process {reason}"
        _log.warning(
            "child process ended",
            process=self._program.name,
            reason=reason,
            restart_in_s=self._backoff_s,
        )
        self._on_end()
        self._retry = self._loop.call_later(self._backoff_s, self.start)
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)
