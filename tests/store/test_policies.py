"""The policies by themselves: who is named, and how much is kept to know it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.bed import SPACE

from kvcellar.config.server import EVICTION_POLICIES
from kvcellar.errors import ConfigError
from kvcellar.store.entries import Entry, Group
from kvcellar.store.policies import LRU, IsolatedLRU, Noop, policy_from_name
from kvcellar.tenancy.ranking import Tenant

GROUP = Group(SPACE, (1,), (4096,))
TENANT = Tenant("")


def _entry(tick):
    entry = Entry(tick.to_bytes(32, "big"), GROUP, TENANT)
    entry.tick = tick
    return entry


def _offered(policy, *ticks):
    entries = [_entry(tick) for tick in ticks]
    for entry in entries:
        policy.offer(entry)
    return entries


def test_the_least_recently_used_is_named_first():
    policy = LRU()
    entries = _offered(policy, 3, 1, 2)
    assert [policy.take() for _ in range(4)] == [entries[1], entries[2], entries[0], None]


def test_a_use_after_the_offer_counts():
    policy = LRU()
    one, two, three = _offered(policy, 1, 2, 3)
    one.tick, two.tick = 9, 8
    assert [policy.take() for _ in range(3)] == [three, two, one]


def test_what_is_withdrawn_is_not_named_until_it_is_offered_again():
    policy = LRU()
    one, two = _offered(policy, 1, 2)
    policy.withdraw(one)
    assert policy.take() is two
    assert policy.take() is None
    policy.offer(one)
    assert policy.take() is one


def test_an_offer_that_is_repeated_counts_once():
    policy = LRU()
    (one,) = _offered(policy, 1)
    policy.offer(one)
    policy.withdraw(one)
    policy.offer(one)
    policy.offer(one)
    assert [policy.take(), policy.take()] == [one, None]
    policy.withdraw(one)
    assert policy.take() is None


def test_what_is_leased_is_not_named_until_it_is_offered_again():
    policy = LRU()
    one, two = _offered(policy, 1, 2)
    one.leases = 1
    assert [policy.take(), policy.take()] == [two, None]
    one.leases = 0
    policy.offer(one)
    assert policy.take() is one


def test_withdrawn_entries_are_not_kept_for_ever():
    """A prefix that grows for a day withdraws each of its chunks once."""
    policy = LRU()
    kept = _offered(policy, *range(100))
    for tick in range(100, 5000):
        (passing,) = _offered(policy, tick)
        policy.withdraw(passing)
        assert len(policy._heap) <= 300
    assert [policy.take() for _ in range(101)] == [*kept, None]


def test_an_entry_that_was_swept_out_may_be_offered_again():
    policy = LRU()
    entries = _offered(policy, *range(100))
    for entry in entries:
        policy.withdraw(entry)
    for entry in entries[::-1]:
        policy.offer(entry)
    assert [policy.take() for _ in range(101)] == [*entries, None]


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_it_names_whom_a_search_through_all_would_name(seed):
    """Long enough for several sweeps of withdrawn entries."""
    random = Random(seed)
    policy = LRU()
    entries = _offered(policy, *range(200))
    random.shuffle(entries)
    offered = set(entries)
    for clock in range(200, 1200):
        entry = random.choice(entries)
        match random.randrange(8):
            case 0 | 1:
                policy.offer(entry)
                offered.add(entry)
            case 2 | 3 | 4 | 5:
                policy.withdraw(entry)
                offered.discard(entry)
            case 6:
                entry.tick = clock
            case _:
                expected = min(offered, key=lambda entry: entry.tick, default=None)
                assert policy.take() is expected
                offered.discard(expected)


def test_noop_names_nobody():
    policy = Noop()
    _offered(policy, 1)
    assert policy.take() is None


def test_the_policies_are_those_that_the_command_line_knows():
    policies = {name: policy_from_name(name) for name in EVICTION_POLICIES}
    kinds = {"LRU": LRU, "IsolatedLRU": IsolatedLRU, "noop": Noop}
    assert {name: type(policy) for name, policy in policies.items()} == kinds
    with pytest.raises(ConfigError, match="--eviction-policy ARC"):
        policy_from_name("ARC")
