"""What is kept of a chunk is there when its end is passed, and enough for whoever ends there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engines.vllm.groups import (
    KVGroup,
    block_multiple,
    choose_chunk_tokens,
    cut_chunks,
)
from kvcellar.errors import UnsupportedModelError

FULL = KVGroup(0, 16)
KINDS = st.one_of(
    st.builds(KVGroup, st.just(0), st.sampled_from([4, 8, 16])),
    st.builds(KVGroup, st.just(0), st.sampled_from([4, 8, 16]), window=st.integers(2, 150)),
    st.builds(
        KVGroup, st.just(0), st.sampled_from([4, 8, 16]), local=st.sampled_from([16, 48, 64, 96])
    ),
)


@given(kind=KINDS, wished=st.integers(1, 100), end=st.integers(1, 12), behind=st.integers(1, 300))
def test_what_is_kept_of_a_chunk_is_still_there_in_the_step_that_passes_its_end(
    kind, wished, end, behind
):
    """However much of it was computed before: vLLM gives away only what the next token ignores."""
    chunk_tokens = choose_chunk_tokens([FULL, kind], wished)
    _, *rest = cut_chunks([FULL, kind], chunk_tokens)
    computed = max(0, end * chunk_tokens - behind)
    for group in rest:
        assert group.first_block(end - 1) >= kind.kept_from(computed) // kind.block_tokens
        assert 0 < group.blocks <= group.chunk_blocks


@given(kind=KINDS, wished=st.integers(1, 100), end=st.integers(1, 12))
def test_what_a_hit_needs_covers_every_block_that_the_next_token_sees(kind, wished, end):
    chunk_tokens = choose_chunk_tokens([FULL, kind], wished)
    _, *rest = cut_chunks([FULL, kind], chunk_tokens)
    stop = end * chunk_tokens
    seen = {*range(kind.kept_from(stop) // kind.block_tokens, stop // kind.block_tokens)}
    needed = {
        block
        for group in rest
        for chunk in range(group.first_chunk(end), end)
        for block in range(group.first_block(chunk), group.first_block(chunk) + group.blocks)
    }
    assert seen <= needed
    # And no chunk that holds none of them.
    for group in rest:
        first = group.first_chunk(end)
        assert not group.span or not seen or group.first_block(first) + group.blocks > min(seen)


@given(st.lists(KINDS, min_size=1, max_size=4), st.integers(1, 400))
def test_a_chunk_is_the_smallest_that_suits_all_groups(kinds, wished):
    chunk_tokens = choose_chunk_tokens(kinds, wished)

    def suits(tokens):
        spans = [kind.local for kind in kinds if kind.local]
        return tokens % block_multiple(kinds) == 0 and all(
            span % tokens == 0 or tokens % span == 0 for span in spans
        )

    assert suits(chunk_tokens)
    assert not any(suits(tokens) for tokens in range(max(1, wished), chunk_tokens))


@pytest.mark.parametrize(
    ("kind", "blocks", "span"),
    [
        (KVGroup(0, 16), 16, 0),
        (KVGroup(0, 16, window=2), 1, 1),
        (KVGroup(0, 16, window=18), 2, 1),
        (KVGroup(0, 16, window=257), 16, 1),
        (KVGroup(0, 16, window=258), 16, 2),
        (KVGroup(0, 16, window=1024), 16, 4),
        (KVGroup(0, 16, local=8192), 16, -32),
        (KVGroup(0, 32, local=512), 8, -2),
    ],
)
def test_models_that_people_run(kind, blocks, span):
    (group,) = cut_chunks([kind], 256)
    assert (group.blocks, group.span) == (blocks, span)


def test_a_model_that_needs_nothing_at_any_end_is_refused():
    with pytest.raises(UnsupportedModelError, match="chunks of 256 tokens"):
        cut_chunks([KVGroup(0, 16, local=256), KVGroup(1, 16, window=1)], 256)
