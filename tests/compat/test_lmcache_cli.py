"""The guide's commands work as written; what cannot is refused by name."""

import shlex

import pytest
from tests.server.running import RunningServer

from kvcellar.compat.lmcache_cli import main
from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.config.flags import Takes, Verdict
from kvcellar.config.load import load_server
from kvcellar.errors import ConfigError

NEEDED = ("--l1-size-gb", "100", "--eviction-policy", "LRU")
GUIDE = (
    "--port {} --http-port {} "
    "--l1-size-gb 100 --eviction-policy LRU --chunk-size 256 --instance-id {}"
)
CODE = "import sys; from kvcellar.compat.lmcache_cli import main; sys.exit(main())"


def load(*words):
    return load_server([*NEEDED, *words], program="lmcache server", foreign=LMCACHE_SERVER_FLAGS)


@pytest.fixture
def lmcache(capsys):
    """Run the command in this process, which saves the interpreter's start."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main(words) == code
        return capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("command", "port", "http_port", "name"),
    [
        (GUIDE.format(6555, 8090, "prefiller"), 6555, 8090, "prefiller"),
        (GUIDE.format(6556, 8091, "decoder"), 6556, 8091, "decoder"),
    ],
    ids=["prefiller", "decoder"],
)
def test_the_guides_commands_mean_what_they_say(command, port, http_port, name):
    loaded = load_server(
        shlex.split(command), program="lmcache server", foreign=LMCACHE_SERVER_FLAGS
    )
    assert loaded.notes == ()
    config = loaded.config
    assert (config.port, config.http_port, config.instance_id) == (port, http_port, name)
    assert (config.l1_bytes, config.chunk_tokens) == (100 << 30, 256)


@pytest.mark.parametrize("flag", LMCACHE_SERVER_FLAGS, ids=lambda flag: flag.name)
def test_a_flag_is_noted_or_refused_with_its_reason(flag):
    words = [flag.name] if flag.takes == Takes.NONE else [flag.name, "7"]
    if flag.verdict == Verdict.REFUSED:
        with pytest.raises(ConfigError) as caught:
            load(*words)
        assert str(caught.value) == f"{' '.join(words)}: {flag.reason}"
    else:
        (note,) = load(*words).notes
        assert note == f"{' '.join(words)} is accepted and changes nothing: {flag.reason}"
        assert "\n" not in note


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('--l1-manager \'{"type": "DRAM"}\'', "not yet in kvcellar 0.1: several L1s"),
        ("--enable-tracing --otlp-endpoint http://localhost:4317", "not yet in kvcellar 0.1: trac"),
        ("--p2p-advertise-url tcp://a:1", "not yet in kvcellar 0.1: sharing between nodes"),
        ("--coordinator-url http://a:1", "not yet in kvcellar 0.1: the coordinator"),
        ("--engine-type blend", "CacheBlend"),
        ("--eviction-polcy LRU", "did you mean --eviction-policy?"),
        ("--l1-size 7", "did you mean --l1-size-gb?"),
        ("--max-work 7", "did you mean --max-workers?"),
    ],
)
def test_what_a_user_would_miss_is_refused_with_a_reason(words, reason):
    with pytest.raises(ConfigError) as caught:
        load(*shlex.split(words))
    assert reason in str(caught.value)


def test_the_server_runs_under_lmcaches_name_and_tells_what_a_flag_does_not_do(lmcache):
    with RunningServer(
        *("--max-workers", "4", "--hash-algorithm", "blake3", "--no-l1-use-lazy"),
        command=("-c", CODE, "server"),
    ) as server:
        assert "--max-workers 4 is accepted and changes nothing" in server.log()
        assert "--no-l1-use-lazy is accepted" in server.log()
        assert "hash-algorithm" not in server.log()
        url = ("--url", server.http)
        assert lmcache("ping", "kvcache", *url).out == f"{server.http} is healthy\n"
        shown = lmcache("describe", "kvcache", *url, "--format", "json").out
        assert '"total_object_count": 0' in shown
        assert "cleared 0 chunks" in lmcache("kvcache", "clear", *url).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sever"], "did you mean server?"),
        (["quota"], "write lmcache quota set, get, list or delete"),
        (["server"], "--l1-size-gb is missing"),
        (["ping"], "write lmcache ping kvcache or engine"),
        (["ping", "kvcache", "--url", "ftp://x"], "write http://localhost:8080"),
        (["kvcache", "clear"], "--url is missing"),
        (["kvcache", "clear", "--ulr", "x"], "did you mean --url?"),
    ],
)
def test_a_wrong_command_is_code_2(lmcache, words, said):
    assert said in lmcache(*words, code=2).err


def test_nobody_at_the_url_is_code_1_and_named(lmcache):
    said = lmcache("ping", "kvcache", "--url", "http://127.0.0.1:9", code=1).err
    assert "http://127.0.0.1:9/healthcheck" in said


def test_help_and_version_say_whose_command_this_is(lmcache):
    assert "kvcellar" in lmcache("--help").out
    assert "kvcellar" in lmcache("--version").out
    with pytest.raises(SystemExit) as caught:
        lmcache("server", "--help")
    assert caught.value.code == 0
