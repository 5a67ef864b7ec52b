"""Tables as people and as programs read them."""

import json

import pytest

from kvcellar.bench.report import Column, Table, render, to_json

TABLE = Table(
    "lookup",
    "lookups, ms",
    (Column("keys", 0), Column("p50", 3), Column("other")),
    ((1, 0.03141, None), (10_000, 12.5, "not measured")),
    ("a note",),
)
FACTS = {"machine": "two cores", "load": "0.1"}


def test_a_table_is_aligned_and_rounds_only_what_it_shows():
    assert render(FACTS, [TABLE]) == (
        "machine  two cores\n"
        "load     0.1\n"
        "\n"
        "lookups, ms\n"
        "keys       p50         other\n"
        "------  ------  ------------\n"
        "1        0.031\n"
        "10,000  12.500  not measured\n"
        "  a note\n"
    )


def test_json_has_the_numbers_as_they_were_measured():
    page = json.loads(to_json(FACTS, [TABLE]))
    assert page["facts"] == FACTS
    (table,) = page["tables"]
    assert table["columns"] == ["keys", "p50", "other"]
    assert table["rows"] == [[1, 0.03141, None], [10_000, 12.5, "not measured"]]


def test_a_part_that_was_not_measured_shows_why():
    table = Table("ttft", "ttft: not measured", (), (), ("no engine",))
    assert render({}, [table]) == "\nttft: not measured\n  no engine\n"


def test_a_row_that_does_not_fit_its_columns_is_a_mistake():
    with pytest.raises(AssertionError):
        Table("x", "x", (Column("one"),), ((1, 2),))
