"""How fast a worker copies between its pages and the arena, beside memcpy with and without a seal.

The measuring is done by `scripts/bench_copies.py` in a process of its own, because it needs torch
and the engines' package; here its rounds become a table. The ceiling of a sealed copy is whatever
is faster for bytes that lie in one piece: copying and sealing in one pass, or in two.
"""

import sys
from pathlib import Path

import msgspec

from kvcellar.bench.figures import median
from kvcellar.bench.programs import Programs
from kvcellar.bench.report import Cell, Column, Table

__all__ = ["CopyCase", "copies_table", "measure_copies"]

_RUN_S = 900.0
_AIM = 0.8
_WAYS = {
    "store": ("memcpy_out", ("one_pass_out", "two_passes_out")),
    "load": ("memcpy_in", ("one_pass_in", "two_passes_in")),
}


class CopyCase(msgspec.Struct, frozen=True):
    """What the script found for one size of page and number of threads.

    Attributes:
        pages: the size of a page, in words.
        chunk_bytes: of one chunk.
        threads: how many copied at once.
        gb_per_s: by direction and way, one number a round.
    """

    pages: str
    chunk_bytes: int
    threads: int
    gb_per_s: dict[str, dict[str, list[float]]]


class _Found(msgspec.Struct, frozen=True):
    is_compiled: bool
    cases: list[CopyCase]


def measure_copies(programs: Programs, root: Path, *, rounds: int) -> Table:
    """Return the table of copies.

    Raises:
        BenchError: the script failed, for instance because torch is not installed.
    """
    words = [sys.executable, str(root / "scripts" / "bench_copies.py"), str(rounds)]
    found = msgspec.json.decode(programs.run("copies", words, timeout_s=_RUN_S), type=_Found)
    notes = [] if found.is_compiled else ["numba is not installed: numpy copies and seals"]
    return copies_table(found.cases, notes)


def copies_table(cases: list[CopyCase], notes: list[str]) -> Table:
    """Return the table of measured rounds: medians, and shares as the median of rounds."""
    columns = [Column("pages"), Column("chunk MB", 1), Column("threads", 0)]
    for direction in _WAYS:
        columns += [Column("memcpy"), Column("+ seal"), Column(direction), Column("share %", 0)]
    notes = [
        *notes,
        "memcpy, + seal: the same bytes in one piece, copied, and copied and sealed.",
        f"share: of + seal; aim {_AIM:.0%}.",
    ]
    rows = tuple(_row(case) for case in cases)
    return Table("copies", "copies of the worker half, GB/s", tuple(columns), rows, tuple(notes))


def _row(case: CopyCase) -> tuple[Cell, ...]:
    cells: list[Cell] = [case.pages, case.chunk_bytes / 1e6, case.threads]
    for direction, (plain, sealed) in _WAYS.items():
        speeds = case.gb_per_s[direction]
        ceilings = [max(ways) for ways in zip(*(speeds[way] for way in sealed), strict=True)]
        shares = [one / most for one, most in zip(speeds[direction], ceilings, strict=True)]
        cells += [median(speeds[plain]), median(ceilings), median(speeds[direction])]
        cells.append(median(shares) * 100)
    return tuple(cells)
