"""A namespace is known by its sizes, and refused where it can never be stored."""

import pytest
from tests.store.bed import OTHER_SPACE, PAGE, SPACE, Bed

from kvcellar.errors import LimitError, MalformedError, MismatchError, NotRegisteredError
from kvcellar.keys.digest import NamespaceId
from kvcellar.store.limits import StoreLimits


def _space(number):
    return NamespaceId(number.to_bytes(32, "little"))


def test_several_instances_may_bind_the_same_namespace():
    bed = Bed()
    bed.store.bind(SPACE, (PAGE, 2 * PAGE))
    bed.store.bind(SPACE, (PAGE, 2 * PAGE))
    bed.store.bind(OTHER_SPACE, (PAGE,))
    assert bed.counted.namespaces == 2


def test_other_sizes_are_a_mismatch_that_says_both():
    bed = Bed()
    bed.store.bind(SPACE, (PAGE,))
    with pytest.raises(MismatchError, match=r"\(4096,\).*\(4096, 4096\)"):
        bed.store.bind(SPACE, (PAGE, PAGE))


def test_a_shard_larger_than_a_growth_step_is_refused():
    bed = Bed(pages=8, step_pages=4)
    bed.store.bind(SPACE, (4 * PAGE,))
    with pytest.raises(LimitError, match=r"20.00 KiB.*16.00 KiB.*--chunk-size"):
        bed.store.bind(OTHER_SPACE, (PAGE, 4 * PAGE + 1))


def test_a_chunk_larger_than_the_arena_is_refused():
    bed = Bed(pages=4, step_pages=4, limits=StoreLimits(arena_bytes=8 * PAGE))
    bed.store.bind(SPACE, (4 * PAGE, 4 * PAGE))
    with pytest.raises(LimitError, match=r"36.00 KiB.*32.00 KiB.*--l1-size-gb"):
        bed.store.bind(OTHER_SPACE, (4 * PAGE, 4 * PAGE, 1))


@pytest.mark.parametrize(
    ("space", "sizes"),
    [(b"short", (1,)), (SPACE, ()), (SPACE, (1,) * 1025), (SPACE, (1, 0)), (SPACE, (-1,))],
    ids=["short", "no shard", "too many", "empty", "negative"],
)
def test_what_is_no_namespace_is_malformed(space, sizes):
    with pytest.raises(MalformedError):
        Bed().store.bind(NamespaceId(space), sizes)


def test_empty_namespaces_make_place_for_new_ones():
    """A cache that is reset every minute makes half a million of them in a year."""
    bed = Bed(limits=StoreLimits(namespaces_max=3))
    kept = bed.instance(space=_space(0))
    kept.put("a")
    writing = bed.instance(space=_space(1))
    writing.reserve("b")
    for number in range(2, 100):
        bed.store.bind(_space(number), (PAGE,))
        assert bed.counted.namespaces <= 3
    assert kept.found("a") == 1
    with pytest.raises(NotRegisteredError):
        bed.store.lookup(bed.owner(), _space(98), b"", request=1)


def test_namespaces_that_all_hold_chunks_are_as_many_as_there_may_be():
    bed = Bed(limits=StoreLimits(namespaces_max=2))
    bed.instance(space=_space(0)).put("a")
    bed.instance(space=_space(1)).put("b")
    with pytest.raises(LimitError, match="2 namespaces"):
        bed.store.bind(_space(2), (PAGE,))
    bed.clear(_space(1))
    bed.store.bind(_space(2), (PAGE,))
