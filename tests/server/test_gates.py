"""What an engine's gate has decided, as it tells a real server and as metrics show it."""

import math

import httpx
import pytest
from tests.server.running import RunningServer

from kvcellar.errors import MalformedError, MismatchError
from kvcellar.protocol.gate import GateFigures, GateReport

FIGURES = GateFigures(7, 1, 2, 5, 0.25, 3e-5, 0.002, 5e10)


def test_metrics_show_the_last_report_by_instance_while_it_lives(server):
    assert server.status_metrics()["kvcellar_gate_refused_hits_total"] == {}
    with server.engine("gated") as engine, server.engine("silent"):
        for figures in (GateFigures(taken=6), FIGURES):
            engine.call(lambda id_, figures=figures: GateReport(id_, figures))
        metrics = server.status_metrics()
        assert metrics["kvcellar_gate_taken_hits_total"] == {"gated": 7}
        assert metrics["kvcellar_gate_shortened_hits_total"] == {"gated": 1}
        assert metrics["kvcellar_gate_explored_hits_total"] == {"gated": 2}
        assert metrics["kvcellar_gate_refused_hits_total"] == {"gated": 5}
        assert metrics["kvcellar_gate_regret_seconds_total"] == {"gated": 0.25}
        assert metrics["kvcellar_gate_prefill_token_seconds"] == {"gated": 3e-5}
        assert metrics["kvcellar_gate_load_overhead_seconds"] == {"gated": 0.002}
        assert metrics["kvcellar_gate_load_bytes_per_second"] == {"gated": 5e10}
        page = httpx.get(f"{server.http}/metrics").text
        assert 'kvcellar_gate_refused_hits_total{instance="gated"} 5' in page


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_figures_that_are_none_are_refused(wrong):
    with (
        RunningServer() as server,
        server.engine("wrong") as engine,
        pytest.raises(MalformedError, match="regret_s"),
    ):
        engine.call(lambda id_: GateReport(id_, GateFigures(regret_s=wrong)))


def test_only_a_scheduler_half_may_report(server):
    with server.tool() as tool, pytest.raises(MismatchError, match="gate_report"):
        tool.call(lambda id_: GateReport(id_, FIGURES), timeout_s=5.0)
