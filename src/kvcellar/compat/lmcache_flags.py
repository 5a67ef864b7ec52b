"""The flags of `lmcache server` that kvcellar's server does not have itself, each with a verdict.

A command copied from LMCache's guides must start, or say in one line why it cannot. A flag that
tunes a part which does not exist here is noted and changes nothing; one that asks for something
the user would miss is refused, because silence would be a lie. `compat.lmcache_cli` hands the
table to `config.load`.
"""

from kvcellar.config.flags import ForeignFlag, Takes, Verdict

__all__ = ["LMCACHE_SERVER_FLAGS"]

_OWN_OBJECTS = "each KV group of a model always has objects of its own"
_LATER = "not yet in kvcellar 0.1: "
_NO_P2P = _LATER + "sharing between nodes; leave the flag out and each node caches for itself"
_NO_PEERS = "no other node is asked in kvcellar 0.1"
_NO_COORDINATOR = "there is no coordinator in kvcellar 0.1"
_NO_FLEET = _LATER + "the coordinator; leave the flag out and each node caches for itself"
_NO_BLEND = _LATER + "CacheBlend; leave the flag out"
_NO_TRACE = _LATER + "tracing; leave the flag out and read /metrics on --http-port"
_NO_SCRIPT = "kvcellar runs nobody's code in its server; leave the flag out"
_NO_DEVICE = _LATER + "L1 is this host's memory; leave the flag out and set --l1-size-gb"
_ONE_LOOP = "one event loop serves every engine and engines copy for themselves, so no pool waits"
_NO_POOL = "there is no such pool: memory is taken in the background, in steps"
_KERNEL_TELLS = "the kernel tells when a client ends; nothing is reaped by a timer"
_LEASES = "a lease ends with its holder's release or death, not by a timer"
_DESCRIPTOR = "the arena is an anonymous file that engines get as a descriptor"
_PAGES = "metrics are always at /metrics on --http-port"


def _noted(
    name: str, reason: str, *, takes: int = Takes.ONE, fine: tuple[str, ...] = ()
) -> ForeignFlag:
    return ForeignFlag(name, Verdict.NOTED, reason, takes, fine)


def _refused(
    name: str, reason: str, *, takes: int = Takes.ONE, fine: tuple[str, ...] = ()
) -> ForeignFlag:
    return ForeignFlag(name, Verdict.REFUSED, reason, takes, fine)


def _noted_switch(name: str, reason: str) -> tuple[ForeignFlag, ForeignFlag]:
    return (
        _noted(f"--{name}", reason, takes=Takes.NONE),
        _noted(f"--no-{name}", reason, takes=Takes.NONE),
    )


_SERVER = (
    _noted(
        "--transport",
        "kvcellar's connector speaks kvcellar's own protocol to the same port",
        fine=("zmq",),
    ),
    _noted("--null-block-id", "vLLM's null blocks are recognised and never stored", fine=("0",)),
    _noted("--max-workers", _ONE_LOOP),
    _noted("--max-gpu-workers", _ONE_LOOP),
    _noted("--max-cpu-workers", _ONE_LOOP),
    _noted("--grpc-server-workers", _ONE_LOOP),
    _noted(
        "--hash-algorithm",
        "keys are blake3 over content and never depend on PYTHONHASHSEED",
        fine=("blake3",),
    ),
    _refused("--engine-type", _NO_BLEND, fine=("default",)),
    _noted("--supported-transfer-mode", "engines copy between their KV and the mapped arena"),
    *_noted_switch("isolated-ipc", _DESCRIPTOR + "; no IPC namespace is shared"),
    _refused("--runtime-plugin-locations", _NO_SCRIPT, takes=Takes.MANY),
    _refused("--runtime-plugin-config", _NO_SCRIPT, fine=("{}",)),
    _noted("--shm-name", _DESCRIPTOR + "; it has no name"),
    _refused("--script-allowed-imports", _NO_SCRIPT, takes=Takes.MANY),
    _refused("--run-script-api-enabled", _NO_SCRIPT, takes=Takes.NONE),
    _noted("--no-run-script-api-enabled", _NO_SCRIPT, takes=Takes.NONE),
    *_noted_switch("separate-object-groups", _OWN_OBJECTS),
    _noted("--worker-reap-timeout-seconds", _KERNEL_TELLS),
    _noted("--session-ttl-seconds", _KERNEL_TELLS),
    _noted("--worker-registration-grace-seconds", _KERNEL_TELLS),
    _refused("--enable-segmented-prefix", _NO_BLEND, takes=Takes.NONE),
    _refused("--enable-dedup-content", _NO_BLEND, takes=Takes.NONE),
    _refused("--enable-blend-reorder", _NO_BLEND, takes=Takes.NONE),
    _refused("--enable", _LATER + "experimental features; leave the flag out", takes=Takes.MANY),
    _noted("--kv-event-log-size", "KV events are not yet in kvcellar 0.1", fine=("0",)),
    _refused("--server-module", _NO_SCRIPT),
)

