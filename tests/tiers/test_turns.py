"""Tenants' orders and accounts in the index of a folder, whatever happens in whatever order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.testing.chunks import make_chunk
from kvcellar.tiers.index import ChunkIndex

TENANTS = ("", "a", "b", "c")
RECORDS = [
    make_chunk(number, (1,), tenant=TENANTS[number % len(TENANTS)]).record for number in range(12)
]
ACTS = st.tuples(
    st.sampled_from(
        ["write", "fail", "found", "name", "use", "remove", "stay", "limit", "order", "evict"]
    ),
    st.integers(0, len(RECORDS) - 1),
    st.sampled_from([0, 4096, 8192, 40_960]),
)


def _act(index, act, record, size_bytes):
    key = record.key
    if act in {"write", "fail"} and index.begin_write(key, size_bytes + 4096, record.tenant):
        index.check()
        if act == "write":
            index.end_write(record, size_bytes)
        else:
            index.drop_write(key)
    elif act == "found":
        index.found(key, size_bytes)
    elif act == "name":
        index.name(record)
    elif act == "use":
        index.touch([key])
    elif act in {"remove", "stay"} and index.take(key):
        index.left(key, is_gone=act == "remove")
    elif act == "limit":
        index.set_limits({record.tenant: size_bytes or None})
    elif act == "order":
        index.order_found([key])
    elif act == "evict":
        _evict(index)


def _evict(index):
    oldest = index.oldest()
    assert (oldest is None) == (len(index) == 0)
    if oldest is not None:
        assert index.take(oldest)
        index.left(oldest, is_gone=True)


@settings(max_examples=150)
@given(st.lists(ACTS, max_size=60))
def test_accounts_and_orders_agree_and_everything_can_leave(acts):
    index = ChunkIndex(is_isolated=True)
    index.set_capacity(100_000)
    for act, number, size_bytes in acts:
        _act(index, act, RECORDS[number], size_bytes)
        index.check()
    for _ in range(len(index)):
        _evict(index)
        index.check()
    assert index.oldest() is None


def test_who_is_over_a_quota_gives_way_and_within_a_tenant_the_least_recently_used():
    index = ChunkIndex(is_isolated=True)
    index.set_capacity(10 * 4096)
    for record in RECORDS[1:4] + RECORDS[5:7]:  # a b c a b
        index.begin_write(record.key, 4096, record.tenant)
        index.end_write(record, 4096)
    index.touch([RECORDS[1].key])
    index.set_limits({"a": 4096})
    assert index.over_bytes("a") == 4096
    assert index.oldest() == index.oldest_of("a") == RECORDS[5].key
    index.set_limits({"a": None})
    assert index.oldest() == RECORDS[2].key
