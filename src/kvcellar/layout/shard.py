"""The layout of one rank's part of a chunk, and its fingerprint.

A shard's bytes are the pages of the chunk's blocks, region after region: for each region (one
layer's pages, or one packed run of all layers) the pages of the chunk's blocks in token order.
Whatever decides what those bytes mean goes into the fingerprint, and the fingerprints of all
ranks go into the namespace: a reader never sees bytes that lie otherwise than it believes. Made
by the connector's worker half at registration, carried to the server in the hello. Pure.
"""

import msgspec
from blake3 import blake3

__all__ = ["PageRegion", "ShardLayout"]


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
    """

    rank: int
    block_tokens: int
    regions: tuple[PageRegion, ...]
    format: str

    def block_bytes(self) -> int:
        """Return the bytes of one block over all regions."""
        return sum(region.page_bytes for region in self.regions)

    def shard_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of a chunk's shard; `chunk_tokens` is a multiple of `block_tokens`."""
        assert chunk_tokens % self.block_tokens == 0, (chunk_tokens, self.block_tokens)
        return self.block_bytes() * (chunk_tokens // self.block_tokens)

    def fingerprint(self) -> bytes:
        """Return 32 bytes that are the same exactly for equal layouts, everywhere and always."""
        return blake3(b"kvcellar-layout-1\x00" + msgspec.msgpack.encode(self)).digest()
