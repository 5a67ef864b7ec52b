"""The commands that take --url, typed as a user would, under either name."""

import json

import pytest
from tests.cli.engine import Engine
from tests.server.running import RunningServer, key

from kvcellar.cli.main import main as kvcellar
from kvcellar.compat.lmcache_cli import main as lmcache

NAMES = {"kvcellar": kvcellar, "lmcache": lmcache}


@pytest.fixture(params=NAMES)
def run(request, capsys):
    def command(*words, code=0):
        capsys.readouterr()
        assert NAMES[request.param](words) == code
        return capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def server():
    with RunningServer("--instance-id", "here") as running:
        yield running


@pytest.fixture(scope="module")
def engine():
    with Engine() as running:
        yield running


def test_a_server_is_described_for_people_and_for_programs(run, server):
    shown = run("describe", "kvcache", "--url", server.http).out
    assert shown.startswith("node here: healthy")
    page = json.loads(run("describe", "kvcache", "--url", server.http, "--format", "json").out)
    assert page["storage_manager"]["l1_manager"]["total_object_count"] == 0


def test_an_engine_is_described(run, engine):
    shown = run("describe", "engine", "--url", engine.url).out
    assert "vLLM 0.32.0" in shown
    assert "tiny (up to 512 tokens)" in shown
    page = json.loads(run("describe", "engine", "--url", engine.url, "--format", "json").out)
    assert page["metrics"] == {"requests_running": 3.0, "external_prefix_cache_hits": 7.0}


def test_the_cache_is_listed_and_cleared(run, server):
    with server.engine("filled", world_size=2) as filled:
        filled.store(1, 2, 3)
        query = ("query", "kvcache", "--url", server.http)
        assert f"{key(1).hex()[:16]} rank 0 4096 bytes" in run(*query).out
        page = json.loads(run(*query, "--limit", "4", "--format", "json").out)
        assert len(page["entries"]) == 4
        assert run(*query, "--model", "none").out == "no objects\n"
        cleared = run("kvcache", "clear", "--url", server.http).out
        assert cleared == f"cleared 3 chunks at {server.http}\n"
        answer = run("kvcache", "clear", "--url", server.http, "--format", "json").out
        assert json.loads(answer)["cleared"] == {"tier": "l1"}


def test_a_prompt_is_timed(run, engine, tmp_path):
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "b.txt").write_text("beta")
    shown = run(
        *("query", "engine", "--url", engine.url, "--prompt", "read {a} and {b}, not {c}"),
        *("--documents", f"a={tmp_path / 'a.txt'}", f"b={tmp_path / 'b.txt'}"),
        *("--max-tokens", "9", "--format", "json"),
    ).out
    report = json.loads(shown)
    assert report["text"] == "t0 t1 t2 t3 t4 "
    assert (report["prompt_tokens"], report["completion_tokens"]) == (40, 5)
    assert (report["cached_tokens"], report["model"], report["id"]) == (32, "tiny", "cmpl-7")
    assert 0 < report["ttft_ms"] <= report["total_ms"]
    assert report["tpot_ms"] >= 0
    path, body = engine.bodies[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "read alpha and beta, not {c}"}]
    assert body["max_tokens"] == 9
    shown = run("query", "engine", "--url", engine.url, "--prompt", "x", "--completions").out
    assert "TTFT " in shown
    assert "kvcellar why-miss cmpl-7" in shown
    assert engine.bodies[-1][1]["prompt"] == "x"


def test_a_model_without_a_chat_is_asked_for_a_completion(run):
    with Engine(has_chat=False) as engine:
        run("query", "engine", "--url", engine.url, "--prompt", "x", "--chat-first")
        assert [path for path, _ in engine.bodies] == ["/v1/chat/completions", "/v1/completions"]


def test_an_engine_that_fails_half_way_is_code_1(run):
    with Engine(broken=True) as engine:
        said = run("query", "engine", "--url", engine.url, "--prompt", "x", code=1).err
    assert "out of luck" in said


def test_an_answer_can_go_to_a_file_alone(run, server, tmp_path):
    path = tmp_path / "page.json"
    words = ("describe", "kvcache", "--url", server.http, "--format", "json", "-q")
    assert run(*words, "--output", str(path)).out == ""
    assert json.loads(path.read_text())["is_healthy"] is True
    said = run(*words, "--output", str(tmp_path / "no" / "page"), code=2).err
    assert "No such file" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("describe",), "write "),
        (("describe", "kvcash"), "kvcache or engine"),
        (("kvcache", "clear"), "--url is missing"),
        (("query", "engine"), "--prompt is missing"),
        (("query", "engine", "--prompt", "x", "--documents", "a"), "write NAME=PATH"),
        (("query", "engine", "--prompt", "x", "--documents", "a=b"), "the prompt has no {a}"),
        (("query", "engine", "--prompt", "{a}", "--documents", "a=/no"), "cannot be read"),
        (("query", "engine", "--prompt", "x", "--max-tokens", "0"), "--max-tokens 0"),
        (("query", "coordinator"), "there is no coordinator"),
        (("describe", "engine", "--format", "yaml"), "terminal or json"),
        (("describe", "engine", "--url", "ftp://x"), "write http://localhost:8000"),
    ],
    ids=range(11),
)
def test_a_wrong_command_is_code_2_and_says_the_fix(run, words, said):
    assert said in run(*words, code=2).err


def test_nobody_at_the_url_is_code_1_and_named(run):
    said = run("query", "engine", "--url", "http://127.0.0.1:9", "--prompt", "x", code=1).err
    assert "http://127.0.0.1:9" in said
