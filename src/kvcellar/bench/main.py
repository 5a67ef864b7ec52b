"""Run the parts that were asked for, show the tables, and leave nothing running.

`scripts/bench.py` calls this with the checkout's root. Each part starts what it needs and ends it;
what is left after an error or Ctrl-C is ended here.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from kvcellar.bench.copies import measure_copies
from kvcellar.bench.first_token import measure_first_token
from kvcellar.bench.lookups import measure_lookups
from kvcellar.bench.machine import load_average, machine_facts
from kvcellar.bench.options import Options, parse
from kvcellar.bench.peer import Peer
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Table, render, to_json
from kvcellar.bench.servers import measure_server
from kvcellar.clock import Clock, SystemClock

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
    try:
        return _measure(root, options, programs=programs, clock=clock, say=say)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        # A second Ctrl-C must not stop the stopping.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        programs.stop_all()
        Peer.clean_up()
        say("all stopped")


def _measure(root: Path, options: Options, *, programs: Programs, clock: Clock, say: Say) -> int:
    facts = machine_facts()
    peer = Peer(root)
    if options.needs_peer:
        say(f"{peer.name} is made ready")
        peer.install(programs)
    effort = options.effort
    measures: dict[str, Callable[[], Table]] = {
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
    }
    tables: list[Table] = []
    failures = 0
    for part in options.parts:
        say(f"== {part}")
        try:
            tables.append(measures[part]())
        except BenchError as error:
            failures += 1
            say(f"{part} was not measured: {error}")
            tables.append(Table(part, f"{part}: not measured", (), (), (error.summary,)))
        programs.stop_all()
    facts["load after"] = load_average()
    if options.is_quick:
        facts["quick"] = "short runs, to see that it works; no figures to keep"
    print(render(facts, tables), end="")
    if options.json_path is not None:
        options.json_path.write_bytes(to_json(facts, tables))
        say(f"written: {options.json_path}")
    return 1 if failures else 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
