"""The tiers hear of what memory answers: seldom, in bounds, and never from within a lookup."""

import pytest
from tests.server import tier_line
from tests.server.running import key, keys

from kvcellar.clock import FakeClock
from kvcellar.protocol.tier_messages import Touched
from kvcellar.server.tier_meters import TierMeters
from kvcellar.server.touches import AGAIN_S, NOTED_MAX, NOTED_MAX_BYTES, TOUCHED_MAX, Touches


class Disk(tier_line.Disk):
    def answer(self):
        question, on_answer = self.asked.pop(0)
        on_answer(Touched(question.id))
        return question.prefixes


class World:
    def __init__(self):
        self.disk, self.clock, self.meters = Disk(batch_max=256), FakeClock(), TierMeters()
        self.touches = Touches(self.meters, self.disk, self.clock)

    def told(self):
        """Let the timer go off, and return what the tiers are told."""
        self.touches.send()
        return self.disk.answer() if self.disk.asked else ()


@pytest.fixture
def world():
    return World()


def test_a_lookup_asks_nothing_and_the_timer_tells_what_was_used_in_order(world):
    world.touches.note(keys(1, 2, 3), 2)
    world.touches.note(keys(7), 1)
    world.touches.note(keys(1, 2), 2)
    assert world.disk.asked == []
    assert world.told() == (keys(1, 2), keys(7))
    assert world.told() == ()
    assert world.meters.told_chunks == 3


def test_a_prefix_is_told_again_only_after_some_seconds(world):
    for wait_s, expected in ((0, (keys(1, 2),)), (AGAIN_S - 1, ()), (1.5, (keys(1, 2),))):
        world.clock.advance(wait_s)
        world.touches.note(keys(1, 2), 2)
        assert world.told() == expected
    # Another length is another prefix.
    world.touches.note(keys(1, 2), 1)
    assert world.told() == (keys(1),)


def test_one_question_at_a_time(world):
    world.touches.note(keys(1), 1)
    world.touches.send()
    world.touches.note(keys(2), 1)
    world.touches.send()
    assert len(world.disk.asked) == 1
    assert world.disk.answer() == (keys(1),)
    assert world.told() == (keys(2),)


def test_a_question_is_bounded_and_the_rest_has_its_turn(world):
    world.touches.note(key(1) * (TOUCHED_MAX - 1), TOUCHED_MAX - 1)
    world.touches.note(keys(2, 3), 2)
    world.touches.note(key(4) * (TOUCHED_MAX + 1), TOUCHED_MAX + 1)
    assert [len(prefix) // 32 for prefix in world.told()] == [TOUCHED_MAX - 1]
    assert world.told() == (keys(2, 3),)
    # Of what is too long for any question its beginning.
    assert world.told() == (key(4) * TOUCHED_MAX,)


def test_what_waits_is_bounded_and_what_is_too_much_is_counted(world):
    for number in range(NOTED_MAX + 3):
        world.touches.note(key(number), 1)
    assert world.meters.untold_lookups == 3
    assert len(world.told()) == NOTED_MAX
    large = key(1) * (NOTED_MAX_BYTES // 32)
    world.touches.note(large, 1)
    world.touches.note(keys(5000), 1)
    assert world.meters.untold_lookups == 4
    # What was told a moment ago is not told again, and makes place all the same.
    world.touches.note(key(1), 1)
    assert world.told() == ()
    world.touches.note(keys(5000), 1)
    assert world.told() == (keys(5000),)


def test_a_tier_process_that_is_away_loses_notes_and_nothing_else(world):
    world.disk.is_away = True
    world.touches.note(keys(1), 1)
    assert world.told() == ()
    assert world.meters.untold_lookups == 1
    world.disk.is_away = False
    world.touches.note(keys(2), 1)
    world.touches.send()
    _, on_answer = world.disk.asked.pop()
    on_answer(None)
    assert world.meters.untold_lookups == 2
    world.touches.life_ended()
    world.touches.note(keys(2), 1)
    assert world.told() == (keys(2),)
