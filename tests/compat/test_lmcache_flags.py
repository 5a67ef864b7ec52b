"""Every flag of `lmcache server` 0.5.6 with the default that LMCache writes for it.

Who writes a default out means what happens anyway, so none of them may stop the start.
"""

import pytest

from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.config.flags import Verdict
from kvcellar.config.load import load_server
from kvcellar.config.server import settings

NEEDED = ("--l1-size-gb", "1", "--eviction-policy", "LRU")
SERVER = """
--instance-id a-stable-name
--transport zmq
--host localhost
--port 5555
--chunk-size 256
--null-block-id 0
--max-workers 1
--max-gpu-workers 1
--max-cpu-workers 1
--grpc-server-workers 32
--hash-algorithm blake3
--engine-type default
--supported-transfer-mode lmcache_driven
--no-isolated-ipc
--runtime-plugin-locations
--runtime-plugin-config {}
--shm-name ''
--script-allowed-imports
--no-run-script-api-enabled
--no-separate-object-groups
--separate-object-groups
--worker-reap-timeout-seconds 120
--session-ttl-seconds 600
--worker-registration-grace-seconds 3600
--enable
--kv-event-log-size 32768
--p2p-advertise-url ''
--p2p-listen-url ''
--p2p-lookup-timeout 30
--p2p-load-timeout 30
--p2p-transfer-engine nixl
--http-host 127.0.0.1
--http-port 8080
--coordinator-url ''
--coordinator-advertise-ip ''
--coordinator-heartbeat-interval 5.0
--coordinator-event-flush-interval 1.0
--coordinator-event-transport http
--coordinator-kafka-bootstrap-servers ''
--coordinator-kafka-topic lmcache-cache-events
--coordinator-kafka-delivery-timeout 300
--coordinator-blend-timeout 1.0
--coordinator-blend-match-concurrency 8
--coordinator-l2-event-flush-interval 1.0
"""
STORAGE = """
--l1-use-lazy
--l1-init-size-gb 20
--l1-align-bytes 4096
--no-l1-use-hugepages
--gds-l1-use-direct-io
--gds-l1-backend auto
--l1-write-ttl-seconds 600
--l1-read-ttl-seconds 300
--eviction-trigger-watermark 0.8
--eviction-ratio 0.2
--l2-store-policy default
--l2-prefetch-policy default
--l2-prefetch-max-in-flight 8
--periodic-notifier-interval-ms 5
"""
OBSERVABILITY = """
--event-bus-queue-size 10000
--prometheus-port 9090
--metrics-sample-rate 0.01
--lookup-hash-log-dir ''
--lookup-hash-log-rotation-interval 21600
--lookup-hash-log-rotation-max-size 104857600
--lookup-hash-log-max-files 100
--gc-monitor-min-pause-ms 1.0
--gc-monitor-top-objects 0
--extra-logging-interval 10.0
"""
WITHOUT_DEFAULT = [
    "--l1-size-gb",
    "--eviction-policy",
    "--server-module",
    "--isolated-ipc",
    "--run-script-api-enabled",
    "--enable-segmented-prefix",
    "--enable-dedup-content",
    "--enable-blend-reorder",
    "--coordinator-event-reporting",
    "--coordinator-l2-event-reporting",
    "--no-l1-use-lazy",
    "--l1-use-hugepages",
    "--l1-devdax-path",
    "--gds-l1-path",
    "--no-gds-l1-use-direct-io",
    "--l2-adapter",
    "--l1-manager",
    "--disable-observability",
    "--disable-metrics",
    "--disable-grpc-metrics",
    "--disable-logging",
    "--enable-tracing",
    "--otlp-endpoint",
    "--enable-gc-monitor",
    "--enable-extra-logging",
    "--trace-level",
    "--trace-output",
]
"""Flags that LMCache's own defaults leave out: off, absent, or required."""


def words_of(line):
    flag, *values = line.split()
    return [flag, *("" if value == "''" else value for value in values)]


DEFAULTS = [words_of(line) for line in (SERVER + STORAGE + OBSERVABILITY).split("\n") if line]


def load(*words):
    return load_server([*NEEDED, *words], program="lmcache server", foreign=LMCACHE_SERVER_FLAGS)


def test_the_tables_hold_every_flag_of_lmcache_once():
    named = [words[0] for words in DEFAULTS] + WITHOUT_DEFAULT
    assert len(named) == len(set(named))
    own = {setting.flag for setting in settings()}
    foreign = {flag.name for flag in LMCACHE_SERVER_FLAGS}
    assert len(foreign) == len(LMCACHE_SERVER_FLAGS)
    assert own & foreign == set()
    assert foreign <= set(named)
    assert set(named) <= own | foreign


@pytest.mark.parametrize("words", DEFAULTS, ids=lambda words: words[0])
def test_a_default_that_is_written_out_never_stops_the_start(words):
    notes = load(*words).notes
    assert all(note.startswith(words[0]) for note in notes)


def test_all_defaults_together_are_accepted_and_mean_lmcaches_values():
    loaded = load(*(word for words in DEFAULTS for word in words))
    config = loaded.config
    assert (config.host, config.port, config.http_host, config.http_port) == (
        "localhost", 5555, "127.0.0.1", 8080,
    )  # fmt: skip
    assert (config.chunk_tokens, config.instance_id) == (256, "a-stable-name")
    assert (config.eviction_watermark, config.eviction_ratio) == (0.8, 0.2)
    assert (config.l2_store_policy, config.l2_prefetch_policy) == ("default", "default")
    assert config.l2_prefetches_max == 8


@pytest.mark.parametrize(
    ("words", "watermark", "ratio"),
    [
        ((), None, None),
        (("--eviction-trigger-watermark", "0.9"), 0.9, 0.2),
        (("--eviction-ratio", "0.1"), 0.8, 0.1),
    ],
)
def test_one_of_the_two_eviction_flags_means_the_other_as_lmcache_has_it(words, watermark, ratio):
    config = load(*words).config
    assert (config.eviction_watermark, config.eviction_ratio) == (watermark, ratio)


def test_a_number_that_is_written_otherwise_is_the_same_default():
    assert load("--p2p-lookup-timeout", "30.0").notes == ()
    assert load("--coordinator-heartbeat-interval", "5").notes == ()


def test_what_refuses_says_what_to_do():
    refused = [flag for flag in LMCACHE_SERVER_FLAGS if flag.verdict == Verdict.REFUSED]
    assert refused
    for flag in refused:
        assert "leave the flag out" in flag.reason or "not yet" in flag.reason, flag.name
