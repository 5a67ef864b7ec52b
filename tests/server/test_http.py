"""The pages over real HTTP, from the real process, and what happens when it or its parent dies."""

import os
import signal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.server.running import WAIT_S, RunningServer, eventually, is_running

from kvcellar import __version__
from kvcellar.errors import TimeoutExpiredError
from kvcellar.protocol.messages import Cleared, StatusReply
from kvcellar.server.facts import PARTS
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.pages import make_app
from kvcellar.telemetry.metrics import FAMILIES


@pytest.fixture
def web(server):
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        yield client


def test_the_small_pages_answer(web):
    assert web.get("/").json() == {"status": "ok", "service": "kvcellar HTTP API"}
    assert web.get("/version").text == __version__
    assert web.get("/healthcheck").json() == {"status": "healthy"}


def test_status_counts_complete_objects_where_guides_look(server, web):
    with server.engine("seen") as engine:
        engine.store(1, 2, 3)
        engine.reserve(4)
        page = web.get("/status").json()
        l1 = page["storage_manager"]["l1_manager"]
        assert l1["total_object_count"] == 3
        assert l1["write_locked_count"] == 1
        assert l1["memory_configured_bytes"] == 64 << 20
        assert page["is_healthy"] is True
        own = page["kvcellar"]
        assert own["parts"] == dict.fromkeys(PARTS, "")
        (instance,) = [i for i in own["instances"] if i["name"] == "seen"]
        assert instance["ranks"] == [0]
        assert instance["scheduler"] is True
        assert instance["chunk_tokens"] == 16
        assert "metrics" not in page


def test_metrics_are_what_prometheus_reads(server, web):
    with server.engine("metered") as engine:
        engine.store(1)
        engine.lookup(1)
        answer = web.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    names = [family.name for family in families]
    assert sorted(names) == sorted(family.name.removesuffix("_total") for family in FAMILIES)
    series = [(s.name, tuple(sorted(s.labels.items()))) for f in families for s in f.samples]
    assert len(series) == len(set(series))
    values = {s.name: s.value for f in families for s in f.samples if not s.labels}
    assert values["kvcellar_objects"] == 1
    assert values["kvcellar_lookup_seconds_count"] >= 1
    assert values["kvcellar_store_seconds_count"] >= 1
    healthy = next(family for family in families if family.name == "kvcellar_healthy")
    assert {s.labels["part"]: s.value for s in healthy.samples} == dict.fromkeys(PARTS, 1.0)


@pytest.mark.parametrize("body", [None, {}, {"tier": "l1", "force": False}, {"force": True}])
def test_clear_empties_l1(server, web, body):
    with server.engine("cleared") as engine:
        engine.store(1, 2)
        answer = (
            web.post("/cache/clear", json=body) if body is not None else web.post("/cache/clear")
        )
        assert answer.status_code == 200
        page = answer.json()
        assert page["status"] == "ok"
        assert page["cleared"] == {"tier": "l1"}
        assert page["chunks"] == 2
        assert engine.lookup(1).count == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://203.0.113.5:8080"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:8080"}, 200),
    ],
)
def test_a_page_from_elsewhere_cannot_have_a_browser_clear_the_cache(web, headers, status):
    assert web.post("/cache/clear", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("content", "status", "named"),
    [
        (b"{", 400, "body"),
        (b"[]", 400, "object"),
        (b'{"tier": 1}', 400, "$.tier"),
        (b'{"force": "yes"}', 400, "$.force"),
        (b'{"tear": "l1"}', 400, "tear"),
        (b'{"tier": "l2"}', 400, "'l2'"),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 60_000, 400, "body"),
        (b" " * 70_000, 413, "65536"),
    ],
    ids=range(9),
)
def test_a_bad_body_is_refused_by_field(server, web, content, status, named):
    answer = web.post("/cache/clear", content=content)
    assert answer.status_code == status
    assert named in answer.json()["detail"]


def test_what_is_not_there_says_so(web):
    missing = web.get("/nothing")
    assert missing.status_code == 404
    assert missing.json() == {"detail": "GET /nothing is not here"}
    wrong = web.get("/cache/clear")
    assert wrong.status_code == 405
    assert wrong.json() == {"detail": "GET /cache/clear is not here"}


class Line:
    """A control loop that answers as a test says."""

    def __init__(self, answer):
        self.answer = answer

    async def call(self, make, *, timeout_s):
        answer = self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer(make(1))


def app(answer, client=("127.0.0.1", 1)):
    return TestClient(
        make_app(Line(answer), Admission()),
        base_url="http://localhost",
        client=client,
        raise_server_exceptions=True,
    )


@pytest.mark.parametrize("path", ["/healthcheck", "/status", "/metrics"])
def test_a_frozen_control_loop_makes_503(path):
    answer = app(TimeoutExpiredError("the control loop did not answer within 1 s")).get(path)
    assert answer.status_code == 503
    assert "did not answer within 1 s" in answer.text


def test_health_names_every_broken_part():
    page = {"kvcellar": {"parts": {"arena": "no memory", "door": "", "store": "books wrong"}}}
    answer = app(lambda request: StatusReply(request.id, page)).get("/healthcheck")
    assert answer.status_code == 503
    assert answer.json() == {
        "status": "unhealthy",
        "reason": "arena: no memory; store: books wrong",
    }


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.1.2.3", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("10.0.0.7", 403),
        ("::ffff:10.0.0.7", 403),
        ("fe80::1", 403),
        ("testclient", 403),
    ],
)
def test_only_loopback_may_change_anything(host, status):
    client = app(lambda request: Cleared(request.id, 0, 0), client=(host, 1))
    answer = client.post("/cache/clear")
    assert answer.status_code == status
    assert client.get("/").status_code == 200


def test_a_dead_http_process_is_started_again_and_waiting_callers_are_served():
    with RunningServer() as server:
        first = server.http_pid()
        os.kill(first, signal.SIGKILL)
        answer = httpx.get(f"{server.http}/healthcheck", timeout=WAIT_S)
        assert answer.status_code == 200
        assert server.http_pid() != first
        server.wait_for_line("child process ended")
        assert server.status_metrics()["kvcellar_http_restarts_total"] == 1
        assert server.status()["is_healthy"] is True


def test_while_the_http_process_is_away_its_part_is_unhealthy():
    with RunningServer() as server:
        os.kill(server.http_pid(), signal.SIGKILL)
        page = eventually(lambda: not (p := server.status())["is_healthy"] and p)
        assert "HTTP process" in page["kvcellar"]["parts"]["http"]
        eventually(lambda: server.status()["is_healthy"])


def test_the_http_process_ends_with_a_killed_parent():
    with RunningServer() as server:
        child = server.http_pid()
        server.kill()
        eventually(lambda: not is_running(child))


def test_a_frozen_control_process_is_unhealthy_and_recovers():
    with RunningServer() as server:
        assert httpx.get(f"{server.http}/healthcheck", timeout=WAIT_S).status_code == 200
        server.process.send_signal(signal.SIGSTOP)
        try:
            answer = httpx.get(f"{server.http}/healthcheck", timeout=WAIT_S)
            assert answer.status_code == 503
            assert "did not answer" in answer.json()["reason"]
        finally:
            server.process.send_signal(signal.SIGCONT)
        eventually(
            lambda: httpx.get(f"{server.http}/healthcheck", timeout=WAIT_S).status_code == 200
        )
