"""`kvcellar why-miss`, typed as a user would, against a real server."""

import json
import struct
import subprocess
import sys

import pytest
from tests.server.disk import DiskServer
from tests.server.running import MODEL, WAIT_S, RunningServer, key, numbers_of

from kvcellar.cli.main import main
from kvcellar.keys.chain import ChunkChain
from kvcellar.keys.digest import RequestSeed
from kvcellar.protocol.messages import Delete, LookupNote


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


class TestPrompt:
    """Prompts that nobody has sent, told as tokens."""

    TOKENS = tuple(range(100, 170))

    @pytest.fixture
    def tokens(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text(json.dumps({"count": 70, "tokens": self.TOKENS}))
        return "--tokens-file", str(path), "--model", MODEL

    @pytest.fixture
    def asked(self, why, tokens):
        def run(server, *words):
            words = ("--port", str(server.port), *tokens, "--json", *words)
            (miss,) = json.loads(why(*words).out)
            return miss["reason"], miss["hit_tokens"], miss

        return run

    def test_it_says_how_far_memory_and_the_tiers_reach(self, asked, tmp_path):
        numbers = numbers_of(self.TOKENS)
        with DiskServer(tmp_path / "disk") as server, server.engine() as engine:
            assert asked(server)[:2] == ("new", 0)
            engine.put(*numbers[:3])
            server.wait_written(3)
        with DiskServer(tmp_path / "disk") as server, server.engine() as engine:
            assert engine.look(numbers[0]) == (0, 1)
            reason, found, miss = asked(server)
            assert (reason, found, miss["tokens"], miss["asked_tokens"]) == ("new", 48, 70, 64)
            evidence = miss["evidence"]
            assert (evidence["memory_tokens"], evidence["tier_tokens"]) == (16, 32)
            engine.put(numbers[3])
            # Behind what is on the disk only, memory is of use once the disk has it, too.
            server.wait_written(4)
            reason, found, miss = asked(server)
            assert (reason, found) == ("hit", 64)
            assert server.status()["kvcellar"]["leases"] == 0

    def test_it_says_why_a_chunk_is_gone_and_what_differs(self, asked, server):
        numbers = numbers_of(self.TOKENS)
        with server.engine("prompted") as engine:
            engine.store(*numbers)
            assert asked(server)[:2] == ("hit", 64)
            chain = ChunkChain(RequestSeed(bytes(32)), chunk_tokens=16)
            chain.extend(self.TOKENS, token_count=70)
            engine.call(
                lambda id_: LookupNote(
                    id_, "cmpl-sent", "answered", 70, 4, 4, sketch=chain.sketch(size_max_bytes=999)
                )
            )
            reason, found, miss = asked(server, "--salt", "alice")
            assert (reason, found) == ("salt", 0)
            assert miss["evidence"]["like"] == "cmpl-sent"
            with server.tool() as tool:
                tool.call(lambda id_: Delete(id_, key(numbers[1])), timeout_s=WAIT_S)
            assert asked(server)[:2] == ("deleted", 16)

    def test_it_is_shown_for_people_without_a_token_or_a_salt(self, why, tokens, server):
        shown = why("--port", str(server.port), *tokens, "--salt", "a-secret").out
        assert shown.startswith("this prompt, now, ")
        assert "model a/model" in shown
        assert "a-secret" not in shown
        assert "165" not in shown

    def test_a_prompt_without_a_full_chunk_is_short(self, why, tmp_path, server):
        path = tmp_path / "tokens"
        path.write_text("[1, 2, 3]")
        words = ("--port", str(server.port), "--tokens-file", str(path), "--model", MODEL)
        assert "0 of 3 tokens found: short" in why(*words).out

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--model", MODEL), "--prompt-file FILE or --tokens-file FILE"),
            (("--tokens-file", "FILE"), "--model is missing"),
            (("--tokens-file", "FILE", "--prompt-file", "FILE", "--model", MODEL), "or --tokens"),
            (("cmpl-1", "--tokens-file", "FILE", "--model", MODEL), "not both"),
            (("--tokens-file", "FILE", "--model", MODEL, "--last", "2"), "not both"),
            (("--tokens-file", "/missing", "--model", MODEL), "/missing: cannot be read"),
            (("--prompt-file", "/missing", "--model", MODEL), "/missing: cannot be read"),
            (("--prompt-file", "FILE", "--model", "no/model"), "nothing is downloaded"),
            (("--prompt-file", "FILE", "--model", "no, model"), "nothing is downloaded"),
            (("--prompt-file", "FILE", "--model", MODEL, "--tokenizer", "/tmp"), "that folder has"),
            (("--prompt-file", "FILE", "--model", MODEL, "--tokenizer", "FILE"), "--tokens-file"),
        ],
        ids=range(11),
    )
    def test_what_is_wrong_is_named(self, why, tmp_path, words, named):
        path = tmp_path / "prompt"
        path.write_text("[1, 2]")
        words = [str(path) if word == "FILE" else word for word in words]
        assert named in why(*words, code=2).err

    @pytest.mark.parametrize("content", ["", "{}", "[1.5]", "[true]", "[-1]", "[4294967296]", "7"])
    def test_a_file_without_tokens_is_refused(self, why, tmp_path, content):
        path = tmp_path / "tokens"
        path.write_text(content)
        assert "--tokens-file" in why("--tokens-file", str(path), "--model", MODEL, code=2).err

    def test_a_model_that_nobody_serves_is_told_beside_those_that_are(self, why, tokens, server):
        words = ("--port", str(server.port), *tokens[:2], "--model", "b/model")
        shown = why(*words, code=2).err
        assert "--model b/model: not served since the server's start" in shown
        assert MODEL in shown

    def test_a_text_that_is_none_is_refused(self, why, tmp_path):
        path = tmp_path / "prompt"
        path.write_bytes(b"\xff\xfe")
        shown = why("--prompt-file", str(path), "--model", MODEL, code=2).err
        assert "is not UTF-8" in shown


