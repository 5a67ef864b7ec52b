"""`kvcellar why-miss`, typed as a user would, against a real server."""

import json
import struct

import pytest
from tests.server.running import RunningServer, key

from kvcellar.cli.main import main
from kvcellar.protocol.messages import LookupNote


@pytest.fixture
def why(capsys):
    def run(*words, code=0):
        capsys.readouterr()
        assert main(("why-miss", *words)) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running, running.engine("asking") as engine:
        for name, units, salt in (
            ("cmpl-first", (1, 2, 3), b""),
            ("cmpl-other-end", (1, 2, 4), b""),
            ("cmpl-salted", (1, 2, 3), b"\x0a" * 8),
        ):
            engine.call(
                lambda id_, name=name, units=units, salt=salt: LookupNote(
                    id_, name, "answered", 50, 3, 0 if salt else 2, key(9), salt=salt,
                    sketch=struct.pack("<3I", *units),
                )
            )  # fmt: skip
        yield running


def test_the_last_misses_are_listed_with_their_reasons(why, server):
    shown = why("--port", str(server.port)).out
    lines = shown.splitlines()
    assert lines[0].startswith("cmpl-salted  ")
    assert lines[0].endswith("0 of 50 tokens found: salt")
    assert "another salt: 0a0a0a0a0a0a0a0a here, none then" in lines[1]
    assert lines[2].endswith("32 of 50 tokens found: tokens")
    assert "differs between tokens 32 and 47" in lines[3]
    assert why("--port", str(server.port), "--last", "1").out.splitlines() == lines[:2]


def test_one_request_is_shown_with_the_evidence(why, server):
    shown = why("other-end", "--port", str(server.port)).out
    assert "equal tokens: 32" in shown
    assert "like: cmpl-first" in shown
    assert "instance asking" in shown
    (miss,) = json.loads(why("other-end", "--port", str(server.port), "--json").out)
    assert miss["reason"] == "tokens"
    assert miss["evidence"]["differs_before"] == 48


def test_a_request_that_nobody_remembers_is_code_1(why, server):
    assert "'cmpl-x'" in why("cmpl-x", "--port", str(server.port), code=1).out


def test_wrong_words_are_code_2(why):
    assert "--last 0" in why("--last", "0", code=2).err
    assert "--lsat is not a flag" in why("--lsat", "1", code=2).err
