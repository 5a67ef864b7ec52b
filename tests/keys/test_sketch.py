"""A sketch differs where the tokens do, and nowhere before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.keys.chain import ChunkChain, SpanItem
from kvcellar.keys.digest import RequestSeed
from kvcellar.keys.sketch import sketch_of, sketch_unit

TOKENS = st.integers(0, 2**32 - 1)


def sketch(tokens, unit=16):
    return np.frombuffer(sketch_of(np.asarray(tokens, np.int64), unit_tokens=unit), "<u4")


@given(st.lists(TOKENS, min_size=64, max_size=64), st.integers(0, 63), TOKENS)
def test_one_other_token_changes_its_unit_and_no_other(tokens, place, other):
    changed = [*tokens]
    changed[place] = other
    same = sketch(tokens) == sketch(changed)
    expected = np.full(4, fill_value=True)
    expected[place // 16] = tokens[place] == other
    assert (same == expected).all()


def test_the_order_of_tokens_counts():
    assert (sketch(range(16)) != sketch([*reversed(range(16))])).all()


@pytest.mark.parametrize(
    ("chunk", "unit"), [(256, 16), (16, 16), (8, 8), (528, 16), (100, 4), (7, 1)]
)
def test_a_unit_divides_the_chunk(chunk, unit):
    assert sketch_unit(chunk) == unit


def test_a_chain_has_the_sketch_of_its_full_chunks_however_it_was_extended():
    tokens = list(range(100))
    whole = ChunkChain(RequestSeed(bytes(32)), chunk_tokens=32)
    whole.extend(tokens, token_count=100)
    pieces = ChunkChain(RequestSeed(b"other".ljust(32)), chunk_tokens=32)
    for count in (40, 70, 100):
        pieces.extend(tokens, token_count=count)
    assert whole.sketch(size_max_bytes=1 << 20) == sketch(tokens[:96]).tobytes()
    assert pieces.sketch(size_max_bytes=1 << 20) == whole.sketch(size_max_bytes=1 << 20)
    assert len(whole.sketch(size_max_bytes=10)) == 8
    assert whole.items_digest() == b""
    assert whole.first_item_start() == -1


def test_items_have_a_digest_that_says_what_and_where():
    def chain(*items):
        return ChunkChain(RequestSeed(bytes(32)), chunk_tokens=32, items=items)

    one = SpanItem(10, 5, b"one", "image")
    assert chain(one).first_item_start() == 10
    assert len(chain(one).items_digest()) == 8
    others = [SpanItem(11, 5, b"one", "image"), SpanItem(10, 5, b"two", "image")]
    digests = {chain(item).items_digest() for item in (one, *others)} | {b""}
    assert len(digests) == 4
