"""Where a hit ends with several KV groups, against trying every end."""

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.keys.digest import KEY_BYTES
from kvcellar.store.entries import Entry, Group
from kvcellar.store.search import find_reach
from kvcellar.tenancy.ranking import Tenant

TENANT = Tenant("")
SPANS = st.sampled_from([0, 0, 1, 2, 3, 5, -1, -2, -3, -4])


def key(group, chunk):
    return bytes([group, chunk]).ljust(KEY_BYTES, b".")


def stored(groups, there):
    entries = {}
    for index, chunk in there:
        entry = Entry(key(index, chunk), groups[index], TENANT)
        entry.refs = b"x"
        entries[entry.key] = entry
    return entries


def needed(span, end):
    if span == 0:
        return range(end)
    return range(max(0, end - span), end) if span > 0 else range(end - end % -span, end)


@given(
    spans=st.lists(SPANS, min_size=1, max_size=4),
    count=st.integers(0, 12),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=10),
)
def test_it_is_the_largest_end_at_which_every_group_has_what_it_needs(spans, count, missing):
    groups = [Group(b"n" * 32, (1,), (4096,), span=span) for span in spans]
    there = {
        (index, chunk)
        for index in range(len(spans))
        for chunk in range(count)
        if (index, chunk) not in missing
    }
    keys = b"".join(key(index, chunk) for index in range(len(spans)) for chunk in range(count))
    reach = find_reach(stored(groups, there), groups, keys, count=count)
    ends = [
        end
        for end in range(count + 1)
        if all((i, c) in there for i, span in enumerate(spans) for c in needed(span, end))
    ]
    assert reach.end == ends[-1]
    expected = [key(i, c) for i, span in enumerate(spans) for c in needed(span, reach.end)]
    assert [entry.key for entry in reach.entries] == expected


@given(spans=st.lists(st.sampled_from([2, 3, 4, 5]), min_size=1, max_size=3), data=st.data())
def test_no_place_is_looked_at_twice(spans, data):
    """Whatever is missing, a lookup's cost is bounded by its keys."""
    count = 24
    groups = [Group(b"n" * 32, (1,), (4096,), span=span) for span in spans]
    missing = data.draw(
        st.sets(st.tuples(st.integers(0, len(spans) - 1), st.integers(0, count - 1)))
    )
    looked = []

    class Watched(dict):
        def get(self, wanted):
            looked.append(wanted)
            return super().get(wanted)

    there = {(i, c) for i in range(len(spans)) for c in range(count)} - missing
    keys = b"".join(key(index, chunk) for index in range(len(spans)) for chunk in range(count))
    find_reach(Watched(stored(groups, there)), groups, keys, count=count)
    assert len(looked) == len(set(looked))


def test_an_entry_of_another_group_is_not_there():
    groups = [Group(b"n" * 32, (1,), (4096,)), Group(b"n" * 32, (1,), (4096,), span=1)]
    entries = stored(groups, {(0, 0), (1, 0)})
    entries[key(1, 0)].group = groups[0]
    assert find_reach(entries, groups, key(0, 0) + key(1, 0), count=1).end == 0
