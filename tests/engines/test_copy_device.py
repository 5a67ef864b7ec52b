"""Pages of a CUDA device against the same slices on the host; skipped where there is none.

What does not need a device is in `interpreted_copy_gpu`, which `make test-gpu` runs there as well.
"""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from kvcellar.engines.copy import open_copier
from kvcellar.engines.copy_gpu import GpuCopier
from kvcellar.engines.pages import NOT_WRITTEN, PageRun
from kvcellar.layout.shard import EXACT
from kvcellar.memory import seal
from kvcellar.memory.arena import Arena, ArenaView
from kvcellar.units import MIB

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY = bytes(range(32))
PAGES = (4096, 192, 1000)
BLOCKS = 9


@pytest.fixture(params=[False, True], ids=["layer by layer", "packed"])
def pages(request):
    """One storage on the device, its runs, and where each page is."""
    packed, block_bytes = request.param, sum(PAGES)
    storage = torch.randint(0, 256, (BLOCKS * block_bytes,), dtype=torch.uint8, device="cuda")
    runs, before = [], 0
    for index, size in enumerate(PAGES):
        offset, stride = (before, block_bytes) if packed else (before * BLOCKS, size)
        runs.append(
            PageRun(
                (f"l{index}",), storage.untyped_storage(), "cuda:0", offset, stride, size, BLOCKS
            )
        )
        before += size
    return storage, runs


def spans(run, block):
    start = run.offset_bytes + block * run.stride_bytes
    return slice(start, start + run.page_bytes)


def shard(storage, runs, blocks):
    whole = storage.cpu().numpy().tobytes()
    return b"".join(whole[spans(run, block)] for run in runs for block in blocks)


def slot_of(data):
    return np.frombuffer(bytearray(data), dtype=np.uint8)


def test_a_store_gathers_the_pages_in_order_and_sums_them(pages):
    storage, runs = pages
    blocks, copier = np.array([7, 0, 4]), open_copier(runs)
    assert isinstance(copier, GpuCopier)
    expected = shard(storage, runs, blocks)
    slot = slot_of(bytes(len(expected)))
    (partial,) = copier.store([blocks], [slot], fidelity=EXACT, after=copier.mark())
    assert bytes(slot) == expected
    assert seal.finish(partial, KEY, 0, len(expected)) == seal.seal(expected, KEY, 0)


def test_a_store_waits_for_what_the_step_had_launched(pages):
    storage, runs = pages
    copier, blocks = open_copier(runs), np.arange(BLOCKS)
    slot = slot_of(bytes(BLOCKS * sum(PAGES)))
    heavy = torch.randn(8192, 8192, device="cuda")
    # The first use of a kernel loads it, which waits for the device.
    heavy = heavy @ heavy * 1e-4
    storage.fill_(3)
    torch.cuda.synchronize()
    for _ in range(20):
        heavy = heavy @ heavy * 1e-4
    storage.fill_(7)  # Launched behind a second of work, not yet done.
    assert not torch.cuda.current_stream().query(), "the test shows nothing on such a device"
    copier.store([blocks], [slot], fidelity=EXACT, after=copier.mark())
    assert bytes(slot) == b"\x07" * slot.size


def test_a_load_fills_the_wanted_blocks_and_touches_nothing_else(pages):
    storage, runs = pages
    copier, blocks = open_copier(runs), np.array([NOT_WRITTEN, 8, 2])
    data = np.random.default_rng(1).integers(0, 256, 3 * sum(PAGES), dtype=np.uint8).tobytes()
    expected, position = bytearray(storage.cpu().numpy().tobytes()), 0
    for run in runs:
        for block in blocks:
            if block != NOT_WRITTEN:
                expected[spans(run, block)] = data[position : position + run.page_bytes]
            position += run.page_bytes
    wanted = seal.seal(data, KEY, 0)
    good = copier.load(
        [slot_of(data)],
        [blocks],
        fidelity=EXACT,
        is_sealed=lambda _, value: seal.finish(value, KEY, 0, len(data)) == wanted,
        after=copier.mark(),
    )
    assert good == 1
    # The load is complete when it returns, on every stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        assert storage.cpu().numpy().tobytes() == bytes(expected)


def test_a_load_whose_seal_is_wrong_leaves_zeros(pages):
    storage, runs = pages
    copier, before = open_copier(runs), storage.clone()
    slot = slot_of(b"\xff" * 2 * sum(PAGES))
    good = copier.load(
        [slot],
        [np.array([3, 4])],
        fidelity=EXACT,
        is_sealed=lambda *_: False,
        after=copier.mark(),
    )
    assert good == 0
    assert not any(shard(storage, runs, [3, 4]))
    others = [block for block in range(BLOCKS) if block not in {3, 4}]
    assert shard(storage, runs, others) == shard(before, runs, others)


