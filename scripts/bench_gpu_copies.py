#!/usr/bin/env python3
"""Measure and check the copies of a GPU: the first part of `make bench-gpu`.

Pages like those of Llama-3.1-8B (32 layers, 64 KiB a block and layer) go into a real arena and
back, in the raw form and as int8, with the copier that the worker half uses. Every case is first
shown to be right: raw bytes equal, int8 within half a step of its scale (and bf16's own rounding),
first tokens exact, seals equal to the CPU's, one flipped bit found. Then it is timed, the fastest
of five, beside the plain DMA of the same run; the kernels are timed without DMA, with the seal
and beside a gather of torch's that makes none; and a matrix product is timed alone and beside the
copies. `--json FILE` keeps the figures.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton

from kvcellar.engines.copy_gpu import PIECE_BYTES, GpuCopier, open_gpu_copier
from kvcellar.engines.pages import PageRun
from kvcellar.layout.shard import EXACT, EXACT_TOKENS, INT8, Vectors
from kvcellar.memory import seal
from kvcellar.memory.arena import Arena, ArenaView
from kvcellar.memory.slots import SlotAllocator
from kvcellar.units import GIB, MIB

LAYERS, BLOCKS, TOKENS, HEADS, ELEMENTS = 32, 1600, 16, 8, 128
CHUNK_BLOCKS = 16
PAGE_BYTES = 2 * TOKENS * HEADS * ELEMENTS * 2
KV_BYTES = CHUNK_BLOCKS * LAYERS * PAGE_BYTES
ARENA_STEPS = 4
COUNTS = (1, 2, 4, 8, 16, 64)
ROUNDS = 5


class Bench:
    """Pages on the GPU, an arena that is registered with it, and the copier between them."""

    def __init__(self, piece_bytes: int) -> None:
        """Make pages of random numbers and an arena of `ARENA_STEPS` GiB."""
        shape = (BLOCKS, 2, TOKENS, HEADS, ELEMENTS)
        self.pages = [
            (torch.randn(shape, device="cuda") * 2).to(torch.bfloat16) for _ in range(LAYERS)
        ]
        runs = [
            PageRun(
                (f"layer.{index}",), each.untyped_storage(), "cuda:0", 0, PAGE_BYTES, PAGE_BYTES,
                BLOCKS,
            )
            for index, each in enumerate(self.pages)
        ]  # fmt: skip
        vectors = Vectors("bfloat16", ELEMENTS, HEADS, 2 * TOKENS * HEADS)
        self.copier: GpuCopier = open_gpu_copier(
            runs, vectors=vectors, block_tokens=TOKENS, piece_bytes=piece_bytes
        )
        arena = Arena.create(ARENA_STEPS * GIB, GIB)
        self.view = ArenaView(arena.fd, ARENA_STEPS * GIB)
        self.slots = SlotAllocator(GIB)
        started_s = time.perf_counter()
        for step in range(ARENA_STEPS):
            arena.grow_step(step)
            self.copier.adopt(self.view, start=step * GIB, stop=(step + 1) * GIB)
            self.slots.add_step(step * GIB, GIB)
        self.prepare_s = (time.perf_counter() - started_s) / ARENA_STEPS

    def case(self, fidelity: str, count: int) -> dict[str, float]:
        """Check one case, then return its KV GB/s each way and both ways at once."""
        size = self.copier.shard_bytes(CHUNK_BLOCKS, fidelity=fidelity)
        offsets = [self.slots.allocate(size) for _ in range(count)]
        slots = [np.frombuffer(self.view.view, np.uint8, size, at) for at in offsets]
        order = np.random.default_rng(count).permutation(BLOCKS)[: count * CHUNK_BLOCKS]
        chunks = list(order.reshape(count, CHUNK_BLOCKS).astype(np.int64))
        sums = self._check(fidelity, chunks, slots)

        def store() -> None:
            self.copier.store(chunks, slots, fidelity=fidelity, after=None)

        def load() -> None:
            self.copier.load(
                slots, chunks, fidelity=fidelity, is_sealed=lambda *_: True, after=None
            )

        def both() -> None:
            other = threading.Thread(target=store)
            other.start()
            load()
            other.join()

        kv_gb = count * KV_BYTES / 1e9
        figures = {"store": kv_gb / fastest(store), "load": kv_gb / fastest(load)}
        figures["both"] = 2 * kv_gb / fastest(both)
        assert len(sums) == count
        for at in offsets:
            self.slots.free(at, size)
        return figures

    def _check(self, fidelity: str, chunks: list[np.ndarray], slots: list[np.ndarray]) -> list[int]:
        """Store, load and compare; leave the pages as they were."""
        ids = torch.from_numpy(np.concatenate(chunks)).cuda()
        wanted = [each[ids].clone() for each in self.pages]
        sums = self.copier.store(chunks, slots, fidelity=fidelity, after=self.copier.mark())
        assert all(
            total == seal.partial_sum(slot, 0) for total, slot in zip(sums, slots, strict=True)
        ), "a seal differs from the CPU's"
        for each in self.pages:
            each[ids] = float("nan")

        def is_sealed(index: int, total: int) -> bool:
            return total == sums[index]

        # The arena's view can be written through another array; the slots cannot.
        mutable = np.frombuffer(self.view.view, np.uint8)
        at = slots[-1].ctypes.data - mutable.ctypes.data + 4097
        self.view.view[at] ^= 8
        good = self.copier.load(slots, chunks, fidelity=fidelity, is_sealed=is_sealed, after=None)
        assert good == len(chunks) - 1, "a flipped bit was not found"
        self.view.view[at] ^= 8
        good = self.copier.load(slots, chunks, fidelity=fidelity, is_sealed=is_sealed, after=None)
        assert good == len(chunks)
        for each, want in zip(self.pages, wanted, strict=True):
            compare(fidelity, each[ids], want)
            each[ids] = want
        return sums


def compare(fidelity: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise where a load gave back what it must not."""
    if fidelity == EXACT:
        assert torch.equal(got, want), "raw bytes differ"
        return
    value = want.float()
    step = value.abs().amax(-1, keepdim=True) * (1 / 127) * (1 + 2**-7)
    error = (got.float() - value).abs()
    assert bool((error <= 0.5 * step + value.abs() * 2**-8 + 1e-6).all()), "int8 is too far off"
    first = slice(0, got.shape[0], CHUNK_BLOCKS)
    exact = (first, slice(None), slice(0, EXACT_TOKENS))
    assert torch.equal(got[exact], want[exact]), "the first tokens are not exact"


