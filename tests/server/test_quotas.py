"""Quotas on a real server, over HTTP and the commands, with engines that store and look up."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from tests.server import running
from tests.server.running import SHARD_BYTES, WAIT_S, RunningServer, eventually
from tests.server.test_requests import NoDeaths, client

from kvcellar.cli.main import main as kvcellar
from kvcellar.clock import FakeClock
from kvcellar.compat.lmcache_cli import main as lmcache
from kvcellar.config.server import ServerConfig
from kvcellar.memory.slots import SlotAllocator
from kvcellar.protocol.messages import Quotas, Role, SetQuota
from kvcellar.server.node import ArenaShape, Node
from kvcellar.server.requests import Requests
from kvcellar.store.machine import Store
from kvcellar.store.policies import IsolatedLRU
from kvcellar.tenancy.names import label_of
from kvcellar.tenancy.shares import QUOTAS_MAX

GB = 1 << 30
FLAGS = ("--eviction-policy", "IsolatedLRU", "--l1-size-gb", str(256 * SHARD_BYTES / GB))
LIMIT_GB = 64 * SHARD_BYTES / GB
CHUNKS = 256


@pytest.fixture(scope="module")
def server():
    with RunningServer(*FLAGS) as one:
        yield one
        assert "Traceback" not in one.log()
        assert "internal error" not in one.log()


@pytest.fixture
def web(server):
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        yield client
        for salt in client.get("/quota").json()["users"]:
            client.delete(path_of(salt))


def tier_pid(server):
    """Return the process id of the server's tier process, 0 while there is none."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            if "tiers.process" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return 0


def path_of(salt):
    return f"/quota/{quote(salt, safe='')}"


def used(web, salt):
    return round(web.get(path_of(salt)).json()["current_usage_gb"] * GB / SHARD_BYTES)


def test_the_shapes_are_lmcaches(web):
    put = web.put("/quota/alice", json={"limit_gb": 2.5})
    assert put.json() == {"cache_salt": "alice", "limit_gb": 2.5, "status": "ok"}
    alice = {"limit_gb": 2.5, "current_usage_gb": 0.0}
    assert web.get("/quota/alice").json() == {"cache_salt": "alice", **alice, "exists": True}
    assert web.get("/quota/bob").json() == {
        "cache_salt": "bob", "limit_gb": 0.0, "current_usage_gb": 0.0, "exists": False,
    }  # fmt: skip
    web.put("/quota/_default", json={"limit_gb": 0})
    users = {"alice": alice, "_default": {"limit_gb": 0.0, "current_usage_gb": 0.0}}
    assert web.get("/quota").json() == {"users": users}
    assert web.delete("/quota/alice").json() == {"cache_salt": "alice", "status": "removed"}
    assert web.delete("/quota/alice").json() == {"cache_salt": "alice", "status": "not_found"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"limit_gb": -1}', "limit_gb: -1"),
        ('{"limit_gb": -1e-9}', "limit_gb: -1e-09"),
        ('{"limit_gb": NaN}', "body"),
        ('{"limit_gb": Infinity}', "body"),
        ('{"limit_gb": 1e999}', "body"),
        ('{"limit_gb": 1e300}', "limit_gb: 1e+300"),
        ('{"limit_gb": "5"}', "$.limit_gb"),
        ('{"limit_gb": null}', "$.limit_gb"),
        ('{"limit_gb": true}', "$.limit_gb"),
        ('{"limit_gb": [1]}', "$.limit_gb"),
        ("{}", "limit_gb"),
        ("", "body"),
        ("7", "object"),
        ('{"limit_gb": 1', "body"),
        ('{"limit_bg": 1}', "limit_bg"),
        ('{"limit_gb": 1, "disk_limit_gb": -2}', "disk_limit_gb: -2"),
        ("\xff", "body"),
    ],
)
def test_a_bad_value_is_400_and_says_which(web, content, named):
    answer = web.put("/quota/alice", content=content.encode("latin-1"))
    assert answer.status_code == 400
    assert named in answer.json()["detail"]
    assert web.get("/quota").json() == {"users": {}}


