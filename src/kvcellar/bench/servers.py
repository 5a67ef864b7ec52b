"""What a server costs: the time to its first answer, its memory, and the memory a key takes.

The times count from the start of the process to an answered ping, which needs the door, the socket
and the handshake, and to a healthy page of the HTTP process. Their ceiling is an interpreter that
does nothing. Memory is what the two processes have for themselves: the arena is no part of it,
since the server never maps it.
"""

import contextlib
import sys
from collections.abc import Callable

from kvcellar.bench.figures import median
from kvcellar.bench.machine import children_of, memory_of
from kvcellar.bench.node import Node
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Cell, Column, Table
from kvcellar.bench.stand_in import StandIn, random_keys
from kvcellar.client.tool import connect_tool
from kvcellar.errors import KVCellarError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.memory.limits import read_memory, reserve_bytes
from kvcellar.protocol.messages import Ping
from kvcellar.units import GIB, MIB

__all__ = ["measure_server"]

_SMALL_GB = 1.0
_LARGE_GB = 500.0
_POLL_S = 0.002
_READY_S = 30.0
_SHARD_BYTES = 4_096
_KEYS_A_STORE = 4_000
_AIM_MB = 120
_AIM_KEY_BYTES = 500


def measure_server(
    programs: Programs, *, starts: int, keys: int, say: Callable[[str], None]
) -> Table:
    """Return the table of a server's costs.

    Args:
        programs: starts the servers.
        starts: how often each is started; the medians are shown.
        keys: how many are stored to find what one takes.
        say: told what happens.

    Raises:
        BenchError: a server does not come up, or does not store.
    """
    interpreter_s = _interpreter(programs, starts)
    rows: list[tuple[Cell, ...]] = []
    memory = read_memory()
    most_bytes = memory.total_bytes - reserve_bytes(memory.total_bytes)
    large_gb = min(_LARGE_GB, most_bytes * 10 // GIB / 10)
    for l1_gb in (_SMALL_GB, large_gb):
        say(f"start with an L1 of {l1_gb:.3g} GB")
        pings, pages = zip(*(_start(programs, l1_gb) for _ in range(starts)), strict=True)
        what = f"start with L1 of {l1_gb:.3g} GB"
        rows.append((f"{what}: first answered ping, s", median(pings), interpreter_s))
        rows.append((f"{what}: healthy over HTTP, s", median(pages), interpreter_s))
    say(f"memory, empty and with {keys:,} keys")
    rows += _memory_rows(programs, keys)
    notes = ["beside the times: an interpreter that does nothing; beside the memory: the aim."]
    if large_gb < _LARGE_GB:
        notes.append(f"{_LARGE_GB:g} GB would be refused here: the most is {large_gb:.3g} GB.")
    columns = (Column("the server"), Column("measured", 3), Column("ceiling or aim", 3))
    return Table("server", "what a server costs", columns, tuple(rows), tuple(notes))


def _interpreter(programs: Programs, starts: int) -> float:
    def once() -> float:
        program = programs.start("interpreter", [sys.executable, "-c", "pass"])
        program.process.wait()
        took_s = programs.since(program)
        programs.stop(program)
        return took_s

    return median([once() for _ in range(starts)])


def _start(programs: Programs, l1_gb: float) -> tuple[float, float]:
    """Start a server; return the seconds to its first pong and to a healthy page."""
    node = Node.launch(programs, "server", l1_gb=l1_gb)
    try:
        pong_s = programs.wait_until(
            node.program, lambda: _answers(node.port), timeout_s=_READY_S, poll_s=_POLL_S
        )
        return pong_s, node.wait_until_healthy(programs, poll_s=_POLL_S)
    finally:
        programs.stop(node.program)


def _answers(port: int) -> bool:
    with contextlib.suppress(KVCellarError), connect_tool("127.0.0.1", port) as session:
        session.call(Ping, timeout_s=1.0)
        return True
    return False


def _memory_rows(programs: Programs, keys: int) -> list[tuple[Cell, ...]]:
    l1_gb = max(_SMALL_GB, keys * _SHARD_BYTES * 1.25 / GIB)
    node = Node.start(programs, "memory", l1_gb=l1_gb)
    control, (pages,) = node.program.process.pid, children_of(node.program.process.pid)
    empty = {pid: memory_of(pid) for pid in (control, pages)}
    rss_mb, pss_mb = (sum(one[kind] for one in empty.values()) / MIB for kind in ("Rss", "Pss"))
    rows: list[tuple[Cell, ...]] = [
        ("memory of the control process (RSS), MB", empty[control]["Rss"] / MIB, None),
        ("memory of the HTTP process (RSS), MB", empty[pages]["Rss"] / MIB, None),
        ("both together (RSS), MB", rss_mb, _AIM_MB),
        ("both, a shared page counted once (PSS), MB", pss_mb, _AIM_MB),
    ]
    with StandIn(node.port, name="keys", shard_bytes=_SHARD_BYTES) as engine:
        engine.wait_for_memory(keys * _SHARD_BYTES)
        # The first store brings what has nothing to do with the number of keys.
        parent = random_keys(1)
        engine.store(parent)
        before = memory_of(control)["Private"]
        for _ in range(0, keys, _KEYS_A_STORE):
            part = random_keys(min(_KEYS_A_STORE, keys))
            stored = engine.store(part, parent=parent)
            if stored * KEY_BYTES != len(part):
                raise BenchError(f"{stored} of {len(part) // KEY_BYTES} keys were stored")
            parent = part[-KEY_BYTES:]
        after = memory_of(control)["Private"]
    programs.stop(node.program)
    count = -(-keys // _KEYS_A_STORE) * min(_KEYS_A_STORE, keys)
    a_key_bytes = (after - before) / count
    rows.append((f"memory a key, over {count:,} keys, bytes", a_key_bytes, _AIM_KEY_BYTES))
    return rows