def fastest(action: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return min(times[1:])


def dma_ceilings() -> dict[str, float]:
    """Return GB/s of plain copies between the GPU and pinned memory, each way and both."""
    device = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def out(stream: int = 0) -> None:
        with torch.cuda.stream(streams[stream]):
            host[0].copy_(device[0], non_blocking=True)

    def back(stream: int = 0) -> None:
        with torch.cuda.stream(streams[stream]):
            device[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        out(0)
        back(1)

    size_gb = GIB / 1e9
    return {
        "store": size_gb / fastest(out),
        "load": size_gb / fastest(back),
        "both": 2 * size_gb / fastest(both),
    }


def kernels_alone(bench: Bench) -> dict[str, float]:
    """Return KV GB/s of gathering 64 chunks into staging: with seals, as int8, and by torch."""
    count, copier = 64, bench.copier
    order = np.random.default_rng(1).permutation(BLOCKS)[: count * CHUNK_BLOCKS]
    blocks = torch.from_numpy(order.reshape(count, CHUNK_BLOCKS).astype(np.int64)).cuda()
    sums = torch.zeros(count, dtype=torch.int64, device="cuda")
    kv_gb = count * KV_BYTES / 1e9

    def gather(fidelity: str) -> Callable[[], None]:
        form = copier.forms[fidelity]
        size = form.staging_bytes(CHUNK_BLOCKS)
        staging = torch.empty(size // 4, dtype=torch.int32, device="cuda")

        def run() -> None:
            for piece in form.pieces(count, CHUNK_BLOCKS):
                form.move(piece, staging, blocks=blocks, sums=sums, is_store=True)

        return run

    words = [each.view(BLOCKS, -1).view(torch.int32) for each in bench.pages]
    ids = blocks.reshape(-1)
    target = torch.empty(len(ids), words[0].shape[1], dtype=torch.int32, device="cuda")

    def by_torch() -> None:
        for each in words:
            torch.index_select(each, 0, ids, out=target)

    ways = {"raw, sealed": gather(EXACT), "int8, sealed": gather(INT8), "torch, no seal": by_torch}
    return {name: kv_gb / fastest(run) for name, run in ways.items()}


def beside_a_product(bench: Bench) -> dict[str, float]:
    """Return the percent by which a matrix product is slower while copies run without a pause."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    size = bench.copier.shard_bytes(CHUNK_BLOCKS, fidelity=EXACT)
    slots = [np.frombuffer(bench.view.view, np.uint8, size, index * size) for index in range(16)]
    chunks = list(np.arange(16 * CHUNK_BLOCKS, dtype=np.int64).reshape(16, CHUNK_BLOCKS))

    def products() -> None:
        for _ in range(60):
            torch.matmul(left, left)

    def store() -> None:
        bench.copier.store(chunks, slots, fidelity=EXACT, after=None)

    def load() -> None:
        bench.copier.load(slots, chunks, fidelity=EXACT, is_sealed=lambda *_: True, after=None)

    def timed(copies: Callable[[], None] | None) -> float:
        stop = threading.Event()

        def work() -> None:
            while copies is not None and not stop.is_set():
                copies()

        thread = threading.Thread(target=work)
        thread.start()
        seconds = fastest(products)
        stop.set()
        thread.join()
        return seconds

    rows: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(3):
        alone = timed(None)
        rows["store"].append(timed(store) / alone * 100 - 100)
        rows["load"].append(timed(load) / alone * 100 - 100)
    return {way: sorted(values)[1] for way, values in rows.items()}


def main() -> int:
    """Run everything, print a table, and return 0 if all was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--piece-mib", type=int, default=PIECE_BYTES // MIB, help="of staging")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu needs a CUDA GPU that torch can use; there is none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    ceiling, bench = dma_ceilings(), Bench(arguments.piece_mib * MIB)
    figures: dict[str, object] = {"dma": ceiling, "prepare_s_a_gib": bench.prepare_s}
    print("plain DMA, GB/s: " + ", ".join(f"{way} {rate:.1f}" for way, rate in ceiling.items()))
    print(f"arena faulted and registered in {bench.prepare_s:.2f} s a GiB")
    print("KV GB/s (share of the DMA's rate): int8 moves about half the bytes of its KV")
    for fidelity in (EXACT, INT8):
        bench.copier.warm_up(fidelity=fidelity)
        for count in COUNTS:
            rates = bench.case(fidelity, count)
            figures[f"{fidelity} {count}"] = rates
            cells = [f"{way} {r:6.1f} ({r / ceiling[way]:4.0%})" for way, r in rates.items()]
            print(f"{fidelity:5s} {count:3d} chunks  " + "  ".join(cells), flush=True)
    figures["kernels_alone"] = alone = kernels_alone(bench)
    print("KV GB/s within the GPU, without DMA: " + ", ".join(
        f"{rate:.0f} ({name})" for name, rate in alone.items()
    ))  # fmt: skip
    figures["product_slower_percent"] = slower = beside_a_product(bench)
    print("a matrix product beside raw copies is slower by " + ", ".join(
        f"{percent:.1f} % ({way})" for way, percent in slower.items()
    ))  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
