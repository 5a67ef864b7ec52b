"""Triton kernels of the int8 form: half the bytes of bf16 or fp16 pages cross the link.

A vector (one token, one head, K or V) becomes one byte an element and a scale: the largest
magnitude over 127, rounded up to bfloat16, so that no element is cut off. A shard is: all bytes,
page after page; all scales; then the leading tokens of the chunk in their own dtype, because
attention leans on the first ones. The seal is that of the encoded bytes and is summed over staging
by a kernel of its own, from the cache that the encoder has just filled. Driven by `forms`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcellar.engines.kernels import LANES, ROWS_AT_ONCE, SLICE_ROWS, RunGroup, SealTables
from kvcellar.layout.shard import EXACT_TOKENS, Vectors
from kvcellar.memory import seal

__all__ = ["VECTORS_AT_ONCE", "Int8Shape", "move_chunks", "sum_shards"]

VECTORS_AT_ONCE = 32
"""Vectors of a program; a power of two. It changes no byte."""
_WARPS = 4


@dataclass(frozen=True)
class Int8Shape:
    """Where things lie in an encoded shard of one run group.

    Attributes:
        vectors: how a page divides.
        block_tokens: tokens a block.
        chunk_blocks: blocks a chunk.
        run_count: runs of the group.
    """

    vectors: Vectors
    block_tokens: int
    chunk_blocks: int
    run_count: int

    @property
    def page_count(self) -> int:
        """Return the pages of a shard."""
        return self.run_count * self.chunk_blocks

    @property
    def scales_at(self) -> int:
        """Return the byte at which the scales begin."""
        return self.page_count * self.vectors.count * self.vectors.elements

    @property
    def exact_at(self) -> int:
        """Return the byte at which the exact tokens begin."""
        return self.scales_at + self.page_count * self.vectors.count * 2

    @property
    def exact_vectors(self) -> int:
        """Return the exact vectors of a page."""
        return self.vectors.exact_count(self.block_tokens)

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of an encoded shard."""
        return self.exact_at + self.run_count * self.exact_vectors * self.vectors.elements * 2


