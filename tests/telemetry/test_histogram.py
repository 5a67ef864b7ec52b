"""Durations are counted in the bucket that they belong to."""

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.telemetry.histogram import LATENCY_BOUNDS_S, Histogram


def test_a_bound_belongs_to_the_bucket_that_it_ends():
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(seconds)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 1)
    assert snapshot.sum_s == 7.5


@given(st.lists(st.floats(0, 100)))
def test_every_duration_is_counted_once(durations):
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    snapshot = histogram.snapshot()
    assert sum(snapshot.counts) == len(durations)
    assert snapshot.bounds == LATENCY_BOUNDS_S
    at_most_1ms = sum(
        count for bound, count in zip(LATENCY_BOUNDS_S, snapshot.counts, strict=False)
        if bound <= 0.001
    )  # fmt: skip
    assert at_most_1ms == sum(seconds <= 0.001 for seconds in durations)
