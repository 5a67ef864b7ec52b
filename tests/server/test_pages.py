"""The pages over real HTTP: the configuration, the objects, and the description of all."""

import re

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.running import WAIT_S, RunningServer, key

from kvcellar.compat.lmcache_metrics import LMCACHE_METRICS
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.config_pages import ABSENT
from kvcellar.server.http.openapi import OPERATIONS
from kvcellar.server.http.pages import make_app
from kvcellar.telemetry.metrics import FAMILIES

LMCACHE = "import sys; from kvcellar.compat.lmcache_cli import main; sys.exit(main())"


@pytest.fixture
def web(server):
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        yield client


def hex_of(*numbers):
    return [key(number).hex() for number in numbers]


def test_the_configuration_is_shown(web):
    page = web.get("/config").json()
    assert page["storage_manager"]["eviction_policy"] == "LRU"
    assert page["storage_manager"]["l1_size_bytes"] == 64 << 20


@pytest.mark.parametrize("path", ABSENT)
def test_what_has_no_place_here_says_why(web, path):
    for method in ("GET", "POST"):
        answer = web.request(method, path)
        assert answer.status_code == 404
        assert answer.json() == {"detail": f"{method} {path} is not here: {ABSENT[path]}"}


def test_objects_are_listed_in_pages_with_lmcaches_fields(server, web):
    with server.engine("listed", world_size=2) as engine:
        engine.store(1, 2, 3)
        first = web.get("/cache/objects", params={"page_size": 2}).json()
        token = first["next_page_token"]
        second = web.get("/cache/objects", params={"page_size": 2, "page_token": token}).json()
    entries = first["entries"] + second["entries"]
    assert [(e["key"]["chunk_hash_hex"], e["key"]["kv_rank"]) for e in entries] == [
        (name, rank) for name in hex_of(1, 2, 3) for rank in (0, 1)
    ]
    assert {e["size_bytes"] for e in entries} == {4096}
    assert second["next_page_token"] is None
    none = web.get("/cache/objects", params={"model_name": "nobody's"}).json()
    assert none["entries"] == []


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"page_size": "0"}, "page_size"),
        ({"page_size": "5001"}, "5000"),
        ({"page_size": "many"}, "page_size"),
        ({"page_token": "-1"}, "page_token"),
        ({"tier": "l3"}, "tier"),
        ({"pagesize": "1"}, "pagesize is no parameter"),
    ],
)
def test_a_wrong_parameter_is_named(web, query, named):
    answer = web.get("/cache/objects", params=query)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]


def test_chunks_are_deleted_by_the_keys_of_their_objects(server, web):
    with server.engine("deleting", world_size=2) as engine:
        engine.store(1, 2, 3)
        engine.lookup(1)
        listed = web.get("/cache/objects").json()["entries"]
        of_two = [entry["key"] for entry in listed if entry["key"]["chunk_hash_hex"] in hex_of(2)]
        body = {"keys": [*of_two, *hex_of(1, 9)], "tier": "l1"}
        answer = web.request("DELETE", "/cache/objects", json=body)
        assert answer.json() == {"deleted": 2, "skipped": 2, "ok": True}
        answer = web.request("DELETE", "/cache/objects", json={"keys": hex_of(1), "force": True})
        assert answer.json() == {"deleted": 1, "skipped": 0, "ok": True}
        left = web.get("/cache/objects").json()["entries"]
        assert {entry["key"]["chunk_hash_hex"] for entry in left} == {*hex_of(3)}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"keys": ["xyz"]}, "'xyz' is no key"),
        ({"keys": [7]}, "keys"),
        ({}, "keys"),
        ({"keys": [], "tier": "l2"}, "tier"),
        ({"keys": [], "froce": True}, "froce"),
        ({"keys": ["0" * 64] * 10_001}, "10000"),
    ],
    ids=range(6),
)
def test_a_wrong_deletion_is_named_by_its_field(web, body, named):
    answer = web.request("DELETE", "/cache/objects", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_objects_are_nothing_for_a_page_from_elsewhere(web, method):
    headers = {"Origin": "http://evil.example"}
    body = {"json": {"keys": []}} if method == "DELETE" else {}
    answer = web.request(method, "/cache/objects", headers=headers, **body)
    assert answer.status_code == 403


def test_the_description_names_every_route_and_no_other():
    routes = make_app(None, Admission()).routes
    real = {
        (method.lower(), re.sub(r":path\}", "}", route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
        if route.path not in ABSENT
    }
    assert real == {(operation.method, operation.path) for operation in OPERATIONS}


def test_the_description_is_true_of_what_a_server_answers(server, web):
    document = web.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    with server.engine("described") as engine:
        engine.store(1)
        for operation in OPERATIONS:
            if operation.method != "get" or "{request_id}" in operation.path:
                continue
            answer = web.get(operation.path.replace("{salt}", "tenant"))
            if "quota" in operation.path and answer.status_code == 400:
                continue  # Only a server with IsolatedLRU has them.
            assert answer.status_code == 200, operation.path
            if operation.answer is not None:
                jsonschema.validate(answer.json(), operation.answer)
        deleted = web.request("DELETE", "/cache/objects", json={"keys": hex_of(1)})
        cleared = web.post("/cache/clear")
    by_name = {(operation.method, operation.path): operation for operation in OPERATIONS}
    jsonschema.validate(deleted.json(), by_name["delete", "/cache/objects"].answer)
    jsonschema.validate(cleared.json(), by_name["post", "/cache/clear"].answer)


def test_the_page_for_people_names_every_path_and_loads_nothing(web):
    page = web.get("/docs").text
    for operation in OPERATIONS:
        assert operation.path in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


def test_lmcaches_metrics_stand_beside_ours_under_its_name():
    command = ("-c", LMCACHE, "server")
    with RunningServer(command=command) as server, server.engine("metered") as engine:
        engine.store(1, 2)
        engine.lookup(1)
        text = httpx.get(f"{server.http}/metrics", timeout=WAIT_S).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {family.name.removesuffix("_total") for family in FAMILIES}
    theirs = {alias.name.removesuffix("_total") for alias in LMCACHE_METRICS}
    assert set(families) == ours | theirs
    value = {name: family.samples[0].value for name, family in families.items() if name in theirs}
    assert value["lmcache_mp_lookups"] == 1
    assert value["lmcache_mp_l1_write"] == 2
    assert value["lmcache_mp_l1_usage_ratio"] == 2 * 4096 / (64 << 20)
    assert families["lmcache_mp_l1_allocation_failure"].samples[0].labels == {"during": "l1_store"}
