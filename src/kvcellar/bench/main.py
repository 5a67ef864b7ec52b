"""Run the parts that were asked for, show the tables, and leave nothing running.

`scripts/bench.py` calls this with the checkout's root. Each part starts what it needs and ends it;
what is left after an error or Ctrl-C is ended here.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from kvcellar.bench.copies import measure_copies
from kvcellar.bench.disk import measure_disk
from kvcellar.bench.first_token import measure_first_token
from kvcellar.bench.lookups import measure_lookups
from kvcellar.bench.machine import load_average, machine_facts
from kvcellar.bench.options import Effort, parse
from kvcellar.bench.peer import Peer
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Table, render, to_json
from kvcellar.bench.servers import measure_server
from kvcellar.clock import Clock, SystemClock
from kvcellar.errors import KVCellarError

__all__ = ["run"]

Say = Callable[[str], None]


def run(root: Path, arguments: Sequence[str]) -> int:
    """Run the benchmark and return the exit code: 0 when every part was measured.

    Args:
        root: of the checkout; logs go to its `.bench`, the peer's environment to its `.stack`.
        arguments: of the command line.
    """
    options = parse(arguments)
    clock = SystemClock()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    start_s = clock.monotonic_s()

    def say(text: str) -> None:
        print(f"[{clock.monotonic_s() - start_s:5.0f} s] {text}", file=sys.stderr, flush=True)

    programs = Programs(root / ".bench", clock)
    facts = machine_facts()
    if options.is_quick:
        facts["quick"] = "short runs, to see that it works; no figures to keep"
    tables: list[Table] = []
    try:
        measures = _measures(root, options.effort, programs=programs, clock=clock, say=say)
        for part in options.parts:
            say(f"== {part}")
            tables.append(_measure(part, measures[part], say))
            programs.stop_all()
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    else:
        return 0 if all(table.rows for table in tables) else 1
    finally:
        # A second Ctrl-C must not stop the stopping.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        programs.stop_all()
        Peer.clean_up()
        say("all stopped")
        # Also after an interruption: what was measured until then may have taken minutes.
        print(render(facts, tables), end="")
        if options.json_path is not None:
            options.json_path.write_bytes(to_json(facts, tables))


def _measures(
    root: Path, effort: Effort, *, programs: Programs, clock: Clock, say: Say
) -> dict[str, Callable[[], Table]]:
    peer = Peer(root, programs, say)
    return {
        "copies": lambda: measure_copies(programs, root, rounds=effort.copy_rounds),
        "lookup": lambda: measure_lookups(
            programs, peer, seconds=effort.lookup_s, clock=clock, say=say
        ),
        "ttft": lambda: measure_first_token(
            programs, peer, root, effort=effort, clock=clock, say=say
        ),
        "server": lambda: measure_server(
            programs, starts=effort.starts, keys=effort.stored_keys, say=say
        ),
        "disk": lambda: measure_disk(programs, peer, root, rounds=effort.disk_rounds, say=say),
    }


def _measure(part: str, measure: Callable[[], Table], say: Say) -> Table:
    """Return a part's table, or one without rows that says why it was not measured."""
    before = load_average()
    try:
        table = measure()
    except (BenchError, KVCellarError, OSError) as error:
        say(f"{part} was not measured: {error}")
        reason = error.summary if isinstance(error, BenchError) else repr(error)
        return Table(part, f"{part}: not measured", (), (), (reason,))
    note = f"load average: {before} at the start, {load_average()} at the end."
    return replace(table, notes=(*table.notes, note))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
