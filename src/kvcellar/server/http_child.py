"""The HTTP process's parent: start it, notice its end, start it again.

The control process opens the listening sockets and keeps them, so while the HTTP process is away
connections wait instead of being refused. It is started again at once, then ever later while it
keeps failing; meanwhile its part of the health check fails.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import kvcellar
from kvcellar.clock import Clock
from kvcellar.telemetry.logs import EventLog

__all__ = ["HttpChild"]

_BACKOFF_MIN_S = 0.1
_BACKOFF_MAX_S = 10.0
_STEADY_S = 30.0

_CODE = (
    "import sys; sys.path.append({root!r}); "
    "from kvcellar.server.http.process import main; main({line}, {listeners}, {level!r})"
)

_log = EventLog("kvcellar.server")


class HttpChild:
    """Keeps one HTTP process running."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        attach: Callable[[socket.socket, Callable[[], None]], None],
        *,
        on_restart: Callable[[], None],
        log_level: str,
        clock: Clock,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            listeners: what it serves on; owned from here on.
            attach: serves our end of its line; calls back when that line has ended.
            on_restart: counts.
            log_level: of its log.
            clock: for the backoff.
        """
        self._listeners = listeners
        self._attach = attach
        self._on_restart = on_restart
        self._log_level = log_level
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started_s = 0.0
        self._backoff_s = _BACKOFF_MIN_S
        self._retry: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._reason = "the HTTP process has not started"

    @property
    def pid(self) -> int:
        """Return its process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def check(self) -> str:
        """Return what is wrong with it, empty text where nothing is."""
        return self._reason

    def start(self) -> None:
        """Start the process; it serves about 0.3 s later."""
        self._retry = None
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            fds = [sock.fileno() for sock in self._listeners]
            code = _CODE.format(
                root=str(Path(kvcellar.__file__).parents[1]),
                line=theirs.fileno(),
                listeners=fds,
                level=self._log_level,
            )
            # A session of its own, so that Ctrl-C in a terminal reaches the control process alone.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code.
                [sys.executable, "-P", "-c", code],
                pass_fds=[theirs.fileno(), *fds],
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

    def stop(self) -> None:
        """End the process; blocks for a moment, since nothing may outlive the server.

        No orderly end: what it could still answer, it would have to ask us for.
        """
        self._is_stopping = True
        if self._retry is not None:
            self._retry.cancel()
        for sock in self._listeners:
            sock.close()
        process = self._process
        if process is None:
            return
        self._release()
        process.kill()
        process.wait()

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
        self._reason = f"the HTTP process {reason}"
        _log.warning("http process ended", reason=reason, restart_in_s=self._backoff_s)
        self._on_restart()
        self._retry = self._loop.call_later(self._backoff_s, self.start)
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)