def test_a_block_that_does_not_exist_is_an_error(pages):
    _, runs = pages
    copier, slot = open_copier(runs), slot_of(bytes(sum(PAGES)))
    with pytest.raises(IndexError):
        copier.store([np.array([BLOCKS])], [slot], fidelity=EXACT, after=copier.mark())


def test_copies_made_in_another_thread_under_inference_mode_are_right(pages):
    storage, runs = pages
    with torch.inference_mode():
        copier = open_copier(runs)
        mark = copier.mark()
    slot, failures = slot_of(bytes(2 * sum(PAGES))), []

    def work():
        try:
            copier.store([np.array([1, 2])], [slot], fidelity=EXACT, after=mark)
            copier.load(
                [slot],
                [np.array([5, 6])],
                fidelity=EXACT,
                is_sealed=lambda *_: True,
                after=mark,
            )
        except Exception as error:  # noqa: BLE001 -- handed to the test's thread.
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert failures == []
    assert shard(storage, runs, [5, 6]) == shard(storage, runs, [1, 2])


LAYERS, PAGE, POOL_BLOCKS, CHUNK_BLOCKS = 8, 16_384, 1200, 16


def layered(storage):
    """Each layer's pages after those of the layer before; K and V together in a page."""
    return [
        PageRun((f"l{i}",), storage, "cuda:0", i * POOL_BLOCKS * PAGE, PAGE, PAGE, POOL_BLOCKS)
        for i in range(LAYERS)
    ]


def keys_apart(storage):
    """Half a page of keys in one run, half a page of values in another."""
    half = PAGE // 2
    return [
        PageRun((f"l{i}",), storage, "cuda:0", i * POOL_BLOCKS * half, half, half, POOL_BLOCKS)
        for i in range(2 * LAYERS)
    ]


def packed(storage):
    """All layers of a block together, in one run."""
    size = LAYERS * PAGE
    return [PageRun(("all",), storage, "cuda:0", 0, size, size, POOL_BLOCKS)]


def interleaved(storage):
    """Each block has all layers' pages, and each layer is a run that steps over the others."""
    return [
        PageRun((f"l{i}",), storage, "cuda:0", i * PAGE, LAYERS * PAGE, PAGE, POOL_BLOCKS)
        for i in range(LAYERS)
    ]


@pytest.mark.parametrize("make_runs", [layered, keys_apart, packed, interleaved])
@pytest.mark.parametrize("is_registered", [True, False])
def test_random_kv_that_left_the_device_comes_back_byte_for_byte(make_runs, is_registered):
    """Any number of chunks goes to an arena, the pages are overwritten, and all of it is loaded."""
    pool = torch.randint(0, 256, (POOL_BLOCKS * LAYERS * PAGE,), dtype=torch.uint8, device="cuda")
    runs = make_runs(pool.untyped_storage())
    copier = open_copier(runs)
    size = copier.shard_bytes(CHUNK_BLOCKS, fidelity=EXACT)
    arena_bytes = 160 * MIB
    source = np.random.default_rng(3)
    with closing(Arena.create(arena_bytes, arena_bytes)) as arena:
        arena.grow_step(0)
        with closing(ArenaView(arena.fd, arena_bytes)) as view:
            if is_registered:
                copier.adopt(view, start=0, stop=arena_bytes)
            for count in (1, 2, 3, 7, 8, 16, 33, 64):
                order = source.permutation(POOL_BLOCKS)[: count * CHUNK_BLOCKS].astype(np.int64)
                places = source.permutation(arena_bytes // size)[:count] * size
                there_and_back(
                    copier,
                    pool,
                    runs,
                    chunks=list(order.reshape(count, CHUNK_BLOCKS)),
                    slots=[np.frombuffer(view.view, np.uint8, size, at) for at in places],
                )
            copier.disown(view)


def there_and_back(copier, pool, runs, *, chunks, slots):
    """Store chunks, overwrite their pages but for some, and load those."""
    before = pool.clone()
    sums = copier.store(chunks, slots, fidelity=EXACT, after=copier.mark())
    assert sums == [seal.partial_sum(slot, 0) for slot in slots]
    targets = [chunk.copy() for chunk in chunks]
    targets[0][: CHUNK_BLOCKS // 2] = NOT_WRITTEN
    wanted = np.concatenate(targets)
    ids = torch.from_numpy(wanted[wanted >= 0]).to(pool.device)
    for run in runs:
        pages = pool.as_strided(
            (run.block_count, run.page_bytes), (run.stride_bytes, 1), run.offset_bytes
        )
        pages[ids] = 0xA5
    assert not torch.equal(pool, before)
    good = copier.load(
        slots,
        targets,
        fidelity=EXACT,
        is_sealed=lambda index, total: total == sums[index],
        after=copier.mark(),
    )
    assert good == len(chunks)
    assert torch.equal(pool, before)
