"""What stands in a user's way is named: a frozen process, a taken port, a mistyped folder."""

import os
import signal
import subprocess
import sys

import httpx
from tests.server.running import FLAGS, SOURCE, WAIT_S, RunningServer, eventually, is_running

from kvcellar import __version__


def start_failing(*flags):
    answer = subprocess.run(
        [sys.executable, "-m", "kvcellar", "server", *FLAGS, *flags],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert answer.returncode == 2, answer.stderr
    return answer.stderr.splitlines()[-1]


def test_a_frozen_http_process_is_unhealthy_until_it_goes_on():
    with RunningServer() as server:
        child = server.http_pid()
        # Its first sign comes before its first answer; until then it is starting.
        assert httpx.get(f"{server.http}/healthcheck", timeout=WAIT_S).status_code == 200
        os.kill(child, signal.SIGSTOP)
        try:
            page = eventually(lambda: not (p := server.status())["is_healthy"] and p)
            assert "has been silent for" in page["kvcellar"]["parts"]["http"]
        finally:
            os.kill(child, signal.SIGCONT)
        eventually(lambda: server.status()["is_healthy"])
        assert is_running(child)


def test_a_port_of_another_kvcellar_is_named_with_its_process_and_release():
    with RunningServer("--instance-id", "first") as server:
        said = start_failing("--port", str(server.port))
        other = f"kvcellar {__version__} (pid {server.process.pid}, node first)"
        assert f"port {server.port} on localhost is taken by {other}: stop it or" in said
        said = start_failing("--http-port", server.http.rpartition(":")[2])
        assert "is taken by pid " in said
        assert "kvcellar server" in said or "kvcellar.server" in said
        assert said.endswith("choose another --http-port")


def test_a_folder_is_made_only_where_its_parent_is(tmp_path):
    said = start_failing("--socket-dir", str(tmp_path / "rnu" / "kvcellar"))
    assert f"{tmp_path / 'rnu'} is not there" in said
    assert not (tmp_path / "rnu").exists()
    with RunningServer("--socket-dir", str(tmp_path / "kvcellar")) as server:
        assert f"socket folder made folder={tmp_path / 'kvcellar'}" in server.log()
    with RunningServer("--socket-dir", str(tmp_path / "kvcellar")) as server:
        assert "socket folder made" not in server.log()