@pytest.mark.parametrize("salt", ["a/b", "a b", "ü", "%", "-x", "x" * 300, "a?b#c"])
def test_any_salt_can_be_written_in_a_path(server, web, salt):
    path = path_of(salt)
    assert web.put(path, json={"limit_gb": LIMIT_GB}).json()["cache_salt"] == salt
    with server.engine("any") as engine:
        engine.store(*range(1, 4), tenant=salt)
        page = web.get(path).json()
        assert round(page["current_usage_gb"] * GB) == 3 * SHARD_BYTES
        assert page["exists"] is True


def test_a_path_without_a_salt_and_a_method_that_is_not_there(web):
    assert web.put("/quota/", json={"limit_gb": 1}).status_code == 400
    assert web.post("/quota/a", json={"limit_gb": 1}).status_code == 405


def test_two_tenants_with_quotas_keep_them_under_load(server, web):
    """One stays within its quota and keeps all it has, while the other stores without end."""
    web.put("/quota/small", json={"limit_gb": LIMIT_GB})
    web.put("/quota/large", json={"limit_gb": 2 * LIMIT_GB})
    rng, held = random.Random(7), []
    with server.engine("load") as engine:
        engine.store(*range(1, 61), tenant="small")
        for round_ in range(100):
            start = 1000 + 10 * round_
            engine.store(*range(start, start + 10), tenant="large")
            engine.store(*range(start + 5000, start + 5005), tenant=f"guest{round_ % 5}")
            hit = engine.lookup(*range(start, start + 10))
            assert hit.count == 10
            assert used(web, "large") <= 128
            held.append(hit)
            if len(held) > 5:
                engine.release(held.pop(rng.randrange(6)))
        assert used(web, "small") == 60
        assert engine.lookup(*range(1, 61)).count == 60
        engine.let_go()
    metrics = server.status_metrics()
    assert metrics["kvcellar_quota_evicted_chunks_total"] > 0
    assert metrics["kvcellar_tenant_quota_bytes"][label_of("large")] == 128 * SHARD_BYTES
    assert "small" not in str(metrics)


def test_a_store_keeps_the_leading_chunks_that_a_quota_has_room_for(server, web):
    web.put("/quota/tight", json={"limit_gb": 3 * SHARD_BYTES / GB})
    with server.engine("tight") as engine:
        assert list(engine.reserve(*range(1, 7), tenant="tight").states) == [1, 1, 1, 3, 3, 3]
    assert server.status_metrics()["kvcellar_quota_refusals_total"] >= 1


def test_a_quota_that_is_lowered_takes_effect_at_once_and_nobody_else_pays(server, web):
    with server.engine("lowered") as engine:
        engine.store(*range(1, 201), tenant="fat")
        engine.store(*range(300, 320), tenant="thin")
        web.put("/quota/fat", json={"limit_gb": 16 * SHARD_BYTES / GB})
        eventually(lambda: used(web, "fat") == 16)
        assert engine.lookup(*range(1, 201)).count == 16
        assert used(web, "thin") == 20
        web.put("/quota/fat", json={"limit_gb": 0})
        assert used(web, "fat") == 16
        engine.let_go()
        assert list(engine.reserve(500, tenant="fat").states) == [3]
        eventually(lambda: used(web, "fat") <= 16)


def test_a_thousand_tenants_share_and_pages_stay_small(server, web):
    with server.engine("many") as engine:
        for number in range(1000):
            engine.store(10_000 + number, tenant=f"salt{number}")
        page = web.get("/status").json()["kvcellar"]
        assert page["tenants"] == CHUNKS
        assert len(page["largest"]) == 50
        assert page["others_used_bytes"] == (CHUNKS - 50) * SHARD_BYTES
        text = web.get("/metrics").text
        assert text.count("kvcellar_tenant_used_bytes{") == 51
        assert 'kvcellar_tenant_used_bytes{tenant="_others"}' in text
        assert "salt9" not in text
        # All hold one chunk, so the one that was used least recently gave way each time.
        assert engine.lookup(10_999).count == 1
        assert engine.lookup(10_000).count == 0


