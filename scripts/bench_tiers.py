#!/usr/bin/env python3
"""Measure the file-system tier beside raw O_DIRECT: `bench_tiers.py FOLDER ROUNDS` prints JSON.

A script of its own because it needs numpy and the tier's threads for itself. Slots lie in a real
arena. In each round, raw and tier write and read the same bytes in the same sizes with the same
number of threads, in turn, so that what else the machine and its disk do hits both, and shares are
of one round. *Raw* is open, one pwrite or pread with O_DIRECT, close, of new files; *preallocated*
writes again into one file whose blocks are there, which no cache that stores new things can.
"""

import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcellar.clock import SystemClock
from kvcellar.memory import seal
from kvcellar.memory.arena import Arena, ArenaView
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.base import ChunkRecord, ChunkWrite, ReadWant, WriteOutcome
from kvcellar.tiers.filesystem import FileSystemTier
from kvcellar.units import MIB, align_up

ROUND_BYTES = 256 * MIB
TIMEOUT_S = 300.0
WORKERS = 4
NAMESPACE = bytes(32)
SPIN_S = 0.2


@dataclass(frozen=True)
class Case:
    """A shape of chunks."""

    name: str
    shard_bytes: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return sum(self.shard_bytes)


CASES = (
    Case("SmolLM2 bf16, 256 tokens", (5_898_240,)),
    Case("one of 1 MiB", (MIB,)),
    Case("8 ranks of 4 MiB", (4 * MIB,) * 8),
)


class Bed:
    """A folder, an arena with the chunks of one round, and the ways to move them."""

    def __init__(self, folder: Path, case: Case) -> None:
        """Fill the arena with random bytes and open a tier."""
        self.case = case
        self.count = max(16, ROUND_BYTES // case.chunk_bytes)
        self.slot_bytes = sum(align_up(size, 4096) for size in case.shard_bytes)
        arena_bytes = self.count * self.slot_bytes
        self.arena = Arena.create(arena_bytes, arena_bytes)
        self.arena.grow_step(0)
        self.view = ArenaView(self.arena.fd, arena_bytes)
        self.bytes = np.frombuffer(self.view.view, dtype=np.uint8)
        source = np.random.default_rng(1)
        for start in range(0, arena_bytes, 64 * MIB):
            part = self.bytes[start : start + 64 * MIB]
            part[:] = source.integers(0, 256, part.size, dtype=np.uint8)
        self.folder = folder / "raw"
        self.folder.mkdir(parents=True)
        self.big = os.open(folder / "big", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.big, 0, arena_bytes)
        options = FileSystemOptions(name="bench", base_path=folder / "tier", workers=WORKERS)
        self.tier = FileSystemTier(options, SystemClock())
        assert self.tier.wait_until_counted(TIMEOUT_S)
        self.writes = [self.write_of(index) for index in range(self.count)]

    def close(self) -> None:
        """Give everything back."""
        self.tier.close()
        os.close(self.big)
        del self.writes, self.bytes
        self.view.close()
        self.arena.close()

    def whole(self, index: int) -> memoryview:
        """Return all slots of a chunk in one piece."""
        return self.view.view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def write_of(self, index: int) -> ChunkWrite:
        """Return a chunk with its seals."""
        key = index.to_bytes(32, "big")
        views, offset = [], index * self.slot_bytes
        for size in self.case.shard_bytes:
            views.append(self.view.view[offset : offset + size])
            offset += align_up(size, 4096)
        seals = tuple(seal.seal(view, key, shard) for shard, view in enumerate(views))
        record = ChunkRecord(key, NAMESPACE, self.case.shard_bytes, seals)
        return ChunkWrite(record, tuple(views))

    def preallocated_write(self) -> None:
        """Write chunks into a file whose blocks are there."""

        def write(index: int) -> None:
            os.pwrite(self.big, self.whole(index), index * self.slot_bytes)

        in_threads(WORKERS // 2, write, self.count)

    def raw_write(self) -> None:
        """Write each chunk into a new file."""

        def write(index: int) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
            fd = os.open(self.folder / str(index), flags, 0o600)
            os.pwrite(fd, self.whole(index), 0)
            os.close(fd)

        in_threads(WORKERS // 2, write, self.count)

    def raw_read(self) -> None:
        """Read the files into the slots that they came from."""

        def read(index: int) -> None:
            fd = os.open(self.folder / str(index), os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(fd, [self.whole(index)], 0) == self.slot_bytes
            os.close(fd)

        in_threads(WORKERS, read, self.count)

    def tier_write(self) -> None:
        """Write the same bytes through the tier."""
        for batch in self.batches():
            report = self.tier.write_many(batch, timeout_s=TIMEOUT_S)
            assert set(report.outcomes) == {WriteOutcome.WRITTEN}, report

    def tier_read(self) -> None:
        """Read and verify the same bytes through the tier."""
        for batch in self.batches():
            wants = [
                ReadWant(write.record.key, NAMESPACE, self.case.shard_bytes, tuple(write.views))
                for write in batch
            ]
            report = self.tier.read_many(wants, timeout_s=TIMEOUT_S)
            assert report.count == len(wants), report

    def batches(self) -> list[list[ChunkWrite]]:
        """Return all chunks in the batches that a tier takes."""
        width = self.tier.capabilities.batch_max
        return [self.writes[start : start + width] for start in range(0, self.count, width)]

    def empty(self) -> None:
        """Remove all files, and wait until the disk has done so."""
        for path in self.folder.iterdir():
            path.unlink()
        assert self.tier.clear(b"", timeout_s=TIMEOUT_S) in {0, self.count}
        os.sync()


def in_threads(threads: int, act: Callable[[int], None], count: int) -> None:
    """Do something for each chunk, so many at once."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(act, range(count)):
            pass


def measure(folder: Path, case: Case, rounds: int) -> dict[str, object]:
    """Return the GB/s of each round, by way."""
    bed = Bed(folder, case)
    found: dict[str, list[float]] = {}
    try:
        for number in range(rounds + 1):
            # Who goes first changes: a disk that throttles does so to the second.
            turns = [("raw_write", "raw_read"), ("tier_write", "tier_read")]
            ways = [("preallocated_write",), *(turns if number % 2 else reversed(turns))]
            for way in itertools.chain.from_iterable(ways):
                start_s = time.perf_counter()
                getattr(bed, way)()
                speed = bed.count * case.chunk_bytes / (time.perf_counter() - start_s) / 1e9
                if number:
                    found.setdefault(way, []).append(speed)
                threading.Event().wait(SPIN_S)
            bed.empty()
    finally:
        bed.close()
    return {
        "chunk": case.name,
        "chunk_bytes": case.chunk_bytes,
        "chunks": bed.count,
        "gb_per_s": found,
    }


def main() -> int:
    """Measure all cases; the last line is the result."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    cases = []
    for case in CASES:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            cases.append(measure(folder, case, rounds))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"is_compiled": seal.warm_up(), "workers": WORKERS, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
