"""The accelerator's copier against plain slices: on a GPU, or under Triton's interpreter.

Triton decides when it is imported whether it interprets, so `test_copy_gpu` runs this file in a
process of its own, on host memory. `make test-gpu` runs it with compiled kernels on a GPU. What an
interpreter cannot show, such as streams that overlap, is in `test_copy_device`.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engines.copy_gpu import open_gpu_copier
from kvcellar.engines.pages import NOT_WRITTEN, PageRun
from kvcellar.errors import UnsupportedModelError
from kvcellar.layout.shard import EXACT, EXACT_TOKENS, INT8, PageRegion, ShardLayout, Vectors
from kvcellar.memory import seal

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
EXAMPLES = 6 if DEVICE == "cpu" else 12
"""Each size of page is a kernel of its own, which a GPU's compiler takes a second for."""


class Engine:
    """Runs of random pages, and what should be in a slot."""

    def __init__(self, page_sizes, *, block_count, gap, seed):
        rng = np.random.default_rng(seed)
        self.runs = []
        self.matrices = []
        for index, page in enumerate(page_sizes):
            stride = page + gap
            random = rng.integers(0, 256, block_count * stride, dtype=np.uint8)
            memory = torch.from_numpy(random).to(DEVICE)
            self.matrices.append(memory.view(block_count, stride)[:, :page])
            storage = memory.untyped_storage()
            run = PageRun((f"layer.{index}",), storage, DEVICE, 0, stride, page, block_count)
            self.runs.append(run)
        self.order = rng.permutation(block_count)
        self.block_bytes = sum(page_sizes)

    def chunks(self, count, width):
        return list(self.order[: count * width].reshape(count, width).astype(np.int64))

    def slot_of(self, blocks):
        ids = torch.from_numpy(blocks).to(DEVICE)
        return np.concatenate([pages[ids].cpu().numpy().reshape(-1) for pages in self.matrices])