def test_who_has_no_quota_is_not_wiped_for_it(server, web):
    for name in ("a", "b"):
        web.put(f"/quota/{name}", json={"limit_gb": 1.0})
    with server.engine("none") as engine:
        engine.store(*range(1, 21), tenant="none")
        for start in range(1000, 3000, 20):
            engine.store(*range(start, start + 20), tenant="ab"[start // 20 % 2])
            engine.release(engine.lookup(1))
        assert used(web, "none") >= 20
        engine.store(*range(5000, 5200), tenant="none")
        assert used(web, "none") >= CHUNKS // 10 - 1


def test_the_commands_set_show_list_and_remove(server, web, capsys):
    def run(*words, code=0, command=kvcellar):
        capsys.readouterr()
        assert command(words) == code
        return capsys.readouterr()

    at = ("--port", str(server.port))
    assert "2.50 GiB in memory" in run("quota", "set", "bob", "--limit-gb", "2.5", *at).out
    page = json.loads(run("quota", "get", "bob", *at, "--json").out)
    assert page["limit_bytes"] == 2.5 * GB
    assert page["label"] == label_of("bob")
    assert run("quota", "list", *at).out.startswith("bob (")
    assert run("quota", "delete", "bob", *at).out == "bob: quota removed\n"
    assert run("quota", "delete", "bob", *at).out == "bob had no quota\n"
    assert "no tenant has a quota" in run("quota", "list", *at).out
    for words, said in (
        (["set", "bob"], "--limit-gb is missing"),
        (["set", "bob", "--limit-gb", "nan"], "--limit-gb nan"),
        (["set", "bob", "--limit-gb", "-1"], "--limit-gb"),
        (["set"], "of which salt?"),
        (["sit"], "'sit' cannot be done"),
        ([], "cannot be done"),
    ):
        assert said in run("quota", *words, code=2).err
    url = ("--url", server.http)
    shown = run("quota", "set", "a/b", "--limit-gb", "3", *url, command=lmcache).out
    assert json.loads(shown) == {"cache_salt": "a/b", "limit_gb": 3.0, "status": "ok"}
    assert json.loads(run("quota", "get", "a/b", *url, command=lmcache).out)["exists"] is True
    assert "a/b" in json.loads(run("quota", "list", *url, command=lmcache).out)["users"]
    gone = json.loads(run("quota", "delete", "a/b", *url, command=lmcache).out)
    assert gone["status"] == "removed"
    said = run("quota", "set", "x", "--limit-gb", "-1", *url, code=1, command=lmcache).err
    assert "answered 400" in said
    assert "--limit-gb is missing" in run("quota", "set", "x", *url, code=2, command=lmcache).err


def test_a_quota_bounds_a_tenant_on_disk_as_well_and_outlives_the_tier_process(tmp_path):
    """A server in a process, its tier process, and a real folder."""
    disk = ("--disk-path", str(tmp_path / "disk"))
    with RunningServer(*FLAGS, *disk) as server, httpx.Client(base_url=server.http) as web:

        def on_disk(salt):
            return round(web.get(path_of(salt)).json().get("disk_usage_gb", 0) * GB)

        web.put("/quota/a", json={"limit_gb": LIMIT_GB, "disk_limit_gb": 8 * LIMIT_GB})
        web.put("/quota/b", json={"limit_gb": LIMIT_GB})
        with server.engine("disk") as engine:
            engine.store(*range(1, 31), tenant="a")
            engine.store(*range(101, 131), tenant="b")
            eventually(lambda: on_disk("a") >= 30 * SHARD_BYTES)
            eventually(lambda: 0 < on_disk("b") <= LIMIT_GB * GB)
            page = web.get("/quota/a").json()
            assert page["disk_limit_gb"] == 8 * LIMIT_GB
            web.put("/quota/a", json={"limit_gb": LIMIT_GB, "disk_limit_gb": 0})
            eventually(lambda: on_disk("a") == 0)
            first = tier_pid(server)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: tier_pid(server) not in {0, first})
            eventually(lambda: server.status()["storage_manager"]["l2_adapters"])
            engine.store(*range(31, 41), tenant="a")
            engine.store(*range(201, 203), tenant="b")
            eventually(lambda: on_disk("b") > 0)
            assert on_disk("a") == 0


def test_quotas_on_a_disk_behind_memory_that_keeps_none(tmp_path):
    adapter = {
        "type": "fs",
        "base_path": str(tmp_path / "disk"),
        "eviction": {"eviction_policy": "IsolatedLRU"},
    }
    with (
        RunningServer("--l2-adapter", json.dumps(adapter)) as server,
        httpx.Client(base_url=server.http) as web,
        server.engine("disk") as engine,
    ):
        assert web.put("/quota/a", json={"limit_gb": LIMIT_GB}).status_code == 200
        engine.store(*range(1, 101), tenant="a")
        assert used(web, "a") == 100

        def is_bounded():
            # What is about to be written is on the account before room is made for it.
            page = web.get("/quota/a").json()
            return 0 < page.get("disk_usage_gb", 0) <= page["limit_gb"] == LIMIT_GB

        eventually(is_bounded)
        assert used(web, "a") == 100


def test_as_many_quotas_as_there_may_be():
    made = Node(
        ServerConfig(l1_bytes=1 << 20, eviction_policy="IsolatedLRU", instance_id="here"),
        Store(SlotAllocator(1 << 20), IsolatedLRU()),
        arena=ArenaShape(1 << 20, 1 << 20),
        deaths=NoDeaths(),
        clock=FakeClock(),
    )
    requests, tool = Requests(made), client(made, Role.TOOL)
    for number in range(QUOTAS_MAX):
        requests.answer(tool, SetQuota(number, f"t{number}", 1))
    one_more = requests.answer(tool, SetQuota(1, "one more", 1))
    assert (one_more.code, one_more.message[:20]) == ("limit", "10000 tenants have a")
    changed = requests.answer(tool, SetQuota(1, "t7", None))
    assert changed.quotas[0].limit_bytes == 1
    assert len(requests.answer(tool, Quotas(1)).quotas) == QUOTAS_MAX - 1
    assert requests.answer(tool, SetQuota(1, "one more", 1)).quotas[0].limit_bytes is None


def test_a_server_that_keeps_no_quotas_says_so():
    with RunningServer() as server, httpx.Client(base_url=server.http, timeout=WAIT_S) as web:
        answer = web.put("/quota/a", json={"limit_gb": 1})
        assert answer.status_code == 400
        assert "--eviction-policy IsolatedLRU" in answer.json()["detail"]
        assert web.delete("/quota/a").json()["status"] == "not_found"
        with server.engine("counted") as engine:
            engine.store(1, 2, tenant="a")
            assert used(web, "a") == 2


def test_the_commands_carry_the_token_and_it_is_seen_nowhere(tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("a-secret-that-nobody-sees")
    with RunningServer(*FLAGS, "--admin-token-file", str(path)) as server:
        url, token = ("--url", server.http), ("--admin-token-file", str(path))
        assert lmcache(["quota", "set", "a", "--limit-gb", "1", *url]) == 1
        assert "answered 401" in capsys.readouterr().err
        assert lmcache(["quota", "set", "a", "--limit-gb", "1", *url, *token]) == 0
        assert lmcache(["kvcache", "clear", *url, *token]) == 0
        assert kvcellar(["quota", "list", "--port", str(server.port)]) == 0
        with httpx.Client(base_url=server.http, timeout=WAIT_S) as web:
            assert web.post("/cache/clear").status_code == 401
            pages = web.get("/status").text + web.get("/metrics").text
        shown = capsys.readouterr()
        for text in (pages, server.log(), shown.out, shown.err):
            assert "nobody-sees" not in text


class TestFile:
    """Quotas over a restart."""

    def test_quotas_outlive_a_server_that_is_killed(self, tmp_path):
        flags = (*FLAGS, "--quota-file", str(tmp_path / "quotas"))
        with RunningServer(*flags) as server:
            put(server, "alice", limit_gb=LIMIT_GB)
            put(server, "bob", limit_gb=1)
            put(server, "_default", limit_gb=2, disk_limit_gb=3.5)
            put(server, "bob", None)
            server.process.kill()
        with RunningServer(*flags) as server:
            users = httpx.get(f"{server.http}/quota", timeout=WAIT_S).json()["users"]
            assert {salt: page["limit_gb"] for salt, page in users.items()} == {
                "alice": LIMIT_GB, "_default": 2.0,
            }  # fmt: skip
            assert users["_default"]["disk_limit_gb"] == 3.5
            with server.engine() as engine:
                engine.store(*range(1, 101), tenant="alice")
                assert engine.lookup(*range(1, 101)).count == 64
            assert "alice" not in server.log()
        assert (tmp_path / "quotas").stat().st_mode & 0o777 == 0o600

    def test_a_disk_keeps_to_them_as_well(self, tmp_path):
        flags = ("--disk-path", str(tmp_path / "disk"), "--quota-file", str(tmp_path / "quotas"))
        flags = (*FLAGS, *flags)
        with RunningServer(*flags) as server:
            put(server, "alice", limit_gb=1, disk_limit_gb=10 * 8192 / GB)
        with RunningServer(*flags) as server, server.engine() as engine:
            engine.store(*range(1, 41), tenant="alice")
            (adapter,) = eventually(
                lambda: (
                    (found := server.status()["storage_manager"]["l2_adapters"])
                    and found[0]["full_chunks"] + found[0]["written_chunks"] == 40
                    and found
                )
            )
            assert adapter["stored_object_count"] <= 10

    def test_changes_at_once_are_all_kept(self, tmp_path):
        flags = (*FLAGS, "--quota-file", str(tmp_path / "quotas"))
        with RunningServer(*flags) as server:
            web = httpx.Client(base_url=server.http, timeout=WAIT_S)
            with web, ThreadPoolExecutor(8) as pool:
                answers = pool.map(
                    lambda n: web.put(f"/quota/s{n}", json={"limit_gb": n}), range(100)
                )
                assert {answer.status_code for answer in answers} == {200}
            server.stop()
        saved = json.loads((tmp_path / "quotas").read_text())["quotas"]
        assert saved == {f"s{n}": {"limit_gb": float(n)} for n in range(100)}

    def test_a_file_that_cannot_be_written_is_said_and_the_quota_holds(self, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        with RunningServer(*FLAGS, "--quota-file", str(folder / "quotas")) as server:
            folder.rmdir()
            answer = put(server, "alice", limit_gb=1)
            assert answer.status_code == 503
            assert "--quota-file cannot be written (No such file" in answer.json()["detail"]
            page = httpx.get(f"{server.http}/quota/alice", timeout=WAIT_S).json()
            assert page["limit_gb"] == 1.0
            folder.mkdir()
            assert put(server, "bob", limit_gb=1).status_code == 200
        saved = json.loads((folder / "quotas").read_text())["quotas"]
        assert set(saved) == {"alice", "bob"}

    def test_a_server_that_keeps_no_quotas_refuses_the_flag(self, tmp_path):
        words = [sys.executable, "-m", "kvcellar", "server", *running.FLAGS]
        words += ["--quota-file", str(tmp_path / "quotas")]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert ended.returncode == 2
        assert "--quota-file: quotas are kept with" in ended.stderr
        assert "Traceback" not in ended.stderr


def put(server, salt, body=..., **limits):
    url = f"{server.http}{path_of(salt)}"
    if body is None:
        return httpx.delete(url, timeout=WAIT_S)
    return httpx.put(url, json=limits, timeout=WAIT_S)
