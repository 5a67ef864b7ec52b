"""How long a lookup takes its caller, alone and beside load, and what the peer's takes.

Alone: one client, one server, nothing else. Beside load: `/metrics` is scraped without a rest and
another process stores 1 GB/s of real bytes, which is what a busy node does to its scheduler.
"""

import functools
import sys
from collections.abc import Callable

from kvcellar.bench.bare import BareRoundTrip
from kvcellar.bench.figures import Latency, latency, sample
from kvcellar.bench.loads import Load
from kvcellar.bench.node import Node
from kvcellar.bench.peer import Peer
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Cell, Column, Table
from kvcellar.bench.stand_in import StandIn, random_keys
from kvcellar.clock import Clock
from kvcellar.keys.digest import KEY_BYTES

__all__ = ["KEY_COUNTS", "measure_lookups"]

KEY_COUNTS = (1, 8, 100, 1_000, 10_000)
_SHARD_BYTES = 4_096
_L1_GB = 2.0
_STORE_GB_PER_S = 1.0
_KEYS_A_STORE = 2_000

Figures = dict[int, Latency]
"""By number of keys."""
Say = Callable[[str], None]


def measure_lookups(
    programs: Programs, peer: Peer, *, seconds: float, clock: Clock, say: Say
) -> Table:
    """Return the table of lookups; each number of keys is looked up for `seconds`."""
    say("the same bytes there and back, without work")
    bare = BareRoundTrip(programs, clock)
    kinds = [{count: bare.measure(count, seconds=seconds / 4) for count in KEY_COUNTS}]
    bare.close()
    alone, loaded, load = _measure_ours(programs, seconds=seconds, clock=clock, say=say)
    kinds += [alone, loaded]
    notes = [
        "bare: the same bytes there and back over a Unix socket, which is the least it can take.",
        "aim, on a quiet core: 8 keys in 0.1 ms, p99 of 1,000 keys under 1 ms.",
        f"beside load: {load}.",
    ]
    try:
        alone, loaded, load = _measure_peer(programs, peer, seconds=seconds, say=say)
    except BenchError as error:
        notes.append(f"{peer.name} was not measured: {error.summary}")
    else:
        kinds += [alone, loaded]
        notes.append(
            f"{peer.name}: the lookup and its status, asked until it answers, by its own client, "
            f"which sends tokens where ours sends keys; beside load: {load}."
        )
    heads = ("bare", "kvcellar", "beside load", peer.name, "beside load")
    columns = [Column("keys", 0)]
    for head in heads[: len(kinds)]:
        columns += [Column(f"{head} p50", 3), Column("p99", 3)]
    rows = tuple(_row(count, [kind[count] for kind in kinds]) for count in KEY_COUNTS)
    title = "lookups through the client library, ms"
    return Table("lookup", title, tuple(columns), rows, tuple(notes))


def _row(count: int, figures: list[Latency]) -> tuple[Cell, ...]:
    cells: list[Cell] = [count]
    for one in figures:
        cells += [one.p50_s * 1e3, one.p99_s * 1e3]
    return tuple(cells)


def _measure_ours(
    programs: Programs, *, seconds: float, clock: Clock, say: Say
) -> tuple[Figures, Figures, str]:
    node = Node.start(programs, "lookup-server", l1_gb=_L1_GB)
    with StandIn(node.port, name="lookups", shard_bytes=_SHARD_BYTES) as engine:
        engine.wait_for_memory(_SHARD_BYTES * max(KEY_COUNTS))
        keys = _store_prefix(engine, max(KEY_COUNTS))
        engine.keep(keys)

        def measure() -> Figures:
            figures = {}
            for count in KEY_COUNTS:
                once = functools.partial(_lookup, engine, keys[: count * KEY_BYTES], clock)
                figures[count] = sample(once, seconds=seconds, clock=clock)
            return figures

        say("kvcellar, alone")
        alone = measure()
        say("kvcellar, beside a store of 1 GB/s and a scraper")
        storing = [sys.executable, "-m", "kvcellar.bench.background", "store", str(node.port)]
        storing.append(str(_STORE_GB_PER_S))
        with Load.running(programs, storing=storing, metrics_url=node.metrics_url) as load:
            loaded = measure()
            did = load.describe()
    programs.stop(node.program)
    return alone, loaded, did


def _store_prefix(engine: StandIn, count: int) -> bytes:
    keys = random_keys(count)
    parent = b""
    for at in range(0, len(keys), _KEYS_A_STORE * KEY_BYTES):
        part = keys[at : at + _KEYS_A_STORE * KEY_BYTES]
        engine.store(part, parent=parent)
        parent = part[-KEY_BYTES:]
    return keys


def _lookup(engine: StandIn, keys: bytes, clock: Clock) -> float:
    start_s = clock.monotonic_s()
    reply = engine.lookup(keys)
    took_s = clock.monotonic_s() - start_s
    if reply.count * KEY_BYTES != len(keys):
        raise BenchError(f"a lookup found {reply.count} of {len(keys) // KEY_BYTES} chunks")
    engine.release(reply.lease)
    return took_s


def _measure_peer(
    programs: Programs, peer: Peer, *, seconds: float, say: Say
) -> tuple[Figures, Figures, str]:
    peer.check()
    node = peer.start(programs, "lookup-peer", l1_gb=_L1_GB)

    def measure() -> Figures:
        took = peer.lookups(programs, node, KEY_COUNTS, seconds=seconds)
        return {count: latency(durations_s) for count, durations_s in took.items()}

    say(f"{peer.name}, alone")
    alone = measure()
    say(f"{peer.name}, beside the same load")
    storing = peer.storing(node, _STORE_GB_PER_S)
    with Load.running(programs, storing=storing, metrics_url=node.metrics_url) as load:
        loaded = measure()
        did = load.describe()
    programs.stop(node.program)
    return alone, loaded, did