pages = st.integers(1, 3000).map(lambda words: words * 4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    page_sizes=st.one_of(
        st.tuples(st.integers(1, 3), st.sampled_from([4096, 8192, 1152 * 4])).map(
            lambda pair: [pair[1]] * pair[0]
        ),
        st.lists(pages, min_size=1, max_size=4),
    ),
    count=st.integers(1, 3),
    width=st.integers(1, 3),
    gap=st.sampled_from([0, 64, 4096]),
    pieces=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_any_strided_run_of_pages_goes_there_and_back(page_sizes, count, width, gap, pieces, seed):
    engine = Engine(page_sizes, block_count=10, gap=gap, seed=seed)
    chunks = engine.chunks(count, width)
    wanted = [engine.slot_of(blocks) for blocks in chunks]
    copier = open_gpu_copier(engine.runs, piece_bytes=pieces * max(page_sizes))
    slots = [np.zeros(width * engine.block_bytes, np.uint8) for _ in chunks]

    sums = copier.store(chunks, slots, fidelity=EXACT, after=copier.mark())

    for slot, want, total in zip(slots, wanted, sums, strict=True):
        assert np.array_equal(slot, want)
        assert total == seal.partial_sum(want, 0)
    for matrix in engine.matrices:
        matrix[:] = 0
    targets = [blocks.copy() for blocks in chunks]
    targets[0][0] = NOT_WRITTEN
    good = copier.load(
        slots, targets, is_sealed=lambda i, value: value == sums[i], fidelity=EXACT, after=None
    )
    assert good == count
    held_back = chunks[0][0]
    assert not any(bool(matrix[held_back].any()) for matrix in engine.matrices)
    for matrix in engine.matrices:
        matrix[held_back] = 7
    copier.load(
        slots[:1],
        chunks[:1],
        is_sealed=lambda i, value: value == sums[i],
        fidelity=EXACT,
        after=None,
    )
    assert [bytes(engine.slot_of(blocks)) for blocks in chunks] == [bytes(want) for want in wanted]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_pages_of_a_damaged_chunk_and_of_those_behind_it_are_zero(damaged):
    engine = Engine([4096, 4096], block_count=8, gap=0, seed=1)
    chunks = engine.chunks(3, 2)
    copier = open_gpu_copier(engine.runs, piece_bytes=8192)
    slots = [np.zeros(2 * engine.block_bytes, np.uint8) for _ in chunks]
    sums = copier.store(chunks, slots, fidelity=EXACT, after=None)
    wanted = [engine.slot_of(blocks) for blocks in chunks]
    slots[damaged][5000] ^= 16

    good = copier.load(
        slots, chunks, is_sealed=lambda i, value: value == sums[i], fidelity=EXACT, after=None
    )

    assert good == damaged
    for index, blocks in enumerate(chunks):
        got = engine.slot_of(blocks)
        assert np.array_equal(got, wanted[index]) if index < damaged else not got.any()


def test_copiers_beside_one_another_share_staging_and_each_moves_its_own_pages():
    """As for the KV groups of a model: one after the other in each direction, of any sizes."""
    engines = [Engine([4096] * count, block_count=8, gap=0, seed=count) for count in (1, 3)]
    first = open_gpu_copier(engines[0].runs, piece_bytes=4096)
    copiers = [first, open_gpu_copier(engines[1].runs, piece_bytes=4096, beside=first)]
    assert copiers[1]._store_side is first._store_side
    kept = []
    for engine, copier in zip(engines, copiers, strict=True):
        chunks = engine.chunks(3, 2)
        slots = [np.zeros(2 * engine.block_bytes, np.uint8) for _ in chunks]
        sums = copier.store(chunks, slots, fidelity=EXACT, after=None)
        kept.append((chunks, slots, sums, [engine.slot_of(blocks) for blocks in chunks]))
    for engine, copier, (chunks, slots, sums, wanted) in zip(engines, copiers, kept, strict=True):
        good = copier.load(
            slots, chunks[::-1], is_sealed=lambda i, value, s=sums: value == s[i],
            fidelity=EXACT, after=None,
        )  # fmt: skip
        assert good == 3
        for blocks, want, slot in zip(chunks[::-1], wanted, slots, strict=True):
            assert np.array_equal(engine.slot_of(blocks), want)
            assert np.array_equal(slot, want)


def test_a_block_that_does_not_exist_is_an_error_before_anything_is_copied():
    engine = Engine([4096], block_count=4, gap=0, seed=1)
    copier = open_gpu_copier(engine.runs)
    slot = np.zeros(4096, np.uint8)
    with pytest.raises(IndexError, match="block ids 4 to 4 of 4 blocks"):
        copier.store([np.array([4], np.int64)], [slot], fidelity=EXACT, after=None)
    assert not slot.any()


def test_pages_that_are_no_whole_words_are_refused():
    engine = Engine([4098], block_count=4, gap=2, seed=1)
    with pytest.raises(UnsupportedModelError, match=r"layer\.0: its pages are no whole words"):
        open_gpu_copier(engine.runs)


class Heads:
    """Layers of real numbers in one of vLLM's page orders, and int8 as numpy computes it."""

    def __init__(self, order, *, dtype, blocks, tokens, heads, elements, layers, seed):
        sizes = {"k": 2, "t": tokens, "h": heads}
        self.tokens, self.elements = tokens, elements
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        shape = [blocks, *(sizes[axis] for axis in order), elements]
        self.memory = [
            (torch.randn(shape, generator=generator) * 3).to(dtype).contiguous().to(DEVICE)
            for _ in range(layers)
        ]
        self.memory[0][0, 0, 0, 0] = 0  # A vector of zeros has no scale.
        page = 2 * tokens * heads * elements * 2
        inner = int(np.prod([sizes[axis] for axis in order[order.index("t") + 1 :]], initial=1))
        self.vectors = Vectors(
            str(dtype).removeprefix("torch."), elements, inner, 2 * tokens * heads
        )
        self.runs = [
            PageRun((f"l{i}",), each.untyped_storage(), DEVICE, 0, page, page, blocks)
            for i, each in enumerate(self.memory)
        ]
        self.token_of = np.arange(self.vectors.count) // inner % tokens
        self.layout = ShardLayout(
            0, tokens, tuple(PageRegion(run.names[0], page) for run in self.runs), "t", self.vectors
        )

    def pages(self, layer, blocks):
        ids = torch.from_numpy(blocks).to(DEVICE)
        return self.memory[layer][ids].reshape(len(blocks), -1, self.elements).cpu()

    def encode(self, blocks):
        codes, scales, exact = [], [], []
        for layer in range(len(self.memory)):
            own = self.pages(layer, blocks)
            value = own.float().numpy()
            largest = np.abs(value).max(axis=2) * np.float32(1 / 127)
            bits = (largest.view(np.int32) + 0xFFFF) >> 16
            scale = (bits << 16).view(np.float32)
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
            code = np.clip(np.floor(value * inverse[..., None] + np.float32(0.5)), -127, 127)
            codes.append(code.astype(np.int8).tobytes())
            scales.append(bits.astype(np.int16).tobytes())
            exact.append(own[0].view(torch.int16).numpy()[self.token_of < EXACT_TOKENS].tobytes())
        return b"".join([*codes, *scales, *exact])

    def code_bytes(self, blocks):
        return len(self.memory) * len(blocks) * self.vectors.count * self.elements

    def decoded(self, blocks):
        """What a load gives: near the original, and the first tokens as they were."""
        out = []
        for layer in range(len(self.memory)):
            value = self.pages(layer, blocks).float().numpy()
            largest = np.abs(value).max(axis=2, keepdims=True)
            out.append((value, largest / 127 * 0.51 + np.abs(value) * 0.01))
        return out


def assert_int8(slot, want, code_bytes):
    """Check an encoded shard; a GPU fuses a product with a sum, so ties may go the other way."""
    assert np.array_equal(slot[code_bytes:], want[code_bytes:])
    apart = slot[:code_bytes].view(np.int8).astype(np.int16) - want[:code_bytes].view(np.int8)
    assert np.abs(apart).max() <= (DEVICE != "cpu")
    assert np.count_nonzero(apart) <= code_bytes / 1000


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    order=st.sampled_from(["kth", "kht", "htk", "thk"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    tokens=st.sampled_from([2, 8, 16]),
    heads=st.integers(1, 3),
    elements=st.sampled_from([32, 64, 96]),
    layers=st.integers(1, 3),
    count=st.integers(1, 3),
    width=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_int8_is_what_numpy_computes_and_comes_back_near(  # noqa: PLR0917 - drawn one by one
    order, dtype, tokens, heads, elements, layers, count, width, seed
):
    sizes = {"blocks": 10, "tokens": tokens, "heads": heads, "elements": elements}
    engine = Heads(order, dtype=dtype, layers=layers, seed=seed, **sizes)
    order_of_blocks = np.random.default_rng(seed).permutation(10)[: count * width]
    chunks = list(order_of_blocks.reshape(count, width).astype(np.int64))
    copier = open_gpu_copier(
        engine.runs, vectors=engine.vectors, block_tokens=tokens, piece_bytes=1
    )
    size = copier.shard_bytes(width, fidelity=INT8)
    assert size == engine.layout.shard_bytes(width, fidelity=INT8)
    slots = [np.zeros(size, np.uint8) for _ in chunks]

    sums = copier.store(chunks, slots, fidelity=INT8, after=None)

    for blocks, slot, total in zip(chunks, slots, sums, strict=True):
        assert_int8(slot, np.frombuffer(engine.encode(blocks), np.uint8), engine.code_bytes(blocks))
        assert total == seal.partial_sum(slot, 0)
    wanted = [engine.decoded(blocks) for blocks in chunks]
    firsts = [[engine.pages(i, blocks)[0].clone() for i in range(layers)] for blocks in chunks]
    for each in engine.memory:
        each.fill_(float("nan"))
    good = copier.load(
        slots, chunks, fidelity=INT8, is_sealed=lambda i, value: value == sums[i], after=None
    )
    assert good == count
    is_exact = engine.token_of < EXACT_TOKENS
    for blocks, want, first in zip(chunks, wanted, firsts, strict=True):
        for layer in range(layers):
            value, bound = want[layer]
            got = engine.pages(layer, blocks)
            assert (np.abs(got.float().numpy() - value) <= bound + 1e-6).all()
            assert torch.equal(got[0][is_exact], first[layer][is_exact])


def test_a_load_of_int8_leaves_blocks_alone_that_it_must_not_write():
    engine = Heads(
        "kth", dtype=torch.bfloat16, blocks=4, tokens=4, heads=1, elements=32, layers=1, seed=0
    )
    copier = open_gpu_copier(engine.runs, vectors=engine.vectors, block_tokens=4)
    chunk = np.array([1, 2], np.int64)
    slot = np.zeros(copier.shard_bytes(2, fidelity=INT8), np.uint8)
    copier.store([chunk], [slot], fidelity=INT8, after=None)
    engine.memory[0].fill_(7)
    target = np.array([NOT_WRITTEN, 3], np.int64)
    copier.load([slot], [target], fidelity=INT8, is_sealed=lambda *_: True, after=None)
    assert (engine.memory[0][:3] == 7).all()
    assert (engine.memory[0][3] != 7).any()
