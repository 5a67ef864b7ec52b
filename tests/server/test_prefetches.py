"""Prefetches over HTTP: from a real folder into a real server's memory, and all that is refused."""

import os
import signal

import httpx
import jsonschema
import pytest
from tests.server.disk import WAIT_S, DiskServer
from tests.server.running import (
    CHUNK_TOKENS,
    MODEL,
    RunningServer,
    eventually,
    key,
    namespace,
    numbers_of,
)

from kvcellar.clock import FakeClock
from kvcellar.errors import LimitError, MalformedError, TierBusyError, TierUnavailableError
from kvcellar.protocol.messages import AskPrefetch, Prefetch
from kvcellar.server.http.openapi import OPERATIONS
from kvcellar.server.prefetches import KEPT_S, RUNNING_MAX, Prefetches
from kvcellar.server.recent import NamespaceFacts, Recent

PROMPT = [7, 0xFFFF_FFFF, *range(62)]
SCHEMAS = {(each.method, each.path): each.answer for each in OPERATIONS}


def stored(folder, *numbers):
    """Leave chunks in a folder."""
    with DiskServer(folder) as server, server.engine() as engine:
        engine.put(*numbers)
        server.wait_written(len(numbers))


def begin(server, **body):
    body = {"model_name": MODEL, "world_size": 1} | body
    return httpx.post(f"{server.http}/cache/prefetches", json=body, timeout=WAIT_S)


def tell(server, request_id):
    return httpx.get(f"{server.http}/cache/prefetches/{request_id}", timeout=WAIT_S)


