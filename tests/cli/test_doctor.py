"""`kvcellar doctor` tells what is right from what is wrong, and what to type, without harm."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from tests.server.running import SOURCE, RunningServer

from kvcellar.cli.checkup.findings import State
from kvcellar.cli.checkup.host import examine_host
from kvcellar.cli.checkup.servers import _health
from kvcellar.cli.checkup.software import examine_software
from kvcellar.cli.main import main
from kvcellar.transport.holders import port_holder

HEAVY = ("numpy", "torch", "vllm", "starlette", "uvicorn")


@pytest.fixture
def doctor(capsys):
    def run(*words, code=0):
        capsys.readouterr()
        assert main(("doctor", *words, "--json")) == code
        page = json.loads(capsys.readouterr().out)
        assert page["ok"] is (code == 0)
        return {check["name"]: check for check in page["checks"]}

    return run


@pytest.fixture(scope="module")
def server():
    with RunningServer("--instance-id", "here") as running:
        yield running


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """A PATH with kvcellar's own commands alone."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("KVCELLAR_VLLM_PLUGIN", raising=False)
    for name in ("kvcellar", "lmcache"):
        script(folder / name, "kvcellar.cli.main")
    return folder


def script(place, module):
    place.parent.mkdir(exist_ok=True)
    place.write_text(f"#!/usr/bin/python3\nimport sys\nfrom {module} import main\nmain()\n")
    place.chmod(0o755)


def ports(server):
    return "--port", str(server.port), "--http-port", server.http.rpartition(":")[2]


def test_a_healthy_server_and_its_engines_are_found(doctor, server):
    with server.engine("well"):
        found = doctor(*ports(server))
    assert found["server"]["found"].startswith("node here, kvcellar ")
    assert found["engine well"]["state"] == State.OK
    assert f"by pid {server.process.pid} " in found[f"port {server.port}"]["found"]
    assert f"port {server.port} (boot " in found["sockets"]["found"]
    assert found["kernel"]["state"] == State.OK


def test_what_a_server_says_of_itself_becomes_problems(server):
    page = copy.deepcopy(server.status())
    assert [each.state for each in _health(page)] == [State.OK]
    own = page["kvcellar"]
    own |= {"version": "0.0.9", "degraded": {"tiers": "the disk is gone"}}
    own["parts"]["arena"] = "no memory"
    own["arena"]["waits_for_bytes"] = 7
    own["instances"] = [
        {"name": "a", "refusal": "other sizes", "world_size": 1, "ranks": [0], "scheduler": True},
        {"name": "b", "refusal": "", "world_size": 2, "ranks": [0], "scheduler": False},
    ]
    found = {each.name: each for each in _health(page)}
    assert {name: each.state for name, each in found.items()} == {
        "server": State.PROBLEM,
        "server release": State.PROBLEM,
        "server tiers": State.PROBLEM,
        "server memory": State.PROBLEM,
        "engine a": State.PROBLEM,
        "engine b": State.NOTE,
    }
    assert "1 of 2 ranks and its scheduler half" in found["engine b"].found


def test_a_free_port_is_no_problem(doctor, free_port):
    found = doctor("--port", free_port, "--http-port", free_port)
    assert found[f"port {free_port}"]["state"] in {State.OK, State.NOTE}


def test_a_port_of_another_program_is_named_with_its_holder(doctor):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = doctor("--port", port, "--http-port", port, "--timeout", "0.3", code=1)
        assert port_holder(int(port)).pid == os.getpid()
    check = found[f"port {port}"]
    assert check["state"] == State.PROBLEM
    assert f"by pid {os.getpid()} " in check["found"]
    assert f"kill {os.getpid()}" in check["fix"]


def test_a_frozen_server_is_a_problem(doctor):
    with RunningServer() as server:
        server.process.send_signal(signal.SIGSTOP)
        try:
            found = doctor(*ports(server), "--timeout", "0.3", code=1)
        finally:
            server.process.send_signal(signal.SIGCONT)
    check = found[f"port {server.port}"]
    assert check["state"] == State.PROBLEM
    assert "does not answer" in check["found"]


def test_whether_a_size_fits_is_said(doctor, free_port):
    there = ("--port", free_port, "--http-port", free_port)
    assert "fits" in doctor(*there, "--l1-size-gb", "0.01")["memory"]["found"]
    check = doctor(*there, "--l1-size-gb", "100000", code=1)["memory"]
    assert "set --l1-size-gb to" in check["fix"]


@pytest.mark.parametrize(
    ("chosen", "state"), [("never", State.NOTE), ("within_size", State.OK), (None, State.NOTE)]
)
def test_huge_pages_are_read_from_the_kernel(tmp_path, chosen, state):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    place = tmp_path / "sys/kernel/mm/transparent_hugepage"
    place.mkdir(parents=True)
    if chosen:
        (place / "shmem_enabled").write_text(f"always [{chosen}] deny\n")
    found = {each.name: each for each in examine_host(None, tmp_path)}
    assert found["huge pages"].state == state
    assert "8.58 GiB" in found["memory"].found


def software():
    return {each.name: each for each in examine_software()}


def test_another_programs_lmcache_first_on_the_path_is_a_problem(path, tmp_path, monkeypatch):
    assert software()["command lmcache"].state == State.OK
    other = tmp_path / "other"
    script(other / "lmcache", "lmcache.cli.main")
    script(other / "lmcache_server", "lmcache.v1.server")
    monkeypatch.setenv("PATH", f"{other}:{path}")
    found = software()
    assert found["command lmcache"].state == State.PROBLEM
    assert f"{other / 'lmcache'} is lmcache's" in found["command lmcache"].found
    assert found["command lmcache"].fix == f"export PATH={path}:$PATH"
    assert found["command lmcache_server"].state == State.NOTE


@pytest.mark.engine
def test_a_plug_in_that_is_switched_off_or_left_out_is_a_problem(monkeypatch):
    assert software()["connectors"].state == State.OK
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    check = software()["connectors"]
    assert check.state == State.PROBLEM
    assert check.fix == "export VLLM_PLUGINS=other,kvcellar"
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvcellar")
    assert software()["connectors"].state == State.OK
    monkeypatch.setenv("KVCELLAR_VLLM_PLUGIN", "0")
    check = software()["connectors"]
    assert check.state == State.PROBLEM
    assert check.fix == "unset KVCELLAR_VLLM_PLUGIN"


def test_it_is_quick_and_imports_nothing_heavy(server, path):
    code = (
        "import sys; from kvcellar.cli.main import main; code = main(sys.argv[1:]); "
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, "doctor", *ports(server)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert answer.stdout.splitlines()[-1] == "0 []", answer.stdout + answer.stderr
    assert "ok       server: node here" in answer.stdout


def test_wrong_words_are_code_2(capsys):
    assert main(("doctor", "--port", "x")) == 2
    assert main(("doctor", "--l1-size-gb", "lots")) == 2
    assert "--l1-size-gb lots" in capsys.readouterr().err
