"""Keys that are made without numpy are those that engines make."""

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.keys.chain import ChunkChain
from kvcellar.keys.digest import RequestSeed
from kvcellar.keys.tokens import token_keys

SEED = RequestSeed(b"s" * 32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20))
def test_a_prompt_has_the_keys_of_its_chain(tokens, chunk_tokens):
    chain = ChunkChain(SEED, chunk_tokens=chunk_tokens)
    count = chain.extend(tokens, token_count=len(tokens))
    assert token_keys(SEED, tokens, chunk_tokens=chunk_tokens) == chain.joined(0, count)
