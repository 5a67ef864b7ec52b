#!/usr/bin/env python3
"""Measure the worker half's copies beside memcpy: `bench_copies.py ROUNDS` prints JSON.

A script of its own because it needs torch and `kvcellar.engines`, which the benchmark's package
may not import. Pages are one torch tensor, slots lie in a real arena; both are far larger than any
cache, and pages are taken in random order. In each round every way of copying the same bytes takes
its turn, so that what else the machine does hits all of them, and shares are of one round.
"""

import ctypes
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvcellar.engines.copy import open_copier
from kvcellar.engines.pages import PageRun
from kvcellar.layout.shard import EXACT
from kvcellar.memory import seal
from kvcellar.memory.arena import Arena, ArenaView
from kvcellar.units import align_up

REGIONS = 30
POOL_BYTES = 384_000_000
KEY = bytes(32)


@dataclass(frozen=True)
class Case:
    """A size of page and how many blocks make a chunk."""

    name: str
    page_bytes: int
    blocks: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk: of all regions' pages of its blocks."""
        return REGIONS * self.page_bytes * self.blocks


CASES = (
    Case("32 KiB", 32_768, 6),
    Case("32 KiB", 32_768, 12),
    Case("96 KiB, SmolLM2 bf16", 98_304, 2),
    Case("192 KiB, SmolLM2 fp32", 196_608, 2),
)


