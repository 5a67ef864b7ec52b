"""Starts a server for an engine that is told to bring its own: `kvcellar.autostart`.

One that answers already is used as it is. A server that is started here belongs to nobody: it
stops by itself some time after its last engine, so that the cache outlives an engine's restart and
nothing is left behind. Called by the scheduler half before it looks for the server; the only place
where a connector waits at start.
"""

import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from kvcellar.client.tool import connect_tool
from kvcellar.clock import Clock
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.errors import ConfigError, KVCellarError, NotLocalError
from kvcellar.telemetry.logs import EventLog

__all__ = ["STOP_WHEN_UNUSED_S", "ensure_server"]

log = EventLog("vllm.kvcellar.autostart")

STOP_WHEN_UNUSED_S = 60
_DEFAULTS = ("--eviction-policy", "LRU", "--l1-size-gb", "5")
_TAKEN = ("--host", "--port", "--http-host")
"""Flags that follow from the connector's own keys, or would open the server to other hosts."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_PING_TIMEOUT_S = 1.0
_ASK_INTERVAL_S = 0.05
_LINES_KEPT = 5
_OTHER_S = 2.0
"""How long another engine's server may take to answer after it took the port from ours."""


def ensure_server(options: ConnectorOptions, *, clock: Clock) -> subprocess.Popen[bytes] | None:
    """Have a server answer at the options' address, starting one if none does.

    Args:
        options: `autostart` may be off: then nothing happens.
        clock: for the deadline.

    Returns:
        The process if one was started; keep the reference, it is reaped through it. None otherwise.

    Raises:
        ConfigError: the address is not this host's, or the server refuses its flags; with the
            server's own message.

    Blocks until it answers, for `autostart_wait_s` at most; after that the engine serves without.
    """
    if not options.autostart:
        return None
    words = _server_words(options)
    if _answers(options):
        log.info("a server is there already", address=options.servers[0])
        return None
    command = [sys.executable, "-m", options.server_module, "server", *words]
    # A session of its own: a Ctrl-C for the engine does not stop what others may use. And no
    # descriptor of the engine's: who reads the engine's output to its end must not wait for us.
    process = subprocess.Popen(  # noqa: S603 - the user's own flags for the user's own server.
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    speaker = threading.Thread(target=_pass_on, args=(process, said), daemon=True)
    speaker.start()
    log.info("server started", pid=process.pid, command=shlex.join(words))
    end_s = clock.monotonic_s() + options.autostart_wait_s
    ended_s = 0.0
    pause = threading.Event()
    while not _answers(options):
        now_s = clock.monotonic_s()
        if process.poll() is not None and not ended_s:
            ended_s = now_s
        if ended_s and now_s - ended_s >= _OTHER_S:
            speaker.join(_OTHER_S)
            raise ConfigError(
                f"kvcellar.autostart: the server, started with {shlex.join(words)}, ended with "
                f"code {process.returncode}: {' / '.join(said)}"
            )
        if now_s >= end_s:
            log.warning("the server does not answer yet; serving without", pid=process.pid)
            break
        pause.wait(_ASK_INTERVAL_S)
    return process


def _pass_on(process: subprocess.Popen[bytes], said: deque[str]) -> None:
    """Show what the server says among the engine's own lines, while the engine lives."""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            said.append(text)
            sys.stderr.write(f"{text}\n")


def _server_words(options: ConnectorOptions) -> list[str]:
    server = options.servers[0]
    if server.host not in _LOCAL_HOSTS:
        raise ConfigError(
            f"kvcellar.autostart starts a server on this host, but kvcellar.host is "
            f"{server.host!r}: leave one of the two out"
        )
    given = _split(options.autostart_server_args)
    taken = [word for word in given if word.partition("=")[0] in _TAKEN]
    if taken:
        raise ConfigError(
            f"kvcellar.autostart.server_args has {taken[0]}: the address comes from kvcellar.host "
            "and kvcellar.port, and the pages stay on loopback"
        )
    address = ("--host", server.host, "--port", str(server.port))
    # What is said last counts.
    return [*address, *_DEFAULTS, "--stop-when-unused", str(STOP_WHEN_UNUSED_S), *given]


def _split(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"kvcellar.autostart.server_args={text!r}: {error}") from error


def _answers(options: ConnectorOptions) -> bool:
    try:
        server = options.servers[0]
        with connect_tool(server.host, server.port, timeout_s=_PING_TIMEOUT_S):
            return True
    except NotLocalError:
        # It is there; the link will say what has to be mounted.
        return True
    except KVCellarError:
        return False
