"""The scheduler half as one of several connectors, inside vLLM's MultiConnector."""

import logging

import pytest
from tests.engines.vllm.test_scheduling import prompt  # noqa: F401
from tests.engines.vllm.toy_engine import WAIT_S, ToyEngine
from tests.server.running import eventually

pytestmark = pytest.mark.engine


@pytest.fixture
def beside(toy, cellar):
    """Return a maker of engines with a bystander before or after ours."""
    made = []

    def make(*, ours_first=False, **bystander):
        own = {
            "kv_connector": "KVCellarConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "kvcellar.port": cellar.port,
                "kvcellar.heartbeat_s": 0.2,
                "kvcellar.lookup_timeout_s": WAIT_S,
            },
        }
        other = {
            "kv_connector": "Bystander",
            "kv_role": "kv_both",
            "kv_connector_module_path": "tests.engines.vllm.bystander",
            "kv_connector_extra_config": bystander,
        }
        connector = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {
                "connectors": [own, other] if ours_first else [other, own]
            },
        }
        made.append(ToyEngine(toy, cellar.port, connector=connector))
        made[-1].wait_bound()
        return made[-1]

    yield make
    for one in made:
        with one:
            one.settle()
    held = cellar.status()["kvcellar"]
    assert (held["leases"], held["reservations"]) == (0, 0)


def test_it_stores_and_hits_where_nobody_else_has_anything(beside, prompt):  # noqa: F811
    one, text = beside(), prompt(200)
    one.ask(text)
    one.reset()
    assert one.ask(text)[1] == 192


def test_it_waits_while_the_other_asks_for_patience(beside, prompt):  # noqa: F811
    one, text = beside(patience=5), prompt(200)
    one.ask(text)
    one.reset()
    assert one.ask(text)[1] == 192


def test_a_load_of_the_other_gives_our_lease_back_and_is_stored(beside, prompt, cellar):  # noqa: F811
    """vLLM takes the first that has anything, also where we have more."""
    one, text = beside(claim=64), prompt(200)
    one.ask(text)
    one.settle()
    assert one.half.stores.counts.stored == 6
    one.reset()
    one.add(text, 100)
    one.run_until(lambda: one.scheduler.running)
    assert (len(one.half.lookups), one.held()[0]) == (0, 0)
    eventually(lambda: cellar.status()["kvcellar"]["leases"] == 0, timeout_s=1.0)
    one.settle()
    assert one.loaded_tokens == 0


def test_ours_goes_first_where_it_stands_first(beside, prompt):  # noqa: F811
    one, text = beside(ours_first=True, claim=64), prompt(200)
    one.ask(text)
    one.reset()
    assert one.ask(text)[1] == 192


def test_the_user_is_told_which_key_decides_about_failed_loads(beside, caplog):
    with caplog.at_level(logging.WARNING):
        one = beside()
    assert "load failure policy" in caplog.text
    assert "MultiConnector" in caplog.text
    assert one.config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_alone_it_has_failed_loads_recomputed(toy, cellar):
    with ToyEngine(toy, cellar.port) as one:
        assert one.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert one.scheduler.recompute_kv_load_failures is True


def test_alone_it_leaves_failed_loads_to_fail_on_demand(toy, cellar):
    options = {"kvcellar.load_failure_policy": "fail"}
    with ToyEngine(toy, cellar.port, options=options) as one:
        assert one.scheduler.recompute_kv_load_failures is False
