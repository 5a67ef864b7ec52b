"""The chain of chunk keys of one request, extended as its tokens come.

key = blake3(previous key ‖ tokens as little-endian uint32 ‖ extras), the first 'previous key'
being the request seed. Extras are whatever lies in the chunk's span and is not a token: hashes of
multimodal items that overlap it, with their offsets from the chunk's start, and digests of prompt
embeddings. They stand in the chunks that they overlap and in no others, so a shared text before
an image still has the same keys. A chunk has a fixed number of tokens (part of the namespace), so
the three parts can't run into each other. Used by the connector's scheduler half; each token is
hashed once. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvcellar.keys.digest import KEY_BYTES, ChunkKey, RequestSeed
from kvcellar.keys.sketch import sketch_of, sketch_unit

__all__ = ["ChunkChain", "SpanItem", "chunk_key"]

_TOKEN_MAX = 0xFFFF_FFFF
_ITEMS_CONTEXT = b"kvcellar-items-1\x00"


class SpanItem(NamedTuple):
    """Something besides tokens that a span of the prompt holds.

    Attributes:
        start: index of its first token in the prompt.
        length: tokens that it spans, at least 1.
        identity: full-width content digest; never an id from a counter.
        kind: "image", "embeds" … (two kinds with equal identity differ).
    """

    start: int
    length: int
    identity: bytes
    kind: str


class ChunkChain:
    """The keys of a request's full chunks; owns no tokens, remembers only the keys.

    An engine that uses several servers names its chunks otherwise at each, so there may be a
    chain for each *part* of its ranks, from a seed of its own.

    Attributes:
        chunk_tokens: tokens a chunk.
        unit_tokens: tokens that one value of the sketch stands for.
    """

    def __init__(
        self, *seeds: RequestSeed, chunk_tokens: int, items: Sequence[SpanItem] = ()
    ) -> None:
        assert seeds
        assert chunk_tokens > 0, chunk_tokens
        assert all(item.length > 0 for item in items), items
        self.chunk_tokens = chunk_tokens
        self.unit_tokens = sketch_unit(chunk_tokens)
        self._items = tuple(items)
        self._sketch = bytearray()
        self._last = [bytes(seed) for seed in seeds]
        self._keys = [bytearray() for _ in seeds]

    @property
    def count(self) -> int:
        """How many chunks have keys."""
        return len(self._keys[0]) // KEY_BYTES

    def key(self, index: int, *, part: int = 0) -> ChunkKey:
        """Return a part's key of chunk `index`, from 0."""
        assert 0 <= index < self.count, (index, self.count)
        return ChunkKey(bytes(self._keys[part][index * KEY_BYTES : (index + 1) * KEY_BYTES]))

    def joined(self, start: int, stop: int, *, part: int = 0) -> bytes:
        """Return a part's keys of chunks [start, stop) one after the other, as on the wire."""
        assert 0 <= start <= stop <= self.count, (start, stop, self.count)
        return bytes(self._keys[part][start * KEY_BYTES : stop * KEY_BYTES])

    def sketch(self, *, size_max_bytes: int) -> bytes:
        """Return the sketch of the full chunks' tokens, cut to a size; see `keys.sketch`."""
        return bytes(self._sketch[: size_max_bytes // 4 * 4])

    def items_digest(self) -> bytes:
        """Return 8 bytes of a digest of what lies beside the tokens, nothing without any."""
        if not self._items:
            return b""
        end = max(item.start + item.length for item in self._items)
        return blake3(_ITEMS_CONTEXT + _encode_items(self._items, 0, end)).digest()[:8]

    def first_item_start(self) -> int:
        """Return the index of the first token that something beside tokens covers, or -1."""
        return min((item.start for item in self._items), default=-1)

    def extend(self, token_ids: Sequence[int], *, token_count: int) -> int:
        """Add the keys of all chunks that are full now.

        A value outside [0, 2³²) is no token, or one that the engine does not know yet: its chunk
        gets no key (the next call tries again), since cut to 32 bits it would share one.

        Args:
            token_ids: all tokens of the request from its first on. Anything that slices (a list,
                vLLM's ConstantList, an array); only tokens of new chunks are read.
            token_count: how many of them exist; the rest of `token_ids` is not read.

        Returns:
            The number of chunks that have keys now.
        """
        first = self.count
        full = token_count // self.chunk_tokens
        if full <= first:
            return first
        base = first * self.chunk_tokens
        fresh = np.asarray(token_ids[base : full * self.chunk_tokens], dtype=np.int64)
        full = first + _known_tokens(fresh) // self.chunk_tokens
        packed = fresh.astype("<u4").tobytes()
        width = self.chunk_tokens * 4
        for index in range(first, full):
            at = (index - first) * width
            content = packed[at : at + width] + _encode_items(
                self._items, index * self.chunk_tokens, self.chunk_tokens
            )
            for part, keys in enumerate(self._keys):
                self._last[part] = last = blake3(self._last[part] + content).digest()
                keys.extend(last)
        known = fresh[: (full - first) * self.chunk_tokens]
        self._sketch += sketch_of(known, unit_tokens=self.unit_tokens)
        return full


def chunk_key(
    previous: bytes, token_ids: Sequence[int], items: Sequence[SpanItem] = (), *, start: int = 0
) -> ChunkKey:
    """Return one chunk's key from its parts; what `ChunkChain` does, for tools and vectors.

    Args:
        previous: the chunk before it, or the request seed; 32 bytes.
        token_ids: exactly the chunk's tokens, in [0, 2³²).
        items: the prompt's items; those that do not overlap the chunk are ignored.
        start: index of the chunk's first token in the prompt.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    assert _known_tokens(tokens) == len(tokens), token_ids
    packed = tokens.astype("<u4").tobytes()
    return ChunkKey(
        blake3(previous + packed + _encode_items(items, start, len(token_ids))).digest()
    )


def _known_tokens(tokens: NDArray[np.int64]) -> int:
    """Return how many leading values are tokens."""
    if len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() <= _TOKEN_MAX):
        return len(tokens)
    return int(np.argmax((tokens < 0) | (tokens > _TOKEN_MAX)))


def _encode_items(items: Sequence[SpanItem], start: int, length: int) -> bytes:
    inside = [
        item for item in items if item.start < start + length and item.start + item.length > start
    ]
    if not inside:
        return b""
    parts = [len(inside).to_bytes(4, "little")]
    for item in sorted(inside):
        kind = item.kind.encode()
        parts.append((item.start - start).to_bytes(8, "little", signed=True))
        parts.append(item.length.to_bytes(8, "little"))
        parts.append(len(kind).to_bytes(4, "little") + kind)
        parts.append(len(item.identity).to_bytes(4, "little") + item.identity)
    return b"".join(parts)
