"""How fast the file-system tier writes and reads, beside raw O_DIRECT and LMCache's own benchmark.

The measuring is done by `scripts/bench_tiers.py` in a process of its own, because it needs numpy
and all of the tier's threads; here its rounds become a table. The ceiling is what the same threads
get from the same disk with one bare system call a chunk. Where LMCache can be had, its `bench l2`
follows for each size on the same disk.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvcellar.bench.figures import median
from kvcellar.bench.peer import Peer
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Cell, Column, Table

__all__ = ["DiskCase", "PeerSpeeds", "disk_table", "measure_disk"]

_RUN_S = 1800.0
_AIM = 0.8
_DIRECTIONS = ("write", "read")


class DiskCase(msgspec.Struct, frozen=True):
    """What the script found for one shape of chunks.

    Attributes:
        chunk: the shape, in words.
        chunk_bytes: of one chunk.
        chunks: how many were written and read in a round.
        gb_per_s: by way, one number a round.
    """

    chunk: str
    chunk_bytes: int
    chunks: int
    gb_per_s: dict[str, list[float]]


class _Found(msgspec.Struct, frozen=True):
    is_compiled: bool
    workers: int
    cases: list[DiskCase]


PeerSpeeds = dict[str, float] | str
"""The peer's GB/s by direction, or why it has none."""


def measure_disk(
    programs: Programs, peer: Peer, root: Path, *, rounds: int, say: Callable[[str], None]
) -> Table:
    """Return the table of the tier; the disk that is measured is the one that `root` is on.

    Raises:
        BenchError: the script failed.
    """
    folder = root / ".bench" / "disk"
    words = [sys.executable, str(root / "scripts" / "bench_tiers.py"), str(folder), str(rounds)]
    try:
        found = msgspec.json.decode(programs.run("disk", words, timeout_s=_RUN_S), type=_Found)
        speeds = [_peer_speeds(programs, peer, folder, case, found.workers) for case in found.cases]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    notes = [] if found.is_compiled else ["numba is not installed: numpy proves the seals"]
    for trouble in sorted({text for text in speeds if isinstance(text, str)}):
        say(f"{peer.name} was not measured: {trouble}")
        notes.append(f"{peer.name}: not measured: {trouble}")
    return disk_table(found.cases, speeds, peer.name, notes)


def disk_table(
    cases: list[DiskCase], peers: list[PeerSpeeds], peer_name: str, notes: list[str]
) -> Table:
    """Return the table of measured rounds: medians, and shares as the median of rounds."""
    columns = [Column("chunk"), Column("MB", 1), Column("blocks there")]
    for direction in _DIRECTIONS:
        columns += [Column(f"raw {direction}"), Column("tier"), Column("share %", 0)]
        columns.append(Column(peer_name))
    notes = [
        *notes,
        "raw: new files, one O_DIRECT call each, as many threads as the tier lets at the disk.",
        "blocks there: the same writes into one file whose blocks were allocated before.",
        "tier: with headers, rename, cap and, reading, every seal proved.",
        f"share: of raw in the same round; aim {_AIM:.0%}.",
        f"{peer_name}: lmcache bench l2, fs_native, O_DIRECT, as many workers; it proves nothing.",
    ]
    rows = tuple(_row(case, speeds) for case, speeds in zip(cases, peers, strict=True))
    title = "the file-system tier, GB/s"
    return Table("disk", title, tuple(columns), rows, tuple(notes))


def _row(case: DiskCase, peer: PeerSpeeds) -> tuple[Cell, ...]:
    there = median(case.gb_per_s["preallocated_write"])
    cells: list[Cell] = [case.chunk, case.chunk_bytes / 1e6, there]
    for direction in _DIRECTIONS:
        raw, tier = case.gb_per_s[f"raw_{direction}"], case.gb_per_s[f"tier_{direction}"]
        shares = [ours / most for ours, most in zip(tier, raw, strict=True)]
        cells += [median(raw), median(tier), median(shares) * 100]
        cells.append(None if isinstance(peer, str) else peer[direction])
    return tuple(cells)


def _peer_speeds(
    programs: Programs, peer: Peer, folder: Path, case: DiskCase, workers: int
) -> PeerSpeeds:
    try:
        peer.check()
        return peer.disk_speeds(
            programs, folder, chunk_bytes=case.chunk_bytes, chunks=case.chunks, workers=workers
        )
    except BenchError as error:
        return error.summary
