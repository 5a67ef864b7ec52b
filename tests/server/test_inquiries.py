"""What people ask of a real server: why something missed, what is there, and to delete it."""

import struct

import pytest
from tests.server.running import WAIT_S, RunningServer, eventually, key, keys, namespace

from kvcellar.errors import MalformedError, MismatchError
from kvcellar.protocol.limits import PAGE_MAX
from kvcellar.protocol.messages import Bind, Delete, Explain, Heartbeat, LookupNote, Objects

UNITS = struct.pack("<3I", 1, 2, 3)


def note(engine, request, *, found, missing=b"", **more):
    engine.call(
        lambda id_: LookupNote(
            id_, request, "answered", tokens=50, keys=3, found=found, missing=missing,
            unit_tokens=16, sketch=UNITS, **more,
        )
    )  # fmt: skip


def explain(server, *words):
    with server.tool() as tool:
        return tool.call(lambda id_: Explain(id_, *words), timeout_s=WAIT_S).misses


def test_an_eviction_is_the_reason_that_is_given(server):
    with server.engine("missing") as engine:
        engine.store(1, 2, 3)
        engine.call(lambda id_: LookupNote(id_, "cmpl-a", "answered", 50, 3, 3, b"", sketch=UNITS))
        with server.tool() as tool:
            deleted = tool.call(lambda id_: Delete(id_, keys(2, 9)), timeout_s=WAIT_S)
        assert list(deleted.states) == [1, 0]
        note(engine, "cmpl-b", found=1, missing=key(2))
        assert explain(server)[0]["request"] == "cmpl-b"
        (miss,) = explain(server, "cmpl-b")
        assert (miss["reason"], miss["instance"], miss["hit_tokens"]) == ("deleted", "missing", 16)
        # By name, a hit is an answer too.
        (hit,) = explain(server, "cmpl-a")
        assert hit["reason"] == "hit"


def test_prompts_are_counted_in_tokens_once_a_request(server):
    before = server.status_metrics()
    with server.engine("counting") as engine:
        for found in (1, 2):
            note(engine, "cmpl-c", found=found, missing=key(7))
        after = server.status_metrics()
    rise = {name: after[name] - before[name] for name in after if "tokens_total" in name}
    assert rise == {"kvcellar_lookup_tokens_total": 50, "kvcellar_lookup_hit_tokens_total": 32}


@pytest.mark.parametrize(
    "wrong",
    [
        {"missing": b"short"},
        {"salt": bytes(9)},
        {"unit_tokens": 0},
        {"sketch": bytes(5)},
        {"sketch": bytes(40_000)},
        {"found": 4},
        {"request": "x" * 5_000},
    ],
    ids=range(7),
)
def test_a_note_that_makes_no_sense_is_malformed(server, wrong):
    fields = {"request": "r", "outcome": "answered", "tokens": 50, "keys": 3, "found": 0} | wrong
    with server.engine("odd") as engine, pytest.raises(MalformedError):
        engine.call(lambda id_: LookupNote(id_, **fields))


def test_an_engine_may_not_ask_what_tools_ask(server):
    with server.engine("curious") as engine, pytest.raises(MismatchError, match="only tool"):
        engine.call(Explain)


def test_pages_list_every_chunk_and_its_model(server):
    with server.engine("listed", world_size=2) as engine:
        engine.store(*range(1, 6))
        found, at = [], 0
        with server.tool() as tool:
            while True:
                asked_at = at
                page = tool.call(lambda id_: Objects(id_, asked_at, 2), timeout_s=WAIT_S)  # noqa: B023
                found += page.objects
                at = page.next_at
                if not at:
                    break
            with pytest.raises(MalformedError):
                tool.call(lambda id_: Objects(id_, 0, PAGE_MAX + 1), timeout_s=WAIT_S)
    assert [each["key"] for each in found] == [key(number) for number in range(1, 6)]
    assert found[0]["shard_bytes"] == [4096, 4096]


def test_a_refused_namespace_is_in_the_status_until_one_is_bound(server):
    with server.engine("refused") as engine:
        with pytest.raises(MismatchError):
            engine.call(lambda id_: Bind(id_, namespace(1), 16, (8192,)))
        (shown,) = [i for i in server.status()["kvcellar"]["instances"] if i["name"] == "refused"]
        assert "shards of" in shown["refusal"]
        engine.call(lambda id_: Bind(id_, namespace(1), 16, (4096,)))
        (shown,) = [i for i in server.status()["kvcellar"]["instances"] if i["name"] == "refused"]
        assert shown["refusal"] == ""


def test_what_an_engine_counts_is_shown_and_summed_also_after_it_restarted(server):
    before = server.status_metrics()["kvcellar_engine_chunks_total"]["stored"]
    for counts in ({"stored": 5, "odd": 1}, {"stored": 7}):
        with server.engine("counted") as engine:
            engine.call(lambda id_, counts=counts: Heartbeat(id_, (), (), 0, counts))
            (shown,) = [
                i for i in server.status()["kvcellar"]["instances"] if i["name"] == "counted"
            ]
            assert shown["counts"] == counts
    after = server.status_metrics()["kvcellar_engine_chunks_total"]
    assert after["stored"] - before == 12
    assert "odd" not in after


def test_misses_are_logged_when_asked_for_and_chunks_leave_at_the_watermark():
    flags = ("--log-misses", "--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.25")
    with RunningServer(*flags) as server, server.engine("logged") as engine:
        note(engine, "cmpl-d", found=0, missing=key(1))
        line = server.wait_for_line("lookup missed")
        assert "request=cmpl-d" in line
        assert "reason=new" in line
        note(engine, "cmpl-e", found=3)
        size = 64 << 20
        for first in range(1, 9001, 1000):
            engine.store(*range(first, first + 1000))
        eventually(lambda: server.status_metrics()["kvcellar_l1_used_bytes"] <= size // 4)
        evicted = server.status_metrics()["kvcellar_evicted_chunks_total"]
        assert evicted >= 9000 - size // 4 // 4096
        assert "cmpl-e" not in server.log()
