"""The layout of one rank's part of a chunk, and its fingerprint.

A shard's bytes are the pages of the chunk's blocks, region after region: for each region (one
layer's pages, or one packed run of all layers) the pages of the chunk's blocks in token order.
Whatever decides what those bytes mean goes into the fingerprint, and the fingerprints of all
ranks go into the namespace: a reader never sees bytes that lie otherwise than it believes. Made
by the connector's worker half at registration, carried to the server in the hello. Pure.
"""

import msgspec
from blake3 import blake3

__all__ = ["EXACT", "EXACT_TOKENS", "INT8", "PageRegion", "ShardLayout", "Vectors"]

EXACT = "exact"
"""Fidelity: what was stored comes back bit for bit."""
INT8 = "int8"
"""Fidelity: chunks may come back as eight-bit integers with a scale for each token and head."""

EXACT_TOKENS = 4
"""Leading tokens of each chunk that int8 keeps exact: those of a sequence are the ones on which
attention leans most, and knowing which chunk is the first would buy 3 % of the bytes."""
_SCALE_BYTES = 2


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """How a page divides into the vectors of one token and head, for codecs with a scale for each.

    Attributes:
        dtype: "bfloat16" or "float16".
        elements: of a vector; they lie together.
        inner: vectors from one token to the next in memory.
        count: vectors of a page.
    """

    dtype: str
    elements: int
    inner: int
    count: int

    def exact_count(self, block_tokens: int) -> int:
        """Return the vectors of a chunk's first page that belong to its exact tokens."""
        return self.count * min(EXACT_TOKENS, block_tokens) // block_tokens


class PageRegion(msgspec.Struct, frozen=True, array_like=True):
    """One strided run of pages in the engine's memory, as the fingerprint sees it.

    Attributes:
        name: the first layer's name that lives there.
        page_bytes: bytes of one block's page.
    """

    name: str
    page_bytes: int


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """What one rank stores for a chunk.

    Attributes:
        rank: the rank's index in its instance, from 0.
        block_tokens: tokens a block (of the engine).
        regions: in the order in which the shard's bytes lie.
        format: everything else that the bytes depend on, as text: dtype, page shape and strides,
            attention backend, vLLM's layout generation, instruction set on a CPU.
        vectors: of every page, where all are alike and known; None where only the raw form works.
        shared_as: the shard of a chunk that this rank holds as other ranks do, byte for byte (MLA
            keeps one latent for all heads); None for a shard of its own, numbered as the rank.
    """

    rank: int
    block_tokens: int
    regions: tuple[PageRegion, ...]
    format: str
    vectors: Vectors | None = None
    shared_as: int | None = None

    def shard(self) -> int:
        """Return which shard of a chunk this rank holds."""
        return self.rank if self.shared_as is None else self.shared_as

    def block_bytes(self) -> int:
        """Return the bytes of one block over all regions."""
        return sum(region.page_bytes for region in self.regions)

    def can_keep(self, fidelity: str) -> bool:
        """Return whether shards of this layout can be kept in the form that `fidelity` names."""
        return fidelity == EXACT or (fidelity == INT8 and self.vectors is not None)

    def shard_bytes(self, block_count: int, *, fidelity: str = EXACT) -> int:
        """Return the bytes of the shard of a chunk of which so many blocks are kept.

        In int8 that is one byte an element, a scale of two bytes a vector, and the exact tokens'
        own bytes.

        Args:
            block_count: blocks; the exact tokens are those of the first.
            fidelity: one that `can_keep` allows.
        """
        assert self.can_keep(fidelity), fidelity
        vectors = self.vectors
        if fidelity == EXACT or vectors is None:
            return self.block_bytes() * block_count
        pages = len(self.regions) * block_count
        exact = len(self.regions) * vectors.exact_count(self.block_tokens) * vectors.elements * 2
        return pages * vectors.count * (vectors.elements + _SCALE_BYTES) + exact

    def fingerprint(self) -> bytes:
        """Return 32 bytes that are the same exactly for equal layouts, everywhere and always.

        Who else holds the same bytes does not change what they mean, and is not in it.
        """
        fields = (self.rank, self.block_tokens, self.regions, self.format, self.vectors)
        return blake3(b"kvcellar-layout-1\x00" + msgspec.msgpack.encode(fields)).digest()
