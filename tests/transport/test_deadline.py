"""A deadline is one moment, however often it is asked."""

from kvcellar.clock import FakeClock
from kvcellar.transport.deadline import Deadline


def test_what_is_left_shrinks_and_ends_at_zero():
    clock = FakeClock()
    deadline = Deadline(clock, 2.0)
    assert deadline.remaining_s() == 2.0
    clock.advance(1.5)
    assert deadline.remaining_s() == 0.5
    assert deadline.remaining_ms() == 500
    clock.advance(1.0)
    assert deadline.remaining_s() == 0.0
    assert deadline.remaining_ms() == 0


def test_a_fraction_of_a_millisecond_is_still_a_wait():
    """Rounded down, the last wait of a loop would spin."""
    assert Deadline(FakeClock(), 0.0001).remaining_ms() == 1
