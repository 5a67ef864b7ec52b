"""What the command line of the benchmark accepts."""

from pathlib import Path

import pytest

from kvcellar.bench.options import PARTS, parse


def test_everything_is_measured_by_default():
    options = parse([])
    assert options.parts == PARTS
    assert not options.is_quick
    assert options.json_path is None


def test_only_takes_some_parts_in_their_own_order():
    assert parse(["--only", "server, copies"]).parts == ("copies", "server")


def test_quick_measures_less_of_everything():
    full, quick = parse([]).effort, parse(["--quick"]).effort
    assert quick.copy_rounds < full.copy_rounds
    assert quick.lookup_s < full.lookup_s
    assert quick.stored_keys < full.stored_keys
    assert sum(quick.prompt_tokens) < sum(full.prompt_tokens)
    assert quick.starts < full.starts


def test_the_figures_can_be_written_to_a_file():
    assert parse(["--json", "out.json"]).json_path == Path("out.json")


@pytest.mark.parametrize("words", [["--only", "copy"], ["--only", ""], ["--fast"], ["extra"]])
def test_a_mistake_is_refused_with_what_there_is(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert "usage: bench" in capsys.readouterr().err


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(["--only", "copies,lookups"])
    assert "'lookups': choose from copies, lookup, ttft, server" in capsys.readouterr().err
