"""Start at once, refuse early, stop without a trace: on the real process."""

import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.server.running import SOURCE, WAIT_S, RunningServer, eventually, is_running

from kvcellar.errors import NotLocalError, PeerClosedError
from kvcellar.protocol.messages import Ping, Pong


def refused(*flags):
    """Run a server that must refuse to start; return what it said."""
    answer = subprocess.run(
        [sys.executable, "-m", "kvcellar", "server", "--eviction-policy", "LRU", *flags],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert answer.returncode == 2, answer
    assert "Traceback" not in answer.stderr
    return answer.stderr


def test_it_serves_before_its_memory_is_there():
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    with RunningServer("--l1-size-gb", f"{min(8.0, memory_gb * 0.4):.2f}") as server:
        with server.tool() as session:
            assert isinstance(session.call(Ping, timeout_s=WAIT_S), Pong)
        with urllib.request.urlopen(f"{server.http}/healthcheck", timeout=WAIT_S) as answer:
            assert answer.status == 200
        assert "arena is whole" not in server.log().partition(" started ")[0]


def test_both_processes_together_are_small_and_load_nothing_heavy():
    with RunningServer() as server, server.engine() as engine:
        engine.store(*range(10_000))
        with urllib.request.urlopen(f"{server.http}/metrics", timeout=WAIT_S):
            pids = (server.process.pid, server.http_pid())
            assert sum(server.rss_kb(pid) for pid in pids) < 120 * 1024
        for pid in pids:
            mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
            assert [name for name in ("numpy", "torch", "numba") if f"/{name}/" in mapped] == []


def test_its_start_line_says_what_is_in_effect():
    with RunningServer("--instance-id", "prefiller", "--chunk-size", "128") as server:
        for part in ("node=prefiller", "chunk_tokens=128", 'l1="64.00 MiB"', "eviction=LRU"):
            assert part in server.start_line
        assert f"socket=@kvcellar/{server.port}/" in server.start_line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_at_once_and_leaves_nothing(number):
    with RunningServer() as server:
        child = server.http_pid()
        with server.tool() as session:
            session.call(Ping, timeout_s=WAIT_S)
            server.process.send_signal(number)
            server.process.send_signal(number)
            assert server.process.wait(WAIT_S) == 0, server.log()
            with pytest.raises(PeerClosedError):
                session.call(Ping, timeout_s=WAIT_S)
        assert not is_running(child)
        assert "Traceback" not in server.log()
        assert f"@kvcellar/{server.port}/" not in Path("/proc/net/unix").read_text()


def test_nothing_is_left_of_a_killed_server_and_its_ports_can_be_taken_at_once():
    with RunningServer() as server:
        child = server.http_pid()
        port, http_port = server.port, int(server.http.rpartition(":")[2])
        server.kill()
        # The new server starts while the old HTTP process may still be going.
        again = RunningServer("--port", str(port), "--http-port", str(http_port))
        with again:
            assert again.status()["is_healthy"] is True
            eventually(lambda: not is_running(child))
            with urllib.request.urlopen(f"{again.http}/healthcheck", timeout=WAIT_S) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_taken_port_is_named_with_its_flag(flag):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = {"--port": "0", "--http-port": "0", flag: str(port)}
        words = [word for pair in flags.items() for word in pair]
        said = refused("--l1-size-gb", "0.1", *words)
    assert said.startswith("kvcellar server: ")
    assert str(port) in said
    assert f"another {flag}" in said


def test_an_http_port_that_a_dying_process_holds_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as dying:
        http_port = dying.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = RunningServer("--port", str(port), "--http-port", str(http_port))
        # The engines' port is opened first: from then on it waits for the other one.
        eventually(lambda: is_open(port))
    with server:
        assert server.http == f"http://127.0.0.1:{http_port}"


def is_open(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_an_l1_larger_than_the_memory_is_refused_with_both_numbers():
    said = refused("--l1-size-gb", "100000")
    assert "97.66 TiB" in said
    assert "--l1-size-gb" in said
    assert said.count("iB") >= 2


def test_the_socket_lies_in_a_private_folder_when_one_is_given(tmp_path):
    folder = tmp_path / "run"
    with RunningServer("--socket-dir", str(folder)) as server:
        path = folder / f"{server.port}.sock"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert path.is_socket()
        assert server.status()["kvcellar"]["address"] == str(path)
        server.kill()
        assert path.exists()
        # The next server takes over what a killed one left, and removes its own.
        with RunningServer("--socket-dir", str(folder), "--port", str(server.port)) as again:
            assert again.status()["is_healthy"] is True
            again.stop()
        assert list(folder.iterdir()) == []


def test_a_client_that_cannot_reach_the_socket_is_told_what_to_mount(tmp_path):
    folder = tmp_path / "run"
    with RunningServer("--socket-dir", str(folder)) as server:
        (folder / f"{server.port}.sock").unlink()
        with pytest.raises(NotLocalError, match=f"mount {folder} into its container"):
            server.tool()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    said = refused(
        *("--l1-size-gb", "0.1", "--port", "0", "--http-port", "0"),
        *("--socket-dir", str(tmp_path / "file" / "dir")),
    )
    assert f"--socket-dir {tmp_path / 'file' / 'dir'}" in said
