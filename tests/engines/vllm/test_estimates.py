"""What is learned from times that have outliers, change, and get old."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.clock import FakeClock
from kvcellar.engines.vllm.estimates import EXPIRE_S, Fit, Recent

pytestmark = pytest.mark.engine

STIFFNESS = (1e-2, 1e-4, 1e-3)


def samples(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        tokens = chance.randint(16, 8192)
        yield (1.0, tokens, tokens * chance.uniform(0, 60_000))


def taught(seconds_of, *, count=60, clock=None):
    clock = clock or FakeClock()
    fit = Fit(STIFFNESS, clock)
    for features in samples(count):
        clock.advance(1.0)
        fit.observe(features, seconds_of(features))
    return fit


def linear(*coefficients):
    return lambda features: sum(c * x for c, x in zip(coefficients, features, strict=True))


class TestFit:
    @given(
        st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.one_of(st.just(0.0), st.floats(1e-10, 1e-8))
    )
    def test_it_finds_what_made_the_samples(self, constant, token_s, attended_s):
        made = linear(constant, token_s, attended_s)
        fit = taught(made)
        for features in samples(20, seed=9):
            assert fit.predict_s(features) == pytest.approx(made(features), rel=0.05)

    @given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 1e4)), min_size=1))
    def test_no_coefficient_is_ever_below_zero(self, seen):
        fit = Fit(STIFFNESS, FakeClock())
        for tokens, seconds in seen:
            fit.observe((1.0, tokens, tokens * tokens / 2), seconds)
        assert min(fit._coefficients) >= 0.0
        assert fit.predict_s((1.0, 1, 0)) >= 0.0

    def test_nothing_is_known_at_first(self):
        assert Fit(STIFFNESS, FakeClock()).predict_s((1.0, 1, 1)) is None

    @pytest.mark.parametrize("at", [0, 1, 30, 58, 59])
    def test_a_pause_changes_nothing(self, at):
        """A first step that compiles, and pauses, take seconds instead of milliseconds."""
        made = linear(0.01, 2e-5, 1e-9)
        count = iter(range(100))
        fit = taught(lambda x: made(x) + (30.0 if next(count) == at else 0.0))
        for features in samples(20, seed=9):
            assert fit.predict_s(features) == pytest.approx(made(features), rel=0.1)

    def test_slower_is_believed_after_three_samples(self):
        made = linear(0.01, 2e-5, 1e-9)
        clock = FakeClock()
        fit = taught(made, clock=clock)
        for features in samples(3, seed=5):
            clock.advance(1.0)
            fit.observe(features, 10.0 * made(features))
        for features in samples(20, seed=9):
            assert fit.predict_s(features) == pytest.approx(10.0 * made(features), rel=0.3)

    def test_quicker_is_believed_at_once(self):
        clock = FakeClock()
        fit = Fit(STIFFNESS, clock)
        for _ in range(10):
            clock.advance(1.0)
            fit.observe((1.0, 1000, 500_000), 1.0)
        clock.advance(1.0)
        fit.observe((1.0, 1000, 500_000), 0.01)
        assert fit.predict_s((1.0, 1000, 500_000)) == pytest.approx(0.01, rel=0.15)

    def test_a_prompt_of_always_one_length_is_blamed_on_its_tokens(self):
        fit = Fit(STIFFNESS, FakeClock())
        for _ in range(10):
            fit.observe((1.0, 1000, 500_000), 0.1)
        assert fit.predict_s((1.0, 1000, 500_000)) == pytest.approx(0.1, rel=0.01)
        assert fit.prices_s()[1] == pytest.approx(1e-4, rel=0.15)

    def test_what_is_old_is_forgotten(self):
        clock = FakeClock()
        fit = taught(linear(0.01, 2e-5, 1e-9), clock=clock)
        clock.advance(EXPIRE_S + 1)
        assert fit.predict_s((1.0, 100, 100)) is None
        assert fit.prices_s() is None


class TestRecent:
    def recent(self, *values):
        clock = FakeClock()
        one = Recent(clock)
        for value in values:
            clock.advance(1.0)
            one.add(value)
        return one, clock

    def test_outliers_do_not_count(self):
        assert self.recent(1.0, 1.1, 50.0, 1.2, 60.0)[0].usual() == 1.2

    def test_slower_is_believed_after_three(self):
        assert self.recent(1.0, 1.0, 1.0, 50.0, 50.0)[0].usual() == 1.0
        assert self.recent(1.0, 1.0, 50.0, 50.0, 50.0)[0].usual() == 50.0

    def test_quicker_is_believed_at_once(self):
        assert self.recent(50.0, 50.0, 50.0, 1.0)[0].usual() == 1.0

    def test_what_is_held_up_together_counts_once(self):
        one, clock = self.recent(1.0, 1.0)
        clock.advance(1.0)
        for value in (50.0, 49.0, 48.0):
            one.add(value)
        assert (len(one), one.usual()) == (3, 1.0)

    def test_what_is_old_is_forgotten(self):
        one, clock = self.recent(1.0)
        clock.advance(EXPIRE_S + 1)
        assert one.usual() is None
