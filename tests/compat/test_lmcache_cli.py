"""The guide's commands work as written; what cannot is refused by name."""

import shlex

import pytest
from tests.server.running import RunningServer

from kvcellar.compat.lmcache_cli import main
from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.config.flags import Takes, Verdict
from kvcellar.config.load import load_server
from kvcellar.config.server import settings
from kvcellar.errors import ConfigError

NEEDED = ("--l1-size-gb", "100", "--eviction-policy", "LRU")
GUIDE = (
    "--port {} --http-port {} "
    "--l1-size-gb 100 --eviction-policy LRU --chunk-size 256 --instance-id {}"
)
CODE = "import sys; from kvcellar.compat.lmcache_cli import main; sys.exit(main())"
LMCACHE_FLAGS = """
--instance-id --transport --host --port --chunk-size --null-block-id --max-workers
--max-gpu-workers --max-cpu-workers --grpc-server-workers --hash-algorithm --engine-type
--supported-transfer-mode --isolated-ipc --no-isolated-ipc --runtime-plugin-locations
--runtime-plugin-config --shm-name --script-allowed-imports --run-script-api-enabled
--no-run-script-api-enabled --separate-object-groups --no-separate-object-groups
--worker-reap-timeout-seconds --session-ttl-seconds --worker-registration-grace-seconds
--enable-segmented-prefix --enable-dedup-content --enable-blend-reorder --enable
--kv-event-log-size --server-module --p2p-advertise-url --p2p-listen-url --p2p-lookup-timeout
--p2p-load-timeout --p2p-transfer-engine --http-host --http-port --coordinator-url
--coordinator-advertise-ip --coordinator-heartbeat-interval --coordinator-event-reporting
--coordinator-event-flush-interval --coordinator-event-transport
--coordinator-kafka-bootstrap-servers --coordinator-kafka-topic
--coordinator-kafka-delivery-timeout --coordinator-blend-timeout
--coordinator-blend-match-concurrency --coordinator-l2-event-reporting
--coordinator-l2-event-flush-interval --l1-size-gb --l1-use-lazy --no-l1-use-lazy
--l1-init-size-gb --l1-align-bytes --l1-use-hugepages --no-l1-use-hugepages --l1-devdax-path
--gds-l1-path --gds-l1-use-direct-io --no-gds-l1-use-direct-io --gds-l1-backend
--l1-write-ttl-seconds --l1-read-ttl-seconds --eviction-policy --eviction-trigger-watermark
--eviction-ratio --l2-store-policy --l2-prefetch-policy --l2-prefetch-max-in-flight
--periodic-notifier-interval-ms --l2-adapter --l1-manager --disable-observability
--disable-metrics --disable-grpc-metrics --disable-logging --enable-tracing --otlp-endpoint
--event-bus-queue-size --prometheus-port --metrics-sample-rate --lookup-hash-log-dir
--lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size
--lookup-hash-log-max-files --enable-gc-monitor --gc-monitor-min-pause-ms
--gc-monitor-top-objects --enable-extra-logging --extra-logging-interval --trace-level
--trace-output
"""


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


def test_every_lmcache_flag_has_exactly_one_place():
    flags = set(LMCACHE_FLAGS.split())
    own = [setting.flag for setting in settings()]
    foreign = [flag.name for flag in LMCACHE_SERVER_FLAGS]
    assert len(foreign) == len(set(foreign))
    assert set(own) & set(foreign) == set()
    assert flags == set(foreign) | (set(own) & flags)


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
