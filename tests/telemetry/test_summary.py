"""The status page in lines says everything that an operator must see."""

import copy

import pytest
from tests.server.running import RunningServer, eventually

from kvcellar.telemetry.summary import status_lines


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    with RunningServer("--disk-path", str(folder)) as server, server.engine("one"):
        yield eventually(lambda: (p := server.status())["storage_manager"]["l2_adapters"] and p)


def shown(page, change=None):
    page = copy.deepcopy(page)
    if change is not None:
        change(page)
    return "\n".join(status_lines(page))


def test_tiers_and_engines_are_shown(page):
    text = shown(page)
    assert "healthy" in text.splitlines()[0]
    assert "tier     fs-0: 0 chunks, " in text
    assert "instance one: " in text
    assert "nothing is cached" not in text
    assert "lookups" not in text


def test_what_is_wrong_is_shown_where_it_is(page):
    def change(page):
        own = page["kvcellar"]
        own["parts"]["http"] = "silent"
        own["degraded"] = {"tiers": "disk is gone"}
        own["instances"][0] |= {"refusal": "other sizes", "counts": {"stored": 3, "busy": 0}}
        page["storage_manager"]["l2_adapters"][0]["trouble"] = "read-only"
        page["is_healthy"] = False

    text = shown(page, change)
    assert "UNHEALTHY" in text
    assert "  http: silent" in text
    assert "  tiers: disk is gone (misses, nothing else)" in text
    assert ", read-only" in text
    assert "  nothing is cached for it: other sizes" in text
    assert "  its chunks: 3 stored\n" in text + "\n"