def move_chunks(
    group: RunGroup,
    staging: torch.Tensor,
    *,
    blocks: torch.Tensor,
    shape: Int8Shape,
    is_store: bool,
) -> None:
    """Launch the encoding (or decoding) of whole chunks on the current stream; does not wait.

    Args:
        group: the one group of all runs.
        staging: uint8, contiguous; shard after shard.
        blocks: int64, shape [chunks, blocks a chunk], on the device; negative: not to be written.
        shape: see `Int8Shape`.
        is_store: pages to staging, else staging to pages.
    """
    vectors = shape.vectors
    slices = -(-vectors.count // VECTORS_AT_ONCE)
    _code[(blocks.shape[0] * shape.page_count * slices,)](
        group.bases,
        group.strides,
        blocks,
        staging,
        shape.shard_bytes,
        shape.scales_at,
        shape.exact_at,
        shape.exact_vectors,
        shape.chunk_blocks,
        shape.page_count,
        vectors.inner,
        shape.block_tokens,
        COUNT=vectors.count,
        ELEMENTS=vectors.elements,
        WIDTH=triton.next_power_of_2(vectors.elements),
        AT_ONCE=VECTORS_AT_ONCE,
        EXACT=min(EXACT_TOKENS, shape.block_tokens),
        IS_BF16=vectors.dtype == "bfloat16",
        IS_STORE=is_store,
        num_warps=_WARPS,
    )


def sum_shards(
    staging: torch.Tensor, *, shard_bytes: int, sums: torch.Tensor, tables: SealTables
) -> None:
    """Launch the seals' sums over shards that lie one after the other in staging.

    Args:
        staging: int32, contiguous.
        shard_bytes: of one shard, whole words.
        sums: int64, one a shard, to which each shard's sum is added.
        tables: the seal's weights.
    """
    words = shard_bytes // seal.WORD_BYTES
    slices = -(-words // (SLICE_ROWS * LANES))
    _sum[(sums.numel() * slices,)](
        staging,
        sums,
        tables.lanes,
        tables.rows,
        words,
        slices,
        SLICE_ROWS=SLICE_ROWS,
        ROWS=ROWS_AT_ONCE,
        LANES=LANES,
        num_warps=8,
    )


# fmt: off
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["exact_vectors", "chunk_blocks", "chunk_pages", "inner", "block_tokens"]
)
def _code(  # type: ignore[no-untyped-def]
    bases, strides, blocks, staging, shard_bytes, scales_at, exact_at, exact_vectors,
    chunk_blocks, chunk_pages, inner, block_tokens,
    COUNT: tl.constexpr, ELEMENTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    EXACT: tl.constexpr, IS_BF16: tl.constexpr, IS_STORE: tl.constexpr,
):
    # fmt: on
    slices = (COUNT + AT_ONCE - 1) // AT_ONCE
    page_index = tl.program_id(0) // slices
    place = page_index % chunk_pages
    run = place // chunk_blocks
    position = place % chunk_blocks
    chunk = page_index // chunk_pages
    block = tl.load(blocks + chunk * chunk_blocks + position)
    address = tl.load(bases + run) + tl.maximum(block, 0) * tl.load(strides + run)
    page = address.to(tl.pointer_type(tl.bfloat16 if IS_BF16 else tl.float16))
    shard = staging + chunk.to(tl.int64) * shard_bytes
    vector = (tl.program_id(0) % slices) * AT_ONCE + tl.arange(0, AT_ONCE)
    element = tl.arange(0, WIDTH)
    is_inside = (vector < COUNT)[:, None] & (element < ELEMENTS)[None, :]
    token = (vector // inner) % block_tokens
    nth = (vector // (inner * block_tokens)) * (inner * EXACT) + token * inner + vector % inner
    is_exact = is_inside & (token < tl.where(position == 0, EXACT, 0))[:, None]
    in_page = vector[:, None] * ELEMENTS + element[None, :]
    codes = shard + place.to(tl.int64) * (COUNT * ELEMENTS) + in_page
    scales = (shard + scales_at + place.to(tl.int64) * (COUNT * 2)).to(tl.pointer_type(tl.int16))
    kept = shard + exact_at + run.to(tl.int64) * exact_vectors * (ELEMENTS * 2)
    kept = kept.to(tl.pointer_type(tl.int16)) + nth[:, None] * ELEMENTS + element[None, :]
    if IS_STORE:
        own = tl.load(page + in_page, mask=is_inside, other=0.0)
        code, bits = _encode(own.to(tl.float32))
        tl.store(codes, code, mask=is_inside)
        tl.store(scales + vector, bits.to(tl.int16), mask=vector < COUNT)
        tl.store(kept, own.to(tl.int16, bitcast=True), mask=is_exact)
    else:
        bits = tl.load(scales + vector, mask=vector < COUNT, other=0).to(tl.int32) & 0xFFFF
        value = _decode(tl.load(codes, mask=is_inside, other=0), bits)
        dtype = tl.bfloat16 if IS_BF16 else tl.float16
        exact = tl.load(kept, mask=is_exact, other=0).to(dtype, bitcast=True)
        value = tl.where(is_exact, exact, value.to(dtype))
        written = tl.where(block >= 0, COUNT * ELEMENTS, 0)
        tl.store(page + in_page, value, mask=is_inside & (in_page < written))


@triton.jit
def _encode(value):  # type: ignore[no-untyped-def]
    """Return each vector's codes as bytes, and the bits of its scale as a bfloat16."""
    largest = tl.max(tl.abs(value), axis=1) * (1.0 / 127.0)
    # Rounded up, so that the largest element's code is 127 at most.
    bits = (largest.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = (bits << 16).to(tl.float32, bitcast=True)
    has_scale = scale > 0
    inverse = tl.where(has_scale, 1.0 / tl.where(has_scale, scale, 1.0), 0.0)
    code = tl.floor(value * inverse[:, None] + 0.5)
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    return code.to(tl.int8).to(tl.uint8, bitcast=True), bits


@triton.jit
def _decode(code, bits):  # type: ignore[no-untyped-def]
    """Return the values of vectors from their codes' bytes and their scales' bits."""
    scale = (bits << 16).to(tl.float32, bitcast=True)
    return code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]


@triton.jit(do_not_specialize=["words", "slices"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    staging,
    sums,
    lane_weights,
    row_weights,
    words,
    slices,
    SLICE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    index = tl.program_id(0)
    shard = index // slices
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    base = staging + shard.to(tl.int64) * words
    by_lane = tl.zeros([ROWS, LANES], dtype=tl.int64)
    for step in range(0, SLICE_ROWS, ROWS):
        rows = (index % slices) * SLICE_ROWS + step + row
        word = rows[:, None] * LANES + lane[None, :]
        value = tl.load(base + word, mask=word < words, other=0).to(tl.int64) & 0xFFFFFFFF
        weight = tl.load(row_weights + rows, mask=rows * LANES < words, other=0)
        by_lane += value * weight[:, None]
    totals = tl.sum(by_lane, axis=0) * tl.load(lane_weights + lane)
    tl.atomic_add(sums + shard, tl.sum(totals, axis=0), sem="relaxed")