class Pool:
    """One thread's pages and slots, and the ways to copy between them."""

    def __init__(self, case: Case, seed: int) -> None:
        """Make pages with random bytes and an arena whose memory is mapped already."""
        self.size = case.chunk_bytes
        self.count = POOL_BYTES // self.size
        blocks = self.count * case.blocks
        source = np.random.default_rng(seed)
        self.tensor = torch.from_numpy(
            source.integers(0, 256, (REGIONS, blocks, case.page_bytes), dtype=np.uint8)
        )
        self.flat = self.tensor.numpy().reshape(-1)
        self.copier = open_copier([self.run_of(region, case, blocks) for region in range(REGIONS)])
        self.copier.warm_up(fidelity=EXACT)
        self.blocks = source.permutation(blocks).astype(np.int64).reshape(self.count, case.blocks)
        arena_bytes = align_up(self.count * self.size, 4096)
        self.arena = Arena.create(arena_bytes, arena_bytes)
        self.arena.grow_step(0)
        self.view = ArenaView(self.arena.fd, arena_bytes)
        self.slots = np.frombuffer(self.view.view, dtype=np.uint8)
        self.slots[::4096] = 0
        self.seals = [0] * self.count

    def run_of(self, region: int, case: Case, blocks: int) -> PageRun:
        """Describe one layer's pages."""
        return PageRun(
            names=(f"layer.{region}",),
            storage=self.tensor.untyped_storage(),
            device="cpu",
            offset_bytes=region * blocks * case.page_bytes,
            stride_bytes=case.page_bytes,
            page_bytes=case.page_bytes,
            block_count=blocks,
        )

    def close(self) -> None:
        """Give the memory back."""
        del self.slots
        self.view.close()
        self.arena.close()

    def parts(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return as many bytes of the pages, in one piece, and slot `index`."""
        span = slice(index * self.size, (index + 1) * self.size)
        return self.flat[span], self.slots[span]

    def memcpy_out(self) -> None:
        """Copy the pages' bytes into the slots, in one piece each."""
        for index in range(self.count):
            pages, slot = self.parts(index)
            ctypes.memmove(slot.ctypes.data, pages.ctypes.data, self.size)

    def memcpy_in(self) -> None:
        """Copy the slots' bytes to where pages are."""
        for index in range(self.count):
            pages, slot = self.parts(index)
            ctypes.memmove(pages.ctypes.data, slot.ctypes.data, self.size)

    def one_pass_out(self) -> None:
        """Copy into the slots and seal in the same pass."""
        for index in range(self.count):
            seal.finish(seal.copy_and_sum(*self.parts(index), 0), KEY, 0, self.size)

    def one_pass_in(self) -> None:
        """Copy out of the slots and seal in the same pass."""
        for index in range(self.count):
            pages, slot = self.parts(index)
            seal.finish(seal.copy_and_sum(slot, pages, 0), KEY, 0, self.size)

    def two_passes_out(self) -> None:
        """Copy into the slots with memcpy, then seal what arrived."""
        for index in range(self.count):
            pages, slot = self.parts(index)
            ctypes.memmove(slot.ctypes.data, pages.ctypes.data, self.size)
            seal.finish(seal.partial_sum(slot, 0), KEY, 0, self.size)

    def two_passes_in(self) -> None:
        """Seal the slots, then copy them with memcpy."""
        for index in range(self.count):
            pages, slot = self.parts(index)
            seal.finish(seal.partial_sum(slot, 0), KEY, 0, self.size)
            ctypes.memmove(pages.ctypes.data, slot.ctypes.data, self.size)

    def store(self) -> None:
        """Store every chunk as the worker half does."""
        for batch in self.batches():
            totals = self.copier.store(
                [self.blocks[index] for index in batch],
                [self.parts(index)[1] for index in batch],
                fidelity=EXACT,
                after=None,
            )
            for index, total in zip(batch, totals, strict=True):
                self.seals[index] = seal.finish(total, KEY, 0, self.size)

    def load(self) -> None:
        """Load every chunk as the worker half does, verified."""
        for batch in self.batches():

            def is_sealed(at: int, total: int, first: int = batch.start) -> bool:
                return seal.finish(total, KEY, 0, self.size) == self.seals[first + at]

            good = self.copier.load(
                [self.parts(index)[1] for index in batch],
                [self.blocks[index] for index in batch],
                fidelity=EXACT,
                is_sealed=is_sealed,
                after=None,
            )
            assert good == len(batch), (batch, good)

    def batches(self) -> Iterator[range]:
        """Give all chunks in the batches that the copier likes."""
        width = self.copier.batch_chunks
        for start in range(0, self.count, width):
            yield range(start, min(start + width, self.count))


WAYS = {
    "store": ("memcpy_out", "one_pass_out", "two_passes_out", "store"),
    "load": ("memcpy_in", "one_pass_in", "two_passes_in", "load"),
}


def gb_per_s(actions: list[Callable[[], None]], size_bytes: int) -> float:
    """Do the actions at once, one thread each, and return the bytes a nanosecond of all."""
    if len(actions) == 1:
        start = time.perf_counter()
        actions[0]()
        return size_bytes / (time.perf_counter() - start) / 1e9
    gate = threading.Barrier(len(actions) + 1)

    def act(action: Callable[[], None]) -> None:
        gate.wait()
        action()

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return size_bytes / (time.perf_counter() - start) / 1e9


def measure(case: Case, threads: int, rounds: int) -> dict[str, object]:
    """Return the GB/s of each round, by direction and way."""
    pools = [Pool(case, seed) for seed in range(threads)]
    size_bytes = sum(pool.count * pool.size for pool in pools)
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for number, direction in itertools.product(range(rounds + 1), WAYS):
            # Store comes before load, which needs its seals; memcpy_in changes pages, but slots
            # are stored afresh in each round before they are loaded.
            for way in WAYS[direction]:
                if way == "load":
                    for pool in pools:
                        pool.store()
                speed = gb_per_s([getattr(pool, way) for pool in pools], size_bytes)
                if number:
                    found.setdefault(direction, {}).setdefault(way, []).append(speed)
    finally:
        for pool in pools:
            pool.close()
    return {
        "pages": case.name,
        "chunk_bytes": case.chunk_bytes,
        "threads": threads,
        "gb_per_s": found,
    }


def main() -> int:
    """Measure all cases; the last line is the result."""
    rounds = int(sys.argv[1])
    cases = [measure(case, threads, rounds) for case in CASES for threads in (1, 2)]
    print(json.dumps({"is_compiled": seal.warm_up(), "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
