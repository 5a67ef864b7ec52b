"""The guide's own commands, as written, and what happens when one is mistyped.

`make demo` starts `lmcache server` and vLLM with `LMCacheMPConnector` exactly as LMCache's guide
does, with a real model; here it runs with a shorter text.
"""

import re
import signal
import subprocess
import sys

import psutil
import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Engine
from tests.e2e.node import lmcache_transfer
from tests.e2e.processes import ROOT, Program

pytestmark = pytest.mark.e2e

DEMO_S = 500.0


@pytest.mark.timeout(DEMO_S + 100)
def test_the_demo_shows_hits_and_equal_answers(folder, model_folder):
    assert model_folder.is_dir()
    demo = Program("demo", [sys.executable, "scripts/demo.py", "--shelves", "45"], folder=folder)
    demo.start()
    try:
        assert demo.wait_for_end(DEMO_S) == 0, demo.tail()
    finally:
        demo.stop()

    output = demo.output()
    assert "lmcache server --port" in output
    assert "LMCacheMPConnector" in output
    assert "all equal" in output
    assert len(re.findall(r"vllm:external_prefix_cache_hits [1-9]\d* of", output)) == 2
    assert demo.members() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_stops_everything_when_it_is_interrupted(folder, number):
    demo = Program(f"interrupted-{number}", [sys.executable, "scripts/demo.py"], folder=folder)
    demo.start()
    demo.wait_until(lambda: "vLLM starts" in demo.output(), 60, what="the start of vLLM")
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) >= 2

    demo.signal(number)

    assert demo.wait_for_end(60) == 130
    assert "all stopped" in demo.output()
    assert [process for process in started if process.is_running()] == []


def test_a_mistyped_key_is_refused_with_the_right_one(tiny, folder, stopping):
    cellar = Cellar("unused", folder=folder)
    transfer = lmcache_transfer(cellar)
    extra = transfer["kv_connector_extra_config"]
    extra["lmcache.mp.prot"] = extra.pop("lmcache.mp.port")
    engine = stopping(Engine("mistyped", tiny, folder=folder, transfer=transfer))
    engine.start()

    assert engine.wait_for_end(120) != 0
    assert "lmcache.mp.prot" in engine.output()
    assert re.search(r"did you mean '?lmcache\.mp\.port", engine.output())


@pytest.mark.parametrize("command", [("lmcache", "server"), ("kvcellar", "server")])
def test_more_memory_than_there_is_is_refused_with_both_numbers(folder, command):
    """The guide's `--l1-size-gb 100`, here as 100,000."""
    cellar = Cellar("huge", folder=folder, l1_gb=100_000, command=command)
    cellar.start()

    assert cellar.wait_for_end(10) != 0
    assert re.search(r"--l1-size-gb.* 97\.66 TiB .* \d+\.\d+ GiB", cellar.output())
    cellar.close()


def test_status_and_ping_speak_to_a_server_of_either_name(folder, stopping):
    cellar = stopping(Cellar("either", folder=folder, l1_gb=0.1, command=("lmcache", "server")))
    cellar.start_and_wait()

    def kvcellar(*words: str) -> subprocess.CompletedProcess[str]:
        program = f"{sys.exec_prefix}/bin/kvcellar"
        return subprocess.run(
            [program, *words, "--port", str(cellar.port)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            cwd=ROOT,
        )

    assert kvcellar("ping").returncode == 0
    status = kvcellar("status")
    assert status.returncode == 0
    assert "either" in status.stdout
    assert kvcellar("clear").returncode == 0
    cellar.stop()
    assert kvcellar("ping").returncode != 0
