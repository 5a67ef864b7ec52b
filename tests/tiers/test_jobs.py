"""What the control process asks of tiers ends in time and says no more than is known."""

import pytest

from kvcellar.clock import FakeClock
from kvcellar.errors import TierUnavailableError
from kvcellar.protocol.tier_messages import Delete
from kvcellar.testing.chunks import make_key
from kvcellar.tiers.jobs import DELETE_TIMEOUT_S, Jobs


class SlowTier:
    """A tier whose every deletion takes its time and comes to what the test says."""

    def __init__(self, clock, takes_s, outcomes):
        self.clock, self.takes_s, self.outcomes = clock, takes_s, outcomes

    def delete(self, keys, *, timeout_s):
        (key,) = keys
        self.clock.advance(min(self.takes_s, timeout_s))
        outcome = self.outcomes.pop(key, 0)
        if outcome is None:
            raise TierUnavailableError("it is away")
        return outcome


@pytest.fixture
def clock():
    return FakeClock()


def delete(clock, tiers, *numbers):
    keys = b"".join(make_key(number) for number in numbers)
    return list(Jobs(tiers, memoryview(b""), clock).delete(Delete(1, keys)).states)


def test_each_key_has_the_worst_of_what_its_tiers_say(clock):
    first = SlowTier(clock, 0, {make_key(1): 1, make_key(2): None})
    second = SlowTier(clock, 0, {make_key(2): 1, make_key(3): None})
    assert delete(clock, [first, second], 1, 2, 3, 4) == [1, 2, 2, 0]


def test_all_of_a_question_has_one_deadline(clock):
    start_s = clock.monotonic_s()
    away = SlowTier(clock, DELETE_TIMEOUT_S / 2, dict.fromkeys(map(make_key, range(8))))
    assert delete(clock, [away, SlowTier(clock, 0, {})], *range(8)) == [2] * 8
    assert clock.monotonic_s() - start_s <= DELETE_TIMEOUT_S
