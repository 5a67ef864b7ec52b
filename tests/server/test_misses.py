"""Each reason why a prompt does not hit is told apart from the others."""

import struct

import pytest

from kvcellar.keys.digest import NamespaceId
from kvcellar.server.misses import Explainer
from kvcellar.server.recent import LookupRecord, NamespaceFacts, Recent
from kvcellar.store.departures import Departures, Reason

SPACE, OTHER = NamespaceId(b"n" * 32), NamespaceId(b"m" * 32)
CHUNK = 64
MISSING = b"k" * 32


def sketch(*values):
    return struct.pack(f"<{len(values)}I", *values)


def record(request, *, when_s=0.0, units=(1, 2, 3, 4, 5, 6, 7, 8), found=0, **more):
    """Two chunks of four units of 16 tokens, of which `found` were there."""
    fields = {
        "when_s": when_s,
        "instance": "engine",
        "namespace": SPACE,
        "request": request,
        "outcome": "answered",
        "tokens": 16 * len(units) + 5,
        "keys": len(units) // 4,
        "found": found,
        "missing": MISSING if found < len(units) // 4 else b"",
        "salt": b"",
        "adapter": b"",
        "items": b"",
        "item_start": -1,
        "unit_tokens": 16,
        "sketch": sketch(*units),
        "is_written": False,
        "broken": (),
    }
    return LookupRecord(**fields | more)


class World:
    def __init__(self):
        self.recent = Recent()
        self.departures = Departures()
        self.bound(SPACE)

    def bound(self, space, instance="engine", **fields):
        facts = NamespaceFacts(
            instance, "a-model", 1, CHUNK, (64,), (0,), {"cache.dtype": "aa", **fields}
        )
        self.recent.note_namespace(space, facts)

    def explain(self, *records, now_s=100.0):
        for each in records:
            self.recent.add(each)
        return Explainer(self.recent, self.departures).explain(records[-1], now_s=now_s)


@pytest.fixture
def world():
    return World()


def test_a_hit_is_no_miss(world):
    miss = world.explain(record("a", found=2))
    assert (miss.reason, miss.hit_tokens, miss.asked_tokens, miss.tokens) == ("hit", 128, 128, 133)
    assert "5 tokens are left over" in miss.text


@pytest.mark.parametrize("outcome", ["late", "gate", "short", "unnamed"])
def test_what_the_client_says_of_itself_comes_first(world, outcome):
    miss = world.explain(record("a"), record("b", outcome=outcome))
    assert miss.reason == outcome
    assert miss.text != outcome


def test_a_prompt_that_nobody_sent_before_is_new(world):
    miss = world.explain(record("a", units=(9, 9, 9, 9)), record("b"))
    assert miss.reason == "new"
    assert miss.evidence["first_token"] == 0


def test_the_first_token_that_differs_is_named_to_the_unit(world):
    miss = world.explain(
        record("far", units=(1, 2, 9, 9, 9, 9, 9, 9)),
        record("near", units=(1, 2, 3, 4, 5, 6, 9, 9)),
        record("b", found=1),
    )
    assert miss.reason == "tokens"
    assert miss.evidence["like"] == "near"
    assert (miss.evidence["equal_tokens"], miss.evidence["differs_before"]) == (96, 112)
    assert (miss.hit_tokens, miss.evidence["first_token"]) == (64, 64)
    assert "between tokens 96 and 111" in miss.text


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (Reason.EVICTED, "evicted"),
        (Reason.DAMAGED, "seal"),
        (Reason.DELETED, "deleted by key"),
        (Reason.FULL, "no memory"),
        (Reason.DROPPED, "never complete"),
    ],
)
def test_what_the_store_did_with_the_chunk_is_the_reason(world, reason, word):
    world.departures.now_s = 40.0
    world.departures.note(MISSING, reason)
    miss = world.explain(record("a"), record("b", when_s=90.0, found=1))
    assert miss.reason == reason
    assert word in miss.text
    assert "60 s ago" in miss.text
    assert miss.evidence["chunk"] == 1


def test_a_sketch_that_was_cut_is_compared_as_far_as_it_goes(world):
    there = record("a", salt=b"\x01" * 8)
    miss = world.explain(there, record("b", when_s=50.0, found=1, sketch=sketch(1, 2, 3, 4, 5)))
    assert miss.reason == "salt"
    assert world.explain(there, record("c", found=1, sketch=b"")).reason == "new"