def finished(server, answer):
    request_id = answer.json()["request_id"]
    page = eventually(
        lambda: (got := tell(server, request_id).json())["status"] == "completed" and got
    )
    jsonschema.validate(page, SCHEMAS["get", "/cache/prefetches/{request_id}"])
    return page["found_keys"], page["total_keys"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with DiskServer(tmp_path_factory.mktemp("disk")) as server, server.engine():
        yield server
        assert "Traceback" not in server.log()


class TestOnDisk:
    def test_a_prompt_is_in_memory_before_it_is_looked_up(self, tmp_path):
        numbers = numbers_of(PROMPT)
        stored(tmp_path, *numbers[:3])
        with DiskServer(tmp_path) as server, server.engine() as engine:
            answer = begin(server, token_ids=PROMPT)
            assert answer.status_code == 202, answer.text
            jsonschema.validate(answer.json(), SCHEMAS["post", "/cache/prefetches"])
            assert (answer.json()["chunks"], answer.json()["status"]) == (4, "pending")
            assert finished(server, answer) == (3, 4)
            assert engine.look(*numbers[:3]) == (3, 3)
            assert server.status()["kvcellar"]["leases"] == 0
            # Another tenant's prompt of the same tokens is another prompt.
            other = begin(server, token_ids=PROMPT, cache_salt="alice")
            assert finished(server, other) == (0, 4)

    def test_a_salt_finds_what_it_stored(self, tmp_path):
        stored(tmp_path, *numbers_of(PROMPT, "alice"))
        with DiskServer(tmp_path) as server, server.engine():
            answer = begin(server, token_ids=PROMPT, cache_salt="alice")
            assert finished(server, answer) == (4, 4)

    def test_keys_do_as_well_as_tokens_and_what_is_there_is_nothing_to_do(self, tmp_path):
        stored(tmp_path, 1, 2)
        with DiskServer(tmp_path) as server, server.engine() as engine:
            names = [key(number).hex() for number in (1, 2)]
            assert finished(server, begin(server, keys=names)) == (2, 2)
            assert engine.look(1, 2) == (2, 2)
            again = begin(server, keys=names)
            assert (again.status_code, again.json()["status"]) == (202, "noop")
            assert finished(server, again) == (2, 2)
            short = begin(server, token_ids=PROMPT[: CHUNK_TOKENS - 1])
            assert short.json() == {"request_id": "", "chunks": 0, "status": "noop"}

    def test_a_tier_process_that_dies_ends_it_with_what_there_is(self, tmp_path):
        stored(tmp_path, *range(1, 9))
        with DiskServer(tmp_path) as server, server.engine():
            os.kill(server.tier_pid(), signal.SIGSTOP)
            answer = begin(server, keys=[key(number).hex() for number in range(1, 9)])
            assert tell(server, answer.json()["request_id"]).json()["status"] == "pending"
            os.kill(server.tier_pid(), signal.SIGKILL)
            assert finished(server, answer) == (0, 8)
            assert server.status()["kvcellar"]["reservations"] == 0

    @pytest.mark.parametrize(
        ("body", "status", "named"),
        [
            ({"token_ids": [1] * 16, "model_name": "nobody's"}, 404, "model_name: no engine"),
            ({"token_ids": [1] * 16, "model_name": ""}, 404, "model_name"),
            ({"token_ids": [1] * 16, "world_size": 2}, 404, "world_size: engines"),
            ({"token_ids": [1] * 16, "world_size": 0}, 400, "world_size"),
            ({"token_ids": [-1]}, 400, "token_ids"),
            ({"token_ids": [1 << 32]}, 400, "token_ids"),
            ({"token_ids": [1] * 1_000_001}, 400, "token_ids"),
            ({"token_ids": [1], "keys": []}, 400, "token_ids"),
            ({}, 400, "token_ids"),
            ({"keys": ["xyz"]}, 400, "'xyz' is no key"),
            ({"token_ids": [1], "source_tier": "l1"}, 400, "source_tier"),
            ({"token_ids": [1], "target_tier": "l2"}, 400, "target_tier"),
            ({"token_ids": [1], "salt": "x"}, 400, "salt"),
        ],
        ids=range(13),
    )
    def test_what_is_wrong_is_named(self, disk, body, status, named):
        answer = begin(disk, **body)
        assert (answer.status_code, answer.json()["detail"].count(named)) == (status, 1), (
            answer.text
        )

    @pytest.mark.parametrize("name", ["", "xyz", "00" * 16, "00" * 15, "00" * 1000])
    def test_a_name_that_names_nothing_is_not_found(self, disk, name):
        assert tell(disk, name or "%20").status_code == 404


def test_a_server_without_a_tier_says_what_it_needs(server):
    with server.engine("untiered"):
        answer = begin(server, token_ids=PROMPT)
    assert answer.status_code == 400
    assert "--disk-path" in answer.json()["detail"]


def test_nobody_elsewhere_and_nobody_without_the_token_may_prefetch(server, tmp_path):
    body = {"model_name": MODEL, "world_size": 1, "token_ids": PROMPT}
    url = f"{server.http}/cache/prefetches"
    headers = {"Origin": "http://evil.example"}
    assert httpx.post(url, json=body, headers=headers, timeout=WAIT_S).status_code == 403
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with RunningServer("--admin-token-file", str(token)) as guarded, guarded.engine():
        assert begin(guarded, token_ids=PROMPT).status_code == 401
        url = f"{guarded.http}/cache/prefetches"
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
        assert "--disk-path" in answer.json()["detail"]


class Store:
    """An arena that holds nothing."""

    def bind(self, *_):
        pass

    def namespace(self, _):
        return None


class Tiers:
    """Tiers that end what they are asked for when the test says."""

    def __init__(self):
        self.ends = []
        self.is_busy = False

    def begin_prefetch(self, _prefix, on_end):
        self.ends += [] if self.is_busy else [on_end]
        return not self.is_busy

    def check(self):
        return "it is away"


class Node:
    def __init__(self):
        self.clock = FakeClock()
        self.recent = Recent()
        self.recent.note_namespace(namespace(), NamespaceFacts("i", MODEL, 1, 16, (64,), (0,), {}))
        self.store = Store()
        self.tiers = Tiers()


class TestBounds:
    @pytest.fixture
    def node(self):
        return Node()

    @pytest.fixture
    def answer(self, node):
        table = Prefetches(node).table()
        return lambda request: table[type(request)][1](None, request)

    def test_so_many_run_at_once_and_one_more_is_told_to_wait(self, node, answer):
        for _ in range(RUNNING_MAX):
            answer(Prefetch(1, namespace(), key(1)))
        with pytest.raises(TierBusyError, match=f"{RUNNING_MAX} prefetches"):
            answer(Prefetch(1, namespace(), key(1)))
        node.tiers.ends[0]()
        assert not answer(Prefetch(1, namespace(), key(1))).is_over

    def test_the_keys_of_all_are_bounded_and_given_back(self, node, answer):
        large = key(1) * 65_536
        for _ in range(8):
            answer(Prefetch(1, namespace(), large))
        with pytest.raises(TierBusyError):
            answer(Prefetch(1, namespace(), key(1)))
        node.tiers.ends[0]()
        node.tiers.is_busy = True
        for _ in range(3):
            with pytest.raises(TierUnavailableError, match="it is away"):
                answer(Prefetch(1, namespace(), large))

    def test_what_became_of_one_is_known_for_some_minutes(self, node, answer):
        first = answer(Prefetch(1, namespace(), key(1)))
        node.tiers.ends[0]()
        node.clock.advance(KEPT_S - 1)
        assert answer(AskPrefetch(2, first.prefetch)).is_over
        node.clock.advance(2)
        assert answer(AskPrefetch(2, first.prefetch)).prefetch == b""

    def test_wrong_keys_are_no_prefetch(self, answer):
        for keys in (b"", b"short"):
            with pytest.raises(MalformedError):
                answer(Prefetch(1, namespace(), keys))
        with pytest.raises(LimitError):
            answer(Prefetch(1, namespace(), key(1) * 65_537))