# Only the address turns it on; the others tune it, and alone they do nothing in LMCache either.
_P2P = (
    _refused("--p2p-advertise-url", _NO_P2P, fine=("",)),
    _noted("--p2p-listen-url", _NO_PEERS, fine=("",)),
    _noted("--p2p-lookup-timeout", _NO_PEERS, fine=("30",)),
    _noted("--p2p-load-timeout", _NO_PEERS, fine=("30",)),
    _noted("--p2p-transfer-engine", _NO_PEERS, fine=("nixl",)),
)

_COORDINATOR = (
    _refused("--coordinator-url", _NO_FLEET, fine=("",)),
    *(
        _noted(f"--coordinator-{name}", _NO_COORDINATOR, fine=(default,))
        for name, default in (
            ("advertise-ip", ""),
            ("heartbeat-interval", "5"),
            ("event-flush-interval", "1"),
            ("event-transport", "http"),
            ("kafka-bootstrap-servers", ""),
            ("kafka-topic", "lmcache-cache-events"),
            ("kafka-delivery-timeout", "300"),
            ("blend-timeout", "1"),
            ("blend-match-concurrency", "8"),
            ("l2-event-flush-interval", "1"),
        )
    ),
    *(
        _noted(f"--coordinator-{name}", _NO_COORDINATOR, takes=Takes.NONE)
        for name in ("event-reporting", "l2-event-reporting")
    ),
)

_STORAGE = (
    *_noted_switch("l1-use-lazy", _NO_POOL),
    _noted("--l1-init-size-gb", _NO_POOL),
    _noted("--l1-align-bytes", "slots are aligned to pages of 4096 bytes", fine=("4096",)),
    *_noted_switch("l1-use-hugepages", "huge pages are used wherever the kernel gives them"),
    _refused("--l1-devdax-path", _NO_DEVICE),
    _refused("--gds-l1-path", _NO_DEVICE),
    _refused("--gds-l1-backend", _NO_DEVICE, fine=("auto",)),
    *_noted_switch("gds-l1-use-direct-io", "there is no GDS tier in kvcellar 0.1"),
    _noted("--l1-write-ttl-seconds", _LEASES),
    _noted("--l1-read-ttl-seconds", _LEASES),
    _noted("--periodic-notifier-interval-ms", "nothing is polled here"),
    _refused("--l1-manager", _LATER + "several L1s; leave the flag out and set --l1-size-gb"),
)

_OBSERVABILITY = (
    *(
        _noted(f"--disable-{name}", _PAGES, takes=Takes.NONE)
        for name in ("observability", "metrics", "grpc-metrics")
    ),
    _noted("--disable-logging", "write --log-level ERROR for fewer lines", takes=Takes.NONE),
    _refused("--enable-tracing", _NO_TRACE, takes=Takes.NONE),
    _refused("--otlp-endpoint", _NO_TRACE),
    _noted("--event-bus-queue-size", "there is no event bus"),
    _noted("--prometheus-port", _PAGES),
    _noted("--metrics-sample-rate", "every request is counted"),
    _refused("--lookup-hash-log-dir", _LATER + "logs of lookups; leave the flag out", fine=("",)),
    *(
        _noted(
            f"--lookup-hash-log-{name}", "there is no log of lookups in kvcellar 0.1", fine=(value,)
        )
        for name, value in (
            ("rotation-interval", "21600"),
            ("rotation-max-size", "104857600"),
            ("max-files", "100"),
        )
    ),
    *(
        _noted(name, "the control loop makes no garbage that has to be searched for", takes=takes)
        for name, takes in (
            ("--enable-gc-monitor", Takes.NONE),
            ("--gc-monitor-min-pause-ms", Takes.ONE),
            ("--gc-monitor-top-objects", Takes.ONE),
        )
    ),
    _noted("--enable-extra-logging", "write --log-level DEBUG for more lines", takes=Takes.NONE),
    _noted("--extra-logging-interval", "write --log-level DEBUG for more lines"),
    _refused("--trace-level", _NO_TRACE),
    _refused("--trace-output", _NO_TRACE),
)

LMCACHE_SERVER_FLAGS = (*_SERVER, *_P2P, *_COORDINATOR, *_STORAGE, *_OBSERVABILITY)
"""Every flag of `lmcache server` 0.5.6 that is not a flag of `kvcellar server`."""
