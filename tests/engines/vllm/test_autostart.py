"""An engine that brings its own server: started when none answers, shared, gone when unused."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.server.running import RunningServer, eventually, is_running

from kvcellar.client.tool import connect_tool
from kvcellar.clock import SystemClock
from kvcellar.engines.vllm.autostart import ensure_server
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.transport.address import TcpAddress

pytestmark = pytest.mark.engine

SMALL = "--l1-size-gb 0.0625 --http-port 0"


@pytest.fixture
def port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def options(port):
    return ConnectorOptions(
        servers=(TcpAddress("127.0.0.1", port),), autostart=True, autostart_server_args=SMALL
    )


@contextlib.contextmanager
def started(options):
    process = ensure_server(options, clock=SystemClock())
    try:
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait(10)


def answers(options):
    try:
        with connect_tool(options.servers[0].host, options.servers[0].port):
            return True
    except KVCellarError:
        return False


def command_line(process):
    return Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8").split("\0")


def test_without_the_key_nothing_is_started(options):
    assert ensure_server(replace(options, autostart=False), clock=SystemClock()) is None
    assert not answers(options)


def test_a_server_is_started_where_none_answers(options):
    with started(options) as process:
        assert answers(options)
        words = command_line(process)
        assert "kvcellar" in words
        assert words[words.index("--stop-when-unused") + 1] == "60"


def test_a_server_that_answers_is_used_as_it_is(options):
    with RunningServer() as server:
        assert (
            ensure_server(
                replace(options, servers=(TcpAddress("127.0.0.1", server.port),)),
                clock=SystemClock(),
            )
            is None
        )


def test_two_engines_that_start_at_once_end_up_with_one_server(options):
    script = (
        "import sys; from kvcellar.clock import SystemClock;"
        "from kvcellar.engines.vllm.autostart import ensure_server;"
        "from kvcellar.engines.vllm.options import ConnectorOptions;"
        "from kvcellar.transport.address import TcpAddress;"
        f"o = ConnectorOptions(servers=({options.servers[0]!r},), autostart=True,"
        f"autostart_server_args='{SMALL}');"
        "p = ensure_server(o, clock=SystemClock());"
        "print(p.pid if p is not None and p.poll() is None else 0)"
    )
    engines = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2)
    ]
    pids = [int(engine.communicate(timeout=30)[0]) for engine in engines]
    try:
        assert [engine.returncode for engine in engines] == [0, 0]
        assert answers(options)
        # The one that came second finds its port taken, and goes.
        eventually(lambda: sum(is_running(pid) for pid in pids if pid) == 1)
        assert answers(options)
    finally:
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_what_is_said_for_it_counts_over_the_defaults(options):
    text = f"{SMALL} --eviction-policy noop --stop-when-unused 0.2"
    with started(replace(options, autostart_server_args=text)) as process:
        # Nobody but this test asks: it goes by itself.
        assert process.wait(20) == 0


def test_an_engine_of_lmcaches_name_may_use_lmcaches_flags(options):
    text = f"{SMALL} --max-workers 1"
    lmcache = replace(
        options, autostart_server_args=text, server_module="kvcellar.compat.lmcache_cli"
    )
    with started(lmcache):
        assert answers(options)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"servers": (TcpAddress("10.0.0.7", 5555),)}, "kvcellar.host is '10.0.0.7'"),
        ({"autostart_server_args": "--port 7000"}, "has --port"),
        ({"autostart_server_args": "--http-host=0.0.0.0"}, "has --http-host=0.0.0.0"),
        ({"autostart_server_args": "--instance-id 'a"}, "No closing quotation"),
        (
            {"autostart_server_args": "--l1-size 3"},
            "--l1-size is not a flag of this command: did you mean --l1-size-gb?",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(options, change, part):
    with pytest.raises(ConfigError) as refusal:
        ensure_server(replace(options, **change), clock=SystemClock())
    assert part in str(refusal.value)


def test_an_engine_does_not_wait_longer_than_it_was_told(options, monkeypatch, tmp_path):
    # A server that never opens its port.
    (tmp_path / "silent.py").write_text("import signal; signal.pause()", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    silent = replace(options, server_module="silent", autostart_wait_s=0.2)
    with started(silent) as process:
        assert is_running(process.pid)
        assert not answers(options)