def test_a_later_lookup_explains_nothing(world):
    assert world.explain(record("later", when_s=60.0), record("b", when_s=50.0)).reason == "new"


def test_an_eviction_after_the_lookup_is_not_its_reason(world):
    world.departures.now_s = 95.0
    world.departures.note(MISSING, Reason.EVICTED)
    assert world.explain(record("b", when_s=90.0)).reason == "new"


def test_a_chunk_that_was_being_stored_is_named_so(world):
    assert world.explain(record("a"), record("b", is_written=True)).reason == "writing"


@pytest.mark.parametrize("what", ["salt", "adapter"])
def test_another_salt_or_adapter_is_shown_by_its_digest(world, what):
    there = record("a", **{what: b"\x0a" * 8})
    miss = world.explain(there, record("b", when_s=50.0, **{what: b"\x0b" * 8}))
    assert miss.reason == what
    assert (miss.evidence["here"], miss.evidence["there"]) == ("0b" * 8, "0a" * 8)
    miss = world.explain(there, record("c", when_s=50.0))
    assert miss.evidence["here"] == "none"


def test_another_image_counts_and_the_record_with_the_fewest_differences_is_compared(world):
    miss = world.explain(
        record("both", items=b"\x01" * 8, item_start=0, salt=b"\x01" * 8),
        record("image", items=b"\x01" * 8, item_start=0),
        record("b", when_s=50.0, items=b"\x02" * 8, item_start=0),
    )
    assert (miss.reason, miss.evidence["like"]) == ("image", "image")


def test_another_engine_is_named_by_its_first_field(world):
    fields = {"cache.dtype": "bb", "model.dtype": "cc", "layout.0": "dd"}
    world.bound(OTHER, "other", **fields)
    there = record("a", namespace=OTHER, instance="other")
    miss = world.explain(there, record("b", when_s=50.0))
    assert miss.reason == "engine"
    assert miss.evidence["field"] == "cache.dtype"
    # A layout differs because of something else, which is named first.
    assert miss.evidence["fields"] == ["cache.dtype", "model.dtype", "layout.0"]
    assert (miss.evidence["here"], miss.evidence["there"]) == ("aa", "bb")
    assert "instance other" in miss.text


def test_a_reset_is_named_as_one(world):
    world.bound(OTHER, "engine", epoch="ee")
    miss = world.explain(record("a", namespace=OTHER), record("b", when_s=50.0))
    assert "reset" in miss.text


def test_a_clear_between_the_two_is_the_reason(world):
    world.departures.now_s = 60.0
    world.departures.note_clear(SPACE)
    assert world.explain(record("a", when_s=50.0), record("b", when_s=70.0)).reason == "cleared"


def test_two_at_once_and_two_apart_are_told_apart(world):
    assert world.explain(record("a", when_s=69.0), record("b", when_s=70.0)).reason == "same_time"
    world = World()
    assert world.explain(record("a", when_s=9.0), record("b", when_s=70.0)).reason == "not_stored"


def test_a_broken_part_is_evidence_and_the_reason_where_there_is_no_other(world):
    broken = ("tiers: disk does not answer",)
    assert world.explain(record("b", broken=broken)).reason == "tier"
    miss = world.explain(record("c", salt=b"\1" * 8, when_s=50.0, broken=broken))
    assert miss.reason == "salt"
    assert miss.evidence["broken_then"] == [*broken]


def test_the_ring_is_bounded_by_number_and_by_bytes_and_keeps_a_request_once():
    recent = Recent(records_max=3, sketches_max_bytes=100)
    for number in range(5):
        assert recent.add(record(str(number))) is None
    assert [each.request for each in recent.newest_first()] == ["4", "3", "2"]
    older = recent.add(record("3", found=1))
    assert older is not None
    assert [(each.request, each.found) for each in recent.newest_first()] == [
        ("3", 1), ("4", 0), ("2", 0),
    ]  # fmt: skip
    recent.add(record("big", units=tuple(range(20))))
    assert [each.request for each in recent.newest_first()] == ["big"]
