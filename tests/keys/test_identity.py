"""Two chunks share a key exactly when their KV is the same."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.keys.situations import FIELDS, SITUATIONS, VALUES, Situation, layout

from kvcellar.keys.chain import SpanItem, chunk_key
from kvcellar.keys.digest import engine_digest, field_digests

# What "" and None both say: the tenant without a salt.
SAME_SALT = {None, ""}


def _shared(one, other):
    return set(one.keys()) & set(other.keys())


@pytest.mark.parametrize("name", VALUES)
def test_no_two_values_of_a_setting_share_a_key_or_a_namespace(name):
    situations = [dataclasses.replace(Situation(), **{name: value}) for value in VALUES[name]]
    for one, other in itertools.combinations(situations, 2):
        if name == "cache_salt" and {one.cache_salt, other.cache_salt} == SAME_SALT:
            assert one.keys() == other.keys()
        else:
            assert _shared(one, other) == set()
        same_space = name in {"adapter", "cache_salt"}
        assert (one.namespace() == other.namespace()) == same_space


@given(one=SITUATIONS, data=st.data())
def test_chunks_share_keys_as_far_as_they_mean_the_same_and_no_further(one, data):
    """Settings are mostly kept, so that tokens, images and their places make the difference."""
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=1))
    changes = {name: data.draw(FIELDS[name]) for name in sorted({"items", "tokens", *names})}
    other = dataclasses.replace(one, **changes)
    ours, theirs = one.keys(), other.keys()
    for index, key in enumerate(ours):
        for place, stranger in enumerate(theirs):
            same = index == place and one.meaning(index) == other.meaning(place)
            assert (key == stranger) == same, (index, place)


@given(SITUATIONS)
def test_no_two_chunks_of_one_prompt_share_a_key(situation):
    """Also a prompt that says the same again: the second time it stands somewhere else."""
    assert len(set(situation.keys())) == len(situation.tokens) // situation.chunk_tokens


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12),
    place=st.integers(0, 11),
    difference=st.integers(1, 2**32 - 1),
)
def test_one_token_more_or_less_changes_its_chunk_and_all_after(tokens, place, difference):
    one = Situation(tokens=tuple(tokens))
    tokens[place] = (tokens[place] + difference) % 2**32
    other = Situation(tokens=tuple(tokens))
    chunk = place // one.chunk_tokens
    assert one.keys()[:chunk] == other.keys()[:chunk]
    assert set(one.keys()[chunk:]) & set(other.keys()) == set()


class TestImages:
    ITEM = SpanItem(start=5, length=5, identity=b"\x01" * 32, kind="image")

    def _keys(self, **changes):
        return Situation(items=(self.ITEM._replace(**changes),)).keys()

    def test_the_text_before_an_image_is_shared_with_every_other_prompt(self):
        plain = Situation().keys()
        assert self._keys()[0] == plain[0]
        assert self._keys(identity=b"\x02" * 32)[0] == plain[0]
        assert set(self._keys()[1:]) & set(plain) == set()

    @pytest.mark.parametrize(
        "changes",
        [
            {"identity": b"\x01" * 31},
            {"identity": b"\x02" * 32},
            {"kind": "video"},
            {"start": 4},
            {"start": 6},
            {"length": 4},
            {"length": 6},
        ],
        ids=str,
    )
    def test_another_image_place_or_length_shares_nothing_from_there_on(self, changes):
        assert set(self._keys(**changes)[1:]) & set(self._keys()) == set()

    def test_an_image_stands_in_the_chunks_that_it_overlaps_and_in_no_others(self):
        tokens = list(range(4))
        plain = chunk_key(b"\0" * 32, tokens, start=4)
        for start in range(12):
            item = self.ITEM._replace(start=start, length=2)
            key = chunk_key(b"\0" * 32, tokens, [item], start=4)
            assert (key == plain) == (start not in range(3, 8)), start

    def test_the_order_in_which_items_are_listed_does_not_count(self):
        other = SpanItem(start=6, length=1, identity=b"x", kind="image")
        assert (
            Situation(items=(self.ITEM, other)).keys() == Situation(items=(other, self.ITEM)).keys()
        )

    def test_two_images_are_not_one(self):
        twice = Situation(items=(self.ITEM, self.ITEM)).keys()
        assert set(twice[1:]) & set(self._keys()) == set()

    def test_the_end_of_one_name_is_not_the_start_of_the_next(self):
        one = self._keys(kind="imagea", identity=b"b")
        other = self._keys(kind="image", identity=b"ab")
        assert set(one[1:]) & set(other) == set()


def test_an_adapter_shares_nothing_and_without_one_a_prefix_is_shared():
    tokens = tuple(range(12))
    plain = Situation(tokens=tokens)
    longer = Situation(tokens=(*tokens[:8], 1, 2, 3, 4))
    sql, other_sql = (Situation(tokens=tokens, adapter=b"sql:/a:%d" % n) for n in range(2))
    assert plain.keys()[:2] == longer.keys()[:2]
    assert _shared(plain, sql) == _shared(plain, other_sql) == _shared(sql, other_sql) == set()


def test_a_rank_or_the_number_of_ranks_makes_another_namespace():
    spaces = [
        Situation(layouts=ranks).namespace()
        for ranks in [
            (layout(0),),
            (layout(1),),
            (layout(0), layout(0)),
            (layout(0), layout(1)),
            (layout(1), layout(0)),
        ]
    ]
    assert len(set(spaces)) == len(spaces)


class TestEngineDigest:
    VALUES = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 2), st.text(max_size=2), st.binary(max_size=2),
        st.sampled_from([0.0, -0.0, 1.0, float("inf")]),
    )  # fmt: skip
    NAMES = st.text(alphabet="ab", min_size=1, max_size=2)

    @given(
        one=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3),
        other=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3),
    )
    def test_fields_have_the_same_digest_exactly_when_they_are_the_same(self, one, other):
        typed = [{name: repr(value) for name, value in fields.items()} for fields in (one, other)]
        assert (engine_digest(one) == engine_digest(other)) == (typed[0] == typed[1])

    def test_values_of_different_types_differ(self):
        values = [1, 1.0, True, "1", b"1", None, "None", "True", b""]
        assert len({engine_digest({"field": value}) for value in values}) == len(values)

    def test_a_missing_field_is_not_an_empty_one(self):
        assert engine_digest({"a": 1}) != engine_digest({"a": 1, "b": None})

    def test_the_order_of_fields_does_not_count(self):
        assert engine_digest({"a": 1, "b": 2}) == engine_digest({"b": 2, "a": 1})

    def test_any_text_that_python_can_hold_has_a_digest(self):
        assert engine_digest({"a": "\ud800"}) != engine_digest({"a": "\ud801"})

    def test_a_field_that_differs_can_be_named(self):
        one = field_digests({"model": "a", "dtype": "bf16"})
        other = field_digests({"model": "a", "dtype": "fp8"})
        assert [name for name in one if one[name] != other[name]] == ["dtype"]
        assert list(one) == ["dtype", "model"]
        assert all(len(digest) == 16 for digest in one.values())
