"""Why a prompt missed, what an engine says and what the doctor finds, with real vLLM.

The commands as a user types them: a prompt is asked and timed, its id is given to `why-miss`.
"""

import json
import os
import subprocess
import sys

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Engine
from tests.e2e.node import own_transfer
from tests.e2e.processes import ROOT

pytestmark = pytest.mark.e2e

TEXT = "The cellar keeps what was pressed once, so that nobody presses it again. " * 40


def kvcellar(*words: str, code: int = 0) -> str:
    folder = f"{sys.exec_prefix}/bin"
    answer = subprocess.run(
        [f"{folder}/kvcellar", *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout


def test_a_prompt_is_asked_and_its_miss_explained(model_folder, folder, stopping):
    cellar = stopping(Cellar("explained", folder=folder, l1_gb=1))
    cellar.start_and_wait()
    engine = stopping(
        Engine(
            "explained",
            model_folder,
            folder=folder,
            transfer=own_transfer(cellar),
            options=["--max-model-len", "2048"],
        )
    )
    engine.start()
    engine.wait_until_ready()
    url = f"http://127.0.0.1:{engine.port}"
    port = ("--port", str(cellar.port))

    def ask(prompt: str) -> dict[str, object]:
        words = ("query", "engine", "--url", url, "--max-tokens", "3", "--completions")
        return json.loads(kvcellar(*words, "--prompt", prompt, "--format", "json"))

    def why(report: dict[str, object]) -> dict[str, object]:
        (miss,) = json.loads(kvcellar("why-miss", str(report["id"]), *port, "--json"))
        return miss

    first = ask(TEXT)
    assert first["prompt_tokens"] > 512
    assert 1 <= first["completion_tokens"] <= 3
    assert 0 < first["ttft_ms"] <= first["total_ms"]
    assert why(first)["reason"] == "new"

    cellar.wait_for_objects(first["prompt_tokens"] // 256)
    second = why(ask(TEXT[: len(TEXT) // 2] + "And now something else. " * 100))
    assert second["reason"] == "tokens"
    assert 256 <= second["evidence"]["equal_tokens"] < first["prompt_tokens"]

    described = kvcellar("describe", "engine", "--url", url)
    assert "external prefix cache queries:" in described
    found = kvcellar("doctor", *port, "--http-port", str(cellar.http_port), "--json")
    checks = json.loads(found)["checks"]
    engines = [check for check in checks if check["name"].startswith("engine ")]
    assert [check["state"] for check in engines] == ["ok"]