class TestText:
    """Prompts as text, and the tokenizer that makes tokens of it."""

    WORDS = tuple(f"w{number}" for number in range(40))

    @pytest.fixture
    def folder(self, tmp_path):
        """A model's folder; its tokenizer puts a token in front, and was saved with a limit."""
        tokenizers = pytest.importorskip("tokenizers")
        words = {word: number for number, word in enumerate(["<s>", *self.WORDS])}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        made.enable_truncation(8)
        made.enable_padding(length=100)
        folder = tmp_path / "model"
        folder.mkdir()
        made.save(str(folder / "tokenizer.json"))
        return folder

    @pytest.fixture
    def prompt(self, tmp_path):
        path = tmp_path / "prompt"
        path.write_text(" ".join(self.WORDS))
        return "--prompt-file", str(path), "--model", MODEL

    def test_a_text_has_the_tokens_of_the_models_tokenizer_and_needs_no_torch(
        self, server, folder, prompt
    ):
        with server.engine("textual") as engine:
            engine.store(*numbers_of([*range(41)]))
            words = ["why-miss", "--port", str(server.port), *prompt, "--tokenizer", str(folder)]
            code = (
                "import socket, sys\n"
                "from kvcellar.cli.main import main\n"
                f"code = main({words!r})\n"
                "heavy = [n for n in ('torch', 'transformers', 'vllm') if n in sys.modules]\n"
                "sys.exit(code or heavy or None)\n"
            )
            ended = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=False
            )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "32 of 41 tokens found: hit" in ended.stdout

    def test_a_model_in_the_users_cache_is_found_by_its_name(
        self, why, server, folder, prompt, tmp_path, monkeypatch
    ):
        constants = pytest.importorskip("huggingface_hub.constants")
        cache = tmp_path / "hub"
        place = cache / "models--a--model"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("c0ffee")
        (place / "snapshots").mkdir()
        folder.rename(place / "snapshots" / "c0ffee")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        assert "of 41 tokens found" in why("--port", str(server.port), *prompt).out

    @pytest.mark.parametrize("missing", ["tokenizers", "huggingface_hub"])
    def test_a_package_that_is_not_there_is_said(self, why, prompt, monkeypatch, missing):
        monkeypatch.setitem(sys.modules, missing, None)
        shown = why(*prompt, code=2).err
        assert ("pip install tokenizers" if missing == "tokenizers" else "cache has no") in shown
