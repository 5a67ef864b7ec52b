"""Two salts with quotas in one real engine: each keeps to its own, and finds what it has there."""

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Engine, assert_same_answer, start_together
from tests.e2e.node import own_transfer, watched

pytestmark = pytest.mark.e2e

OPTIONS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "160")
GB = 1 << 30


def test_a_quota_bounds_its_salt_and_leaves_the_other_alone(tiny, folder, stopping, prompt):
    cellar = Cellar(
        "tenants", folder=folder, l1_gb=0.25, flags=("--eviction-policy", "IsolatedLRU")
    )
    stopping(cellar).start_and_wait()
    engine = Engine(
        "tenants-engine", tiny, folder=folder, transfer=own_transfer(cellar), options=OPTIONS
    )
    start_together(stopping(engine))

    def chunks(salt):
        page = cellar.http.get(f"/quota/{salt}").json()
        return round(page["current_usage_gb"] * GB / chunk_bytes)

    kept = prompt(600)
    cold = engine.complete(kept, cache_salt="alice")
    cellar.wait_for_objects(2)
    l1 = cellar.status()["storage_manager"]["l1_manager"]
    chunk_bytes = l1["memory_used_bytes"] // 2
    for salt, count in (("alice", 2), ("bob", 4)):
        answer = cellar.http.put(f"/quota/{salt}", json={"limit_gb": count * chunk_bytes / GB})
        assert answer.status_code == 200
    prompts = [prompt(600) for _ in range(5)]
    for tokens in prompts:
        engine.complete(tokens, cache_salt="bob")
        cellar.wait_until_quiet()
        assert chunks("bob") <= 4
    engine.complete(prompt(600), cache_salt="alice")
    cellar.wait_until_quiet()
    assert (chunks("alice"), chunks("bob")) == (2, 4)

    engine.reset_prefix_cache()
    newest, counted = watched(engine, lambda: engine.complete(prompts[-1], cache_salt="bob"))
    assert counted.external_hits == 512
    _, counted = watched(engine, lambda: engine.complete(prompts[0], cache_salt="bob"))
    assert counted.external_hits == 0
    assert len(newest.tokens) == 8
    # Alice's second prompt took the place of her first, and of nobody else's.
    again, counted = watched(engine, lambda: engine.complete(kept, cache_salt="alice"))
    assert counted.external_hits == 0
    assert_same_answer(again, cold)
    cellar.wait_until_quiet()
    engine.reset_prefix_cache()
    hit, counted = watched(engine, lambda: engine.complete(kept, cache_salt="alice"))
    assert counted.external_hits == 512
    assert_same_answer(hit, cold)
    assert cellar.http.get("/quota").json()["users"].keys() == {"alice", "bob"}
