"""The programs that a benchmark starts: servers, engines, loads; and their certain end.

Each runs in a session of its own with its output in a file, so that what it started is found
again, and everything is ended in `stop_all`, also after Ctrl-C. Were this process killed, the
kernel would tell each of them to end.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvcellar.clock import Clock

__all__ = ["BenchError", "Program", "Programs", "pause"]

_PR_SET_PDEATHSIG = 1
_END_S = 20.0
_POLL_S = 0.02
_TAIL_LINES = 12
_LIBC = ctypes.CDLL(None, use_errno=True)


class BenchError(Exception):
    """Something could not be measured; the message says what and where to look."""

    @property
    def summary(self) -> str:
        """The message without the output that may follow it."""
        return str(self).partition("\n")[0]


def pause(seconds: float) -> None:
    """Let some time pass."""
    threading.Event().wait(seconds)


class Program:
    """One program that runs.

    Attributes:
        name: for messages and the log's name.
        process: its first process, whose id is its session's too.
        log: the file with its output.
        started_s: when it was started, on the benchmark's clock.
    """

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], *, log: Path, started_s: float
    ) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.started_s = started_s

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self.process.poll() is None

    def tail(self) -> str:
        """Return the end of its output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class Programs:
    """Everything that one run has started."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """Write logs to `folder`, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        self._running: list[Program] = []

    def start(
        self, name: str, words: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> Program:
        """Start a program and return at once.

        Args:
            name: also names its log.
            words: the command.
            environment: variables to set beside those of this process.
        """
        log = self._folder / f"{name}.log"
        settings = [f"{key}={value}" for key, value in (environment or {}).items()]
        with log.open("wb") as output:
            started_s = self._clock.monotonic_s()
            process = subprocess.Popen(  # noqa: S603 - the commands are ours.
                ["/usr/bin/env", *settings, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has no other threads here.
            )
        program = Program(name, process, log=log, started_s=started_s)
        self._running.append(program)
        return program

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a program to its end and return the last line of its output.

        Raises:
            BenchError: it failed or took too long; the message has the end of its output.
        """
        program = self.start(name, words, environment=environment)
        try:
            code = program.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{name} took more than {timeout_s:g} s; see {program.log}") from None
        finally:
            self.stop(program)
        if code != 0:
            raise BenchError(_ended(program))
        return program.tail().rpartition("\n")[2]

    def wait_until(
        self,
        program: Program,
        probe: Callable[[], object],
        *,
        timeout_s: float,
        poll_s: float = _POLL_S,
    ) -> float:
        """Wait until `probe` is true and return the seconds since the program was started.

        Raises:
            BenchError: the program ended before, or it took too long.
        """
        while not probe():
            if not program.is_alive:
                raise BenchError(_ended(program))
            if self.since(program) > timeout_s:
                raise BenchError(f"{program.name}: not ready after {timeout_s:g} s, {program.log}")
            pause(poll_s)
        return self.since(program)

    def since(self, program: Program) -> float:
        """Return the seconds since a program was started."""
        return self._clock.monotonic_s() - program.started_s

    def stop(self, program: Program) -> None:
        """End a program and all that it started; blocks for at most half a minute."""
        if program not in self._running:
            return
        with contextlib.suppress(ProcessLookupError):
            program.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.process.wait(_END_S)
        self._end_session(program.process.pid)
        program.process.wait()
        self._running.remove(program)

    def stop_all(self) -> None:
        """End everything that still runs, the newest first."""
        for program in reversed(list(self._running)):
            self.stop(program)

    def _end_session(self, session: int) -> None:
        """End what is left of a session, with some time to go by itself."""
        _signal_all(session_members(session), signal.SIGTERM)
        deadline_s = self._clock.monotonic_s() + _END_S / 2
        while pids := session_members(session):
            if self._clock.monotonic_s() > deadline_s:
                _signal_all(pids, signal.SIGKILL)
            pause(_POLL_S)


def _ended(program: Program) -> str:
    output = program.tail()
    return f"{program.name} ended: {output.rpartition(chr(10))[2]}; {program.log}\n{output}"


def session_members(session: int) -> list[int]:
    """Return the process ids of a session, without those that have ended."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            is_zombie, its_session = fields[0] == "Z", int(fields[3])
            if its_session == session and not is_zombie:
                members.append(int(folder.name))
    return members


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
