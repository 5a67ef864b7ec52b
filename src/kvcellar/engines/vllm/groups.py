"""What each of a model's KV groups keeps of a chunk, and what a hit needs of it.

vLLM gives layers that keep their KV differently a KV group each, with block tables of its own. A
group with a window frees blocks while its request runs, so of a chunk it can only keep what the
chunk's end still needs; a hit needs all chunks of one group and the last few of another. This is
the arithmetic of that, once, for stores, loads and lookups. Made by `support` from vLLM's groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.errors import UnsupportedModelError
from kvcellar.keys.groups import group_keys

__all__ = ["ChunkGroup", "KVGroup", "block_multiple", "choose_chunk_tokens", "cut_chunks"]


@dataclass(frozen=True)
class KVGroup:
    """One of vLLM's KV groups.

    Attributes:
        index: its place among vLLM's groups, and of its block table in a request's.
        block_tokens: tokens a block.
        window: tokens that a token sees, itself included; 0: all before it, or see `local`.
        local: tokens of a span of local attention, of which a token sees those before it; 0: none.
    """

    index: int
    block_tokens: int
    window: int = 0
    local: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether every token before an end is needed there."""
        return not self.window and not self.local

    def kept_from(self, token_count: int) -> int:
        """Return the first token of so many whose KV the next token needs.

        Blocks that end at or before it are vLLM's to give away once these tokens are computed.
        """
        if self.window:
            return max(0, token_count - self.window + 1)
        return token_count // self.local * self.local if self.local else 0

    def describe(self) -> str:
        """Return it as text for the engine's digest."""
        kind = f"window {self.window}" if self.window else f"local {self.local}"
        return f"{self.block_tokens} {'all' if self.is_whole else kind}"


@dataclass(frozen=True)
class ChunkGroup:
    """A KV group as it is kept in chunks of a given size.

    Attributes:
        group: vLLM's.
        chunk_blocks: blocks of a chunk.
        blocks: blocks of a chunk that are kept, its last ones.
        span: which chunks before an end a hit needs, as `Bind.spans` has it.
    """

    group: KVGroup
    chunk_blocks: int
    blocks: int
    span: int

    def first_block(self, chunk: int) -> int:
        """Return the place in the block table of the first block that is kept of a chunk."""
        return (chunk + 1) * self.chunk_blocks - self.blocks

    def table_part(self, table: Sequence[int], chunk: int) -> list[int]:
        """Return the ids of the blocks that are kept of a chunk, fewer where the table ends."""
        first = self.first_block(chunk)
        return list(table[first : first + self.blocks])

    def first_chunk(self, end: int) -> int:
        """Return the first chunk that a hit needs which ends before chunk `end`."""
        if self.span == 0:
            return 0
        return max(0, end - self.span) if self.span > 0 else end - end % -self.span

    def keys(self, chain_keys: bytes) -> bytes:
        """Return the keys of this group's part of chunks from the chain's keys."""
        return group_keys(chain_keys, self.group.index)


def block_multiple(groups: Sequence[KVGroup]) -> int:
    """Return the tokens after which blocks of all groups end."""
    return math.lcm(*(group.block_tokens for group in groups))


def choose_chunk_tokens(groups: Sequence[KVGroup], wished_tokens: int) -> int:
    """Return the smallest size of a chunk that is not below the wish and suits every group.

    It is a multiple of all block sizes. Where there is local attention, either its spans are whole
    chunks or chunks are whole spans: else what is needed of a chunk would differ from end to end.
    """
    step = block_multiple(groups)
    locals_ = [group.local for group in groups if group.local]
    chunk_tokens = -(-wished_tokens // step) * step
    # What every span divides is always one, so this ends.
    while any(local % chunk_tokens and chunk_tokens % local for local in locals_):
        chunk_tokens += step
    return chunk_tokens


def cut_chunks(groups: Sequence[KVGroup], chunk_tokens: int) -> tuple[ChunkGroup, ...]:
    """Return the groups of which anything is kept in chunks of this size.

    Raises:
        UnsupportedModelError: that is none.
    """
    kept = [_cut(group, chunk_tokens) for group in groups]
    found = tuple(each for each in kept if each.blocks)
    if not found:
        raise UnsupportedModelError(
            f"chunks of {chunk_tokens} tokens end where no KV group needs anything before them: "
            "run this model without --kv-transfer-config"
        )
    return found


def _cut(group: KVGroup, chunk_tokens: int) -> ChunkGroup:
    chunk_blocks = chunk_tokens // group.block_tokens
    if group.is_whole:
        return ChunkGroup(group, chunk_blocks, chunk_blocks, 0)
    if group.window:
        tail = group.window - 1
        blocks = min(chunk_blocks, -(-tail // group.block_tokens))
        return ChunkGroup(group, chunk_blocks, blocks, -(-tail // chunk_tokens))
    # Chunks that are whole spans, or as long as one, end where nothing before is seen any more.
    chunks = group.local // chunk_tokens
    return ChunkGroup(group, chunk_blocks, chunk_blocks if chunks > 1 else 0, -max(chunks, 1))
