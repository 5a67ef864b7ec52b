"""Why a request did not hit: the reason in words, and what it was concluded from.

`explain` looks at one remembered lookup, at the other ones, at what each namespace is made of and
at why chunks left the store. It goes from the certain to the likely: what the client said of
itself; what the store knows of the missing chunk; a lookup of the same tokens under another
engine, adapter, salt or image; the nearest prompt and where it differs; nothing like it was ever
seen. Asked by `kvcellar why-miss` and for the log.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcellar.server.recent import LookupRecord, Recent
from kvcellar.store.departures import Departures, Reason

__all__ = ["Explainer", "Miss"]

_ANSWERED = "answered"
_SAME_TIME_S = 5.0
_DIFFERENCES = 4
"""What two lookups of the same tokens can differ in: engine, adapter, salt, image."""

_FOLLOWS = ("layout.", "shard_count")
"""What differs because something else does is named after it."""

_OUTCOMES = {
    "late": "the server's answer did not come within the lookup's time; it was computed",
    "part": "another server of the engine, which keeps other ranks' shards of the same chunks, has "
    "less of them than this one: ask that one why",
    "gate": "loading what was found would have taken longer than computing it",
    "short": "the prompt has no full chunk",
    "unnamed": "its KV has no safe name (an adapter whose files cannot be read, or an input that "
    "may still change)",
}
_LEFT = {
    Reason.EVICTED: "was evicted to make room",
    Reason.DAMAGED: "was removed because its seal did not match",
    Reason.DELETED: "was deleted by key",
    Reason.FULL: "was not stored because no memory was to be had",
    Reason.DROPPED: "was never complete: its writer failed, died or was cancelled",
}


class Miss(msgspec.Struct, frozen=True):
    """One request and why it did not hit, or that it did.

    Attributes:
        request: the engine's id of it.
        instance: who asked.
        model: its model.
        age_s: seconds since.
        tokens: of the prompt.
        hit_tokens: those that were found.
        asked_tokens: those in full chunks, which could have been found.
        reason: a word for programs.
        text: a sentence for people.
        evidence: what it was concluded from.
    """

    request: str
    instance: str
    model: str
    age_s: float
    tokens: int
    hit_tokens: int
    asked_tokens: int
    reason: str
    text: str
    evidence: Mapping[str, object]


class _Finding(msgspec.Struct, frozen=True):
    reason: str
    text: str
    evidence: dict[str, object]


class Explainer:
    """Concludes from what the server remembers."""

    def __init__(self, recent: Recent, departures: Departures) -> None:
        self._recent = recent
        self._departures = departures

    def explain(self, record: LookupRecord, *, now_s: float) -> Miss:
        """Return why `record` did not hit (reason `hit` where it did)."""
        facts = self._recent.namespace(record.namespace)
        chunk_tokens = facts.chunk_tokens if facts is not None else 0
        finding = self._find(record, chunk_tokens, now_s)
        evidence = dict(finding.evidence)
        if record.broken and finding.reason != "hit":
            evidence["broken_then"] = list(record.broken)
        return Miss(
            request=record.request,
            instance=record.instance,
            model=facts.model if facts is not None else "",
            age_s=round(now_s - record.when_s, 3),
            tokens=record.tokens,
            hit_tokens=record.found * chunk_tokens,
            asked_tokens=record.keys * chunk_tokens,
            reason=finding.reason,
            text=finding.text,
            evidence=evidence,
        )

    def _find(self, record: LookupRecord, chunk_tokens: int, now_s: float) -> _Finding:
        if record.outcome != _ANSWERED:
            text = _OUTCOMES.get(record.outcome, record.outcome)
            return _Finding(record.outcome, text, {"tokens_a_chunk": chunk_tokens})
        if record.found >= record.keys:
            rest = record.tokens - record.keys * chunk_tokens
            return _Finding("hit", f"every full chunk was found; {rest} tokens are left over", {})
        first = record.found * chunk_tokens
        span = {"chunk": record.found, "first_token": first, "key": record.missing.hex()[:16]}
        found = self._left(record, span, now_s) or self._compare(record, chunk_tokens, span, now_s)
        return _Finding(found.reason, found.text, span | found.evidence)

    def _left(
        self, record: LookupRecord, span: Mapping[str, object], now_s: float
    ) -> _Finding | None:
        """Return what the store itself knows of the missing chunk."""
        named = f"chunk {span['chunk']} (from token {span['first_token']} on)"
        left = self._departures.find(record.missing)
        if left is not None and left.reason in _LEFT and left.when_s <= record.when_s:
            age_s = round(now_s - left.when_s, 1)
            text = f"{named} {_LEFT[left.reason]} {age_s:g} s ago"
            return _Finding(left.reason, text, {"left_s_ago": age_s})
        if record.is_written:
            text = f"{named} was being stored at that moment, and was not complete yet"
            return _Finding("writing", text, {})
        return None

    def _compare(
        self, record: LookupRecord, chunk_tokens: int, span: Mapping[str, object], now_s: float
    ) -> _Finding:
        """Conclude from the lookup that is most like this one."""
        # A very long prompt's sketch is cut: what is behind its end is taken as equal.
        end_units = min(
            (record.found + 1) * chunk_tokens // record.unit_tokens, len(record.sketch) // 4
        )
        nearest, units = self._nearest(record, end_units) if end_units else (None, 0)
        if nearest is None:
            broken = f" ({'; '.join(record.broken)})" if record.broken else ""
            if broken:
                return _Finding("tier", f"a part of the server was broken then{broken}", {})
            text = f"none of the last {len(self._recent)} prompts begins like this one"
            return _Finding("new", text, {"compared": len(self._recent)})
        other: dict[str, object] = {
            "like": nearest.request,
            "like_instance": nearest.instance,
            "like_s_ago": round(now_s - nearest.when_s, 1),
        }
        if units < end_units:
            return _other_tokens(record, units, other)
        found = self._other_name(record, nearest, span)
        if found is not None:
            return _Finding(found.reason, found.text, other | found.evidence)
        return self._not_there(record, nearest, other)

    def _nearest(self, record: LookupRecord, end_units: int) -> tuple[LookupRecord | None, int]:
        """Return the lookup before it with the most leading tokens in common, and how many units.

        Of several, the one that differs from it in the least, and of those the last.
        """
        wanted = record.sketch[: 4 * end_units]
        best: LookupRecord | None = None
        best_units, fewest = 0, _DIFFERENCES
        for other in self._recent.newest_first():
            # Nearly all records fall here: only one that shares as much as the best is looked at.
            if not other.sketch.startswith(wanted[: 4 * max(best_units, 1)]):
                continue
            if other.when_s > record.when_s or _is_same(record, other):
                continue
            if other.unit_tokens != record.unit_tokens:
                continue
            is_nearer = other.sketch.startswith(wanted[: 4 * best_units + 4])
            units = _common_units(wanted, other.sketch) if is_nearer else best_units
            count = len(_differences(record, other))
            if units > best_units or count < fewest:
                best, best_units, fewest = other, units, count
            if units == end_units and not count:
                break
        return best, best_units

    def _other_name(
        self, record: LookupRecord, other: LookupRecord, span: Mapping[str, object]
    ) -> _Finding | None:
        """Return what makes two lookups of the same tokens ask for other keys."""
        for what in _differences(record, other):
            if what == "engine":
                return self._other_engine(record, other)
            if what == "image" and record.item_start < 0 and other.item_start < 0:
                continue
            here, there = _named(record, what), _named(other, what)
            text = f"the same tokens were looked up under another {what}: {here} here, {there} then"
            return _Finding(what, text, {"here": here, "there": there})
        return None

    def _other_engine(self, record: LookupRecord, other: LookupRecord) -> _Finding:
        ours = self._recent.namespace(record.namespace)
        theirs = self._recent.namespace(other.namespace)
        mine: Mapping[str, str] = ours.fields if ours is not None else {}
        yours: Mapping[str, str] = theirs.fields if theirs is not None else {}
        differing = (
            name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name)
        )
        names = sorted(differing, key=lambda name: (name.startswith(_FOLLOWS), name))
        if not names:
            text = "the same tokens were looked up by an engine with another namespace"
            return _Finding("engine", text, {})
        first = names[0]
        here, there = mine.get(first, "absent"), yours.get(first, "absent")
        text = (
            f"the same tokens were looked up by instance {other.instance}, which differs in "
            f"{first}: {here} here, {there} there"
        )
        if first == "epoch":
            text = "the engine's cache was reset between the two lookups of these tokens"
        return _Finding("engine", text, {"field": first, "fields": names, "here": here,
                                         "there": there})  # fmt: skip

    def _not_there(
        self, record: LookupRecord, other: LookupRecord, evidence: dict[str, object]
    ) -> _Finding:
        cleared_s = self._departures.last_clear_s(record.namespace)
        if cleared_s is not None and other.when_s <= cleared_s <= record.when_s:
            text = "the cache was cleared after the same prompt was looked up before"
            return _Finding("cleared", text, evidence)
        if abs(record.when_s - other.when_s) < _SAME_TIME_S:
            text = (
                f"request {other.request} asked for the same tokens at the same time; its chunks "
                "were not stored yet"
            )
            return _Finding("same_time", text, evidence)
        text = (
            f"request {other.request} asked for the same tokens before, and they were not stored "
            "then or are forgotten: its store was unwanted (skip_save, max_offload_tokens, "
            "kv_role), was not complete, or left longer ago than is remembered"
        )
        return _Finding("not_stored", text, evidence)


def _other_tokens(record: LookupRecord, units: int, evidence: dict[str, object]) -> _Finding:
    first = units * record.unit_tokens
    last = first + record.unit_tokens - 1
    text = (
        f"the tokens differ: the nearest prompt (request {evidence['like']}) is equal up to token "
        f"{first} and differs between tokens {first} and {last}"
    )
    return _Finding("tokens", text, evidence | {"equal_tokens": first, "differs_before": last + 1})


def _is_same(record: LookupRecord, other: LookupRecord) -> bool:
    return (record.instance, record.request) == (other.instance, other.request)


def _differences(record: LookupRecord, other: LookupRecord) -> list[str]:
    pairs = (
        ("engine", record.namespace, other.namespace),
        ("adapter", record.adapter, other.adapter),
        ("salt", record.salt, other.salt),
        ("image", record.items, other.items),
    )
    return [name for name, here, there in pairs if here != there]


def _named(record: LookupRecord, what: str) -> str:
    digest = {"adapter": record.adapter, "salt": record.salt, "image": record.items}[what]
    return digest.hex() or "none"


def _common_units(ours: bytes, theirs: bytes) -> int:
    """Return how many leading values two sketches share; by halves, each one comparison."""
    low, high = 0, min(len(ours), len(theirs)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if ours[4 * low : 4 * middle] == theirs[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Any: it becomes a message.
def as_plain(miss: Miss) -> dict[str, Any]:
    """Return a miss as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(miss)
    return plain
