"""Flags are read as written: no abbreviation, no guess, and every mistake names its fix."""

import pytest

from kvcellar.config.flags import ForeignFlag, Takes, Verdict, read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError

OWN = (
    Setting("port", "--port", "PORT", "The port.", "", False, "5555"),
    Setting("size", "--l1-size-gb", "GB", "The size.", "", True, ""),
    Setting("json", "--json", "", "A switch.", "", False, ""),
)
FOREIGN = (
    ForeignFlag("--max-workers", Verdict.NOTED, "there is one loop"),
    ForeignFlag("--engine-type", Verdict.REFUSED, "no blending", fine=("default",)),
    ForeignFlag("--enable", Verdict.REFUSED, "no experiments", takes=Takes.MANY),
    ForeignFlag("--quiet", Verdict.NOTED, "it is quiet", takes=Takes.NONE),
)


def read(*words):
    return read_flags(words, OWN, program="test", foreign=FOREIGN)


def test_values_stay_text_and_keep_their_order():
    flags = read("--port", "1", "--l1-size-gb=2", "--port", "3", "--json")
    assert dict(flags.given) == {"port": ("1", "3"), "size": ("2",), "json": ("True",)}
    assert flags.notes == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prot", "1"], "--prot is not a flag of this command: did you mean --port?"),
        (["--por", "1"], "--por is not a flag of this command: did you mean --port?"),
        (["--max-worker=1"], "did you mean --max-workers?"),
        (["--xyz", "1"], "--xyz is not a flag of this command (see --help)"),
        (["5555"], "'5555' is no flag"),
        (["--port"], "--port: expected one argument"),
        (["--json=1"], "--json: ignored explicit argument '1'"),
        (["--engine-type", "blend"], "--engine-type blend: no blending"),
        (["--enable", "a", "b"], "--enable a b: no experiments"),
    ],
)
def test_a_mistake_is_named_with_its_fix(words, message):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert message in str(caught.value)


def test_a_foreign_flag_without_meaning_is_noted_in_one_line():
    flags = read("--max-workers", "4", "--quiet")
    assert flags.notes == (
        "--max-workers 4 is accepted and changes nothing: there is one loop",
        "--quiet is accepted and changes nothing: it is quiet",
    )


def test_a_foreign_flag_that_says_what_happens_anyway_needs_no_note():
    assert read("--engine-type", "default").notes == ()


def test_the_help_shows_our_flags_and_not_the_foreign_ones(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--l1-size-gb" in shown
    assert "Required." in shown
    assert "--max-workers" not in shown
