"""The table of several layers says what was measured, and beside it what it should be."""

from kvcellar.bench.side_by_side import Burst, Case, Hit, keep, kept
from kvcellar.bench.side_by_side_report import Link, report

LINK = Link(kv_bytes_a_token=131_072, gb_per_s=50.0)
"""10,000 tokens are 1.31 GB, which take 26.2 ms."""


def case(name, *, layer_s=0.0, hit_tokens=0, cold_s=2.0, own_s=0.1, share=1.0, same=True):
    hits = [Hit(cold_s, own_s, layer_s, hit_tokens, same)] * 3
    burst = Burst(8.0, 0.5, layer_s * 10, hit_tokens * 4)
    return Case(name, kv_bytes_share=share, early_s=[0.3, 0.9], hits={10_000: hits}, burst=burst)


def row(text, head, name):
    """Return the cells of the line that begins with a head's first cell and a name."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {head}{name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_hit_stands_beside_its_own_hit_the_link_and_five_milliseconds():
    text = report([case("kvcellar", layer_s=0.15, hit_tokens=10_000)], link=LINK, facts={})
    cells = row(text, "10,000 | ", "kvcellar")
    # 0.1 s + 1.31072 GB / 50 GB/s + 5 ms = 0.1312 s, and 0.15 s is 18.8 ms above it.
    assert cells == [
        "10,000", "kvcellar", "2.000", "0.100", "**0.150**", "26.2", "0.131", "+19", "yes",
    ]  # fmt: skip


def test_int8_is_held_to_the_bytes_that_cross():
    cells = row(
        report([case("i8", layer_s=0.1, hit_tokens=10_000, share=0.5)], link=LINK, facts={}),
        "10,000 | ", "i8",
    )  # fmt: skip
    assert cells[6:8] == ["0.118", "-18"]


def test_a_burst_may_overlap_a_fifth_of_the_link():
    text = report([case("kvcellar", layer_s=0.1, hit_tokens=10_000)], link=LINK, facts={})
    (line,) = [x for x in text.splitlines() if x.startswith("| kvcellar | 8.00")]
    # 0.5 s + 0.8 * 5.24288 GB / 50 GB/s = 0.5839 s.
    assert line == "| kvcellar | 8.00 | 0.50 | **1.00** (40,000 tokens) | 0.584 | +416 |"


def test_what_the_layer_did_not_give_is_no_hit():
    text = report([case("peer", layer_s=0.15, hit_tokens=9_000)], link=LINK, facts={})
    assert row(text, "10,000 | ", "peer")[4:] == ["no hit: 9,000 tokens", "", "", "", ""]


def test_an_answer_that_differs_is_said():
    one = case("kvcellar", layer_s=0.15, hit_tokens=10_000, same=False)
    assert row(report([one], link=LINK, facts={}), "10,000 | ", "kvcellar")[-1] == "no"


def test_cold_is_compared_with_vllm_alone_whose_own_spread_is_shown():
    cases = [case("none", cold_s=2.0), case("kvcellar", cold_s=2.04), case("none-again")]
    cases[2].hits = case("none-again", cold_s=2.02).hits
    text = report(cases, link=LINK, facts={})
    assert row(text, "", "spread of vLLM alone")[1:3] == ["1.0 %", "0.0 %"]
    (line,) = [x for x in text.splitlines() if x.startswith("| kvcellar | +")]
    assert line == "| kvcellar | +1.5 % | +0.0 % | 0.900 of 2 |"


def test_where_no_link_was_measured_there_is_no_rule():
    cells = row(
        report(
            [case("kvcellar", layer_s=0.15, hit_tokens=10_000)], link=Link(131_072, None), facts={}
        ),
        "10,000 | ", "kvcellar",
    )  # fmt: skip
    assert cells[6:8] == ["", ""]


def test_a_case_that_was_not_measured_says_why():
    text = report([Case("lmcache", trouble="it cannot be imported")], link=LINK, facts={"a": "b"})
    assert "lmcache was not measured: it cannot be imported" in text
    assert text.startswith("* a: b\n")


def test_a_case_is_kept_whole_or_not_at_all(tmp_path):
    one = case("kvcellar", layer_s=0.15, hit_tokens=10_000)
    assert kept(tmp_path, "kvcellar") is None
    keep(one, tmp_path)
    assert kept(tmp_path, "kvcellar") == one
    (tmp_path / "kvcellar.json").write_bytes(b'{"name": "kvc')
    assert kept(tmp_path, "kvcellar") is None
