"""A chain grows with its request and never hashes a token twice."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.keys.chain import ChunkChain, SpanItem, chunk_key
from kvcellar.keys.digest import KEY_BYTES, RequestSeed

SEED = RequestSeed(b"\x07" * KEY_BYTES)


class OnlySlices:
    """A list as engines hand it out: it can be sliced, and tells what was read."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.read = []

    def __getitem__(self, item):
        assert isinstance(item, slice)
        self.read += range(*item.indices(len(self.tokens)))
        return self.tokens[item]


def _keys(tokens, chunk_tokens=4, items=()):
    chain = ChunkChain(SEED, chunk_tokens=chunk_tokens, items=items)
    chain.extend(tokens, token_count=len(tokens))
    return chain.joined(0, chain.count)


def test_a_key_is_the_hash_of_the_key_before_and_the_tokens():
    first = blake3(SEED + bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()
    second = blake3(first + bytes([3, 0, 0, 0, 255, 255, 255, 255])).digest()
    assert _keys([1, 258, 3, 2**32 - 1], chunk_tokens=2) == first + second


def test_what_is_no_token_follows_the_tokens_of_its_chunk():
    item = SpanItem(start=1, length=2, identity=b"\xaa\xbb", kind="image")
    extras = b"".join(
        [
            (1).to_bytes(4, "little"),
            (-1).to_bytes(8, "little", signed=True),
            (2).to_bytes(8, "little"),
            (5).to_bytes(4, "little") + b"image",
            (2).to_bytes(4, "little") + b"\xaa\xbb",
        ]
    )
    first = _keys([1, 2], chunk_tokens=2, items=[item])
    tokens = bytes([3, 0, 0, 0, 4, 0, 0, 0])
    assert _keys([1, 2, 3, 4], chunk_tokens=2, items=[item])[KEY_BYTES:] == (
        blake3(first + tokens + extras).digest()
    )


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_it_does_not_matter_in_which_pieces_the_tokens_come(tokens, cuts):
    items = [SpanItem(start, 3, b"i", "image") for start in range(0, 40, 5)]
    chain = ChunkChain(SEED, chunk_tokens=4, items=items)
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        assert chain.extend(tokens, token_count=cut) == max(chain.count, cut // 4)
    assert chain.joined(0, chain.count) == _keys(tokens, items=items)


@pytest.mark.parametrize("kind", [tuple, np.array, OnlySlices], ids=lambda kind: kind.__name__)
def test_tokens_may_come_in_anything_that_slices(kind):
    tokens = list(range(11))
    chain = ChunkChain(SEED, chunk_tokens=4)
    assert chain.extend(kind(tokens), token_count=11) == 2
    assert chain.joined(0, 2) == _keys(tokens)


def test_each_token_is_read_once_and_only_in_a_full_chunk():
    tokens = OnlySlices(list(range(20)))
    chain = ChunkChain(SEED, chunk_tokens=4)
    for count in range(19):
        chain.extend(tokens, token_count=count)
    assert tokens.read == list(range(16))


@pytest.mark.parametrize("unknown", [-1, -(2**31), 2**32, 2**40])
def test_a_value_that_is_no_token_ends_the_chain_until_it_is_known(unknown):
    """Cut to 32 bits it would be a token, and its key another prompt's."""
    tokens = [0, 1, 2, 3, 4, unknown, 6, 7, 8, 9, 10, 11]
    chain = ChunkChain(SEED, chunk_tokens=4)
    assert chain.extend(tokens, token_count=12) == 1
    tokens[5] = 5
    assert chain.extend(tokens, token_count=12) == 3
    assert chain.joined(0, 3) == _keys(list(range(12)))


def test_a_chunk_whose_tokens_are_not_all_there_gets_no_key():
    chain = ChunkChain(SEED, chunk_tokens=4)
    assert chain.extend([0, 1, 2, 3, 4, 5], token_count=8) == 1


def test_one_chunk_alone_has_the_key_that_the_chain_gives_it():
    items = [SpanItem(6, 4, b"i", "image")]
    tokens = list(range(12))
    chain = ChunkChain(SEED, chunk_tokens=4, items=items)
    chain.extend(tokens, token_count=12)
    previous = bytes(SEED)
    for index in range(3):
        span = tokens[index * 4 : index * 4 + 4]
        assert chunk_key(previous, span, items, start=index * 4) == chain.key(index)
        previous = chain.key(index)


def test_a_tool_cannot_make_a_key_of_what_is_no_token():
    with pytest.raises(AssertionError):
        chunk_key(SEED, [1, -1])


def test_keys_come_singly_or_joined():
    chain = ChunkChain(SEED, chunk_tokens=2)
    chain.extend(range(6), token_count=6)
    assert chain.joined(1, 3) == chain.key(1) + chain.key(2)
    assert chain.joined(2, 2) == b""
    with pytest.raises(AssertionError):
        chain.key(3)
    with pytest.raises(AssertionError):
        chain.joined(0, 4)


def test_each_seed_has_the_chain_that_it_would_have_alone():
    """As an engine wants it that names its chunks otherwise at each of its servers."""
    seeds = [RequestSeed(bytes([number]) * 32) for number in range(3)]
    tokens, items = list(range(20)), [SpanItem(5, 4, b"cat", "image")]
    both = ChunkChain(*seeds, chunk_tokens=4, items=items)
    both.extend(tokens, token_count=9)
    both.extend(tokens, token_count=20)
    for part, seed in enumerate(seeds):
        alone = ChunkChain(seed, chunk_tokens=4, items=items)
        alone.extend(tokens, token_count=20)
        assert both.joined(0, 5, part=part) == alone.joined(0, 5)
        assert both.key(4, part=part) == alone.key(4)
        assert both.sketch(size_max_bytes=64) == alone.sketch(size_max_bytes=64)
