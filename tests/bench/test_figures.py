"""Medians, percentiles, and the sampling that they come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.bench.figures import latency, median, percentile, sample
from kvcellar.clock import FakeClock

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(VALUES, st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, share):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], 3.0), ([9.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 2.0, 9.0], 3.0)]
)
def test_the_median_is_in_the_middle(values, expected):
    assert median(values) == expected


def test_latency_of_a_hundred_calls_leaves_one_out():
    figures = latency([float(number) for number in range(1, 101)])
    assert (figures.count, figures.p50_s, figures.p99_s) == (100, 50.0, 99.0)


def test_sampling_goes_on_for_the_time_and_skips_the_first_calls():
    clock = FakeClock()
    calls = []

    def call():
        calls.append(None)
        clock.advance(0.01)
        return float(len(calls))

    figures = sample(call, seconds=5.0, clock=clock)
    assert figures.count == pytest.approx(500, abs=1)
    assert figures.p50_s == pytest.approx(253, abs=1)


def test_sampling_makes_a_hundred_calls_however_slow_they_are():
    clock = FakeClock()

    def call():
        clock.advance(1.0)
        return 1.0

    assert sample(call, seconds=0.5, clock=clock).count == 100
