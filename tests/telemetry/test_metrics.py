"""The Prometheus text is what Prometheus reads: every family always, no series twice."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvcellar.telemetry.histogram import Histogram
from kvcellar.telemetry.metrics import FAMILIES, render


def parsed(values):
    return {family.name: family for family in text_string_to_metric_families(render(values))}


def series(families):
    return [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families.values()
        for sample in family.samples
    ]


def test_every_family_is_there_before_anything_happened():
    families = parsed({})
    assert {f.name.removesuffix("_total") for f in FAMILIES} == set(families)
    assert {f.name.removesuffix("_total"): f.kind for f in FAMILIES} == {
        name: family.type for name, family in families.items()
    }
    unlabelled = [family for family in FAMILIES if not family.label]
    assert all(families[f.name.removesuffix("_total")].samples for f in unlabelled)


def test_names_are_unique_and_follow_the_rules():
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    assert all(
        (f.name.startswith("kvcellar_") and f.help.endswith(".")) or f.label for f in FAMILIES
    )
    assert all(f.name.endswith("_total") == (f.kind == "counter") for f in FAMILIES)


def test_values_labels_and_histograms_come_out_as_they_went_in():
    histogram = Histogram((0.001, 0.1))
    for seconds in (0.0005, 0.05, 0.06, 7.0):
        histogram.observe(seconds)
    families = parsed(
        {
            "kvcellar_lookups_total": 2**53 + 1,
            "kvcellar_error_replies_total": {"mismatch": 3, 'a"b\\c\nd': 1},
            "kvcellar_uptime_seconds": 1.25,
            "kvcellar_lookup_seconds": msgspec.to_builtins(histogram.snapshot()),
        }
    )
    assert f"kvcellar_lookups_total {2**53 + 1}\n" in render({"kvcellar_lookups_total": 2**53 + 1})
    errors = families["kvcellar_error_replies"].samples
    assert {s.labels["code"]: s.value for s in errors} == {"mismatch": 3, 'a"b\\c\nd': 1}
    assert families["kvcellar_uptime_seconds"].samples[0].value == 1.25
    lookup = {
        (s.name, s.labels.get("le")): s.value for s in families["kvcellar_lookup_seconds"].samples
    }
    assert lookup == {
        ("kvcellar_lookup_seconds_bucket", "0.001"): 1,
        ("kvcellar_lookup_seconds_bucket", "0.1"): 3,
        ("kvcellar_lookup_seconds_bucket", "+Inf"): 4,
        ("kvcellar_lookup_seconds_sum", None): 7.1105,
        ("kvcellar_lookup_seconds_count", None): 4,
    }
    found = series(families)
    assert len(found) == len(set(found))
