"""The commands as users type them: quick, clear, with exit codes that scripts can trust."""

import json
import os
import socket
import subprocess
import sys

import pytest
from tests.server.running import SOURCE, RunningServer

from kvcellar import __version__
from kvcellar.cli.main import main
from kvcellar.protocol.messages import Status
from kvcellar.telemetry.summary import status_lines

HEAVY = ("asyncio", "numpy", "torch", "fastapi", "starlette", "uvicorn", "msgspec")


def in_process(*words):
    """Run the command as a shell does."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def kvcellar(capsys):
    """Run the command in this process, which saves the interpreter's start."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main(words) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def server():
    with RunningServer("--instance-id", "here") as running:
        yield running


def at(server):
    return "--port", str(server.port)


def test_the_command_is_a_program_with_exit_codes():
    version = in_process("-m", "kvcellar", "--version")
    assert (version.returncode, version.stdout) == (0, f"kvcellar {__version__}\n")
    wrong = in_process("-m", "kvcellar", "sever")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "kvcellar: 'sever' is not a command: did you mean server?\n"


def test_the_help_lists_every_command(kvcellar):
    for words in (["--help"], ["-h"]):
        shown = kvcellar(*words).out
        for command in ("server", "status", "ping", "clear", "quota"):
            assert f"  {command}" in shown
    assert "usage" in kvcellar(code=2).out


def test_the_help_imports_nothing_that_takes_time():
    code = (
        "import sys; from kvcellar.cli.main import main; main(['--help']); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    answer = in_process("-c", code)
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sever"], "kvcellar: 'sever' is not a command: did you mean server?"),
        (["xyz"], "kvcellar: 'xyz' is not a command (see kvcellar --help)"),
        (["ping", "--prot", "1"], "kvcellar ping: --prot is not a flag"),
        (["ping", "--port", "x"], "kvcellar ping: port='x'"),
        (["ping", "--timeout", "0"], "kvcellar ping: --timeout 0: write seconds"),
        (["status", "--host", "a b"], "kvcellar status: host='a b'"),
        (["server", "--eviction-policy", "LRU"], "kvcellar server: --l1-size-gb is missing"),
    ],
)
def test_a_wrong_command_line_is_code_2_and_says_the_fix(kvcellar, words, said):
    assert said in kvcellar(*words, code=2).err


@pytest.mark.parametrize("command", ["ping", "status", "clear"])
def test_no_server_is_code_1_and_names_the_address(kvcellar, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = kvcellar(command, "--port", str(port), code=1).err
    assert said.startswith(f"kvcellar {command}: ")
    assert f"localhost:{port}" in said


def test_the_http_port_instead_of_the_engines_port_is_recognised(kvcellar, server):
    http_port = server.http.rpartition(":")[2]
    said = kvcellar("ping", "--port", http_port, "--timeout", "0.5", code=1).err
    assert f"localhost:{http_port}: " in said
    assert "another program" in said


def test_ping_answers_for_people_and_for_programs(kvcellar, server):
    shown = kvcellar("ping", *at(server)).out
    assert shown.startswith(f"pong from localhost:{server.port} in ")
    assert "(node here, boot " in shown
    page = json.loads(kvcellar("ping", *at(server), "--json").out)
    assert page["node"] == "here"
    assert 0 < page["fastest_ms"] < 1000
    assert len(page["boot_id"]) == 32


def test_status_and_clear_show_what_is_there(kvcellar, server):
    with server.engine("shown", world_size=2) as engine:
        engine.store(1, 2)
        engine.lookup(1, 2, 3)
        shown = kvcellar("status", *at(server)).out
        assert "node here: healthy" in shown
        assert "chunks   2 complete (4 objects)" in shown
        assert "1 leases" in shown
        assert "found 2 of 3 chunks (67 %)" in shown
        assert "instance shown" in shown
        assert "2 of 2 ranks" in shown
        page = json.loads(kvcellar("status", *at(server), "--json").out)
        assert page["storage_manager"]["l1_manager"]["total_object_count"] == 4
        cleared = kvcellar("clear", *at(server)).out
        assert cleared == "cleared 2 chunks, 16.00 KiB\n"
        assert json.loads(kvcellar("clear", *at(server), "--json").out) == {
            "chunks": 0,
            "size_bytes": 0,
        }
        assert engine.lookup(1).count == 0


def test_an_unhealthy_server_is_shown_with_the_reason(server):
    with server.tool() as session:
        page = session.call(Status, timeout_s=5).status
    page["is_healthy"] = False
    page["kvcellar"]["parts"]["arena"] = "no memory"
    page["kvcellar"]["arena"] |= {"steps_ready": 0, "waits_for_bytes": 1 << 30}
    shown = "\n".join(status_lines(page, page["metrics"]))
    assert "UNHEALTHY" in shown
    assert "  arena: no memory" in shown
    assert "waits until 1.00 GiB more are free" in shown
