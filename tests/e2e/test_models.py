"""Each kind of model is loaded as it was computed, or refused at start with its name.

Random tiny models of every kind on vLLM's CPU engine. What a first life of the engine computed and
stored is loaded by a second one, in other processes: its answers must be the same, and the counters
must say that they were loaded. Two engines run at once.
"""

import json
import math
import sys

import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.device import DEVICE
from tests.e2e.model_kinds import are_written
from tests.e2e.node import own_transfer
from tests.e2e.processes import ROOT, Program

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(DEVICE.name != "cpu", reason="the cases are those of vLLM's CPU engine"),
]

DRIVE_S = 900.0
# Without processes of its own the engine's failure at start is an exception that can be read.
ENVIRONMENT = {
    **DEVICE.environment,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM would give local attention full-length KV, which is quicker, unless it is asked not to.
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1",
}
FOLDER = ROOT / ".stack" / "kinds"
ONE_GROUP = "disable_hybrid_kv_cache_manager"
# Steps of a chunk each, so that windows have given blocks away long before the prompt's end.
STEPS = {"max_num_batched_tokens": 256, "block_size": 32}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def case(name, kind, *, lengths=(), hits=(), objects=0, loads=0, says=(), **options):
    """Describe one engine.

    Args:
        name: of the case.
        kind: of the model.
        lengths: of the prompts.
        hits: tokens of each that the second life loads.
        objects: that the first life stores.
        loads: chunks that the second life's ranks load, summed over ranks.
        says: parts of the refusal.
        options: vLLM's.
    """
    return {
        "name": name,
        "kind": kind,
        "lengths": lengths,
        "hits": hits,
        "objects": objects,
        "loads": loads,
        "says": says,
        "options": options,
    }


KEPT = [
    case(
        "gqa-ngram", "gqa", lengths=[700], hits=[512], objects=2, loads=2, speculative_config=NGRAM
    ),
    case("sharing", "sharing", lengths=[700], hits=[512], objects=2, loads=2),
    case("chunked", "chunked", lengths=[700], hits=[512], objects=2, loads=2, **{ONE_GROUP: True}),
    # A full group and three windows of 96 tokens, of which a hit needs only the last chunk's.
    case("windows", "windows", lengths=[700], hits=[512], objects=8, loads=5, **STEPS),
    # Chunks end where spans of local attention do, so that nothing of these is needed …
    case("local-spans", "chunked", lengths=[700], hits=[512], objects=2, loads=2, **STEPS),
    # … or inside of one: the first prompt's hit needs both chunks of it, the second's none.
    case(
        "wide-local-spans",
        "chunked-widely",
        lengths=[700, 1000],
        hits=[512, 768],
        objects=20,
        loads=11,
        **STEPS,
    ),
]
REFUSED = [
    case("recurrent", "recurrent", says=["MambaSpec: model.layers.0.", "without"]),
    case(
        "draft-model",
        "gqa",
        says=["'draft_model' keeps KV of a draft model", "choose one of ngram"],
        speculative_config={
            "method": "draft_model",
            "model": str(FOLDER / "gqa"),
            "num_speculative_tokens": 2,
        },
    ),
]


@pytest.fixture(scope="module")
def lives(folder, stopping):
    """Return what each case's first and second life came to; two engines at a time."""
    if not are_written(FOLDER):
        writer = Program(
            "kinds", [sys.executable, "-m", "tests.e2e.model_kinds", str(FOLDER)], folder=folder
        )
        stopping(writer).start(ENVIRONMENT)
        assert writer.wait_for_end(DRIVE_S) == 0, writer.tail()
    cellars = [stopping(Cellar(f"node{index}", folder=folder, l1_gb=0.5)) for index in range(2)]
    for cellar in cellars:
        cellar.start_and_wait()

    def live(name, cases):
        drivers = []
        for index, cellar in enumerate(cellars):
            job, result = (folder / f"{name}{index}.{kind}" for kind in ("job", "result"))
            told = {
                "cases": cases[index :: len(cellars)],
                "folder": str(FOLDER),
                "transfer": own_transfer(cellar),
                "http": f"http://127.0.0.1:{cellar.http_port}",
            }
            job.write_text(json.dumps(told))
            command = [sys.executable, "-m", "tests.e2e.model_driver", str(job), str(result)]
            drivers.append((stopping(Program(f"{name}{index}", command, folder=folder)), result))
            drivers[-1][0].start(ENVIRONMENT)
        results = {}
        for driver, result in drivers:
            assert driver.wait_for_end(DRIVE_S) == 0, driver.tail()
            results |= json.loads(result.read_text())
        return results

    first = live("first", KEPT)
    return first, live("second", [*({**each, "objects": 0} for each in KEPT), *REFUSED])


@pytest.mark.parametrize("kept", KEPT, ids=lambda each: each["name"])
def test_a_kind_is_loaded_as_it_was_computed(lives, kept):
    first, second = (life[kept["name"]] for life in lives)
    assert first.get("refusal", "") == ""
    assert (first["loaded_chunks"], second["loaded_chunks"]) == (0, kept["loads"])
    for cold, hit, tokens in zip(first["answers"], second["answers"], kept["hits"], strict=True):
        assert (cold["cached_tokens"], hit["cached_tokens"]) == (0, tokens)
        assert hit["tokens"] == cold["tokens"]
        for mine, theirs in zip(hit["logprobs"], cold["logprobs"], strict=True):
            assert math.isclose(mine, theirs, abs_tol=DEVICE.logprob_tolerance)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda each: each["name"])
def test_a_kind_that_cannot_be_kept_is_refused_by_name(lives, refused):
    refusal = lives[1][refused["name"]]["refusal"]
    for part in ["--kv-transfer-config", *refused["says"]]:
        assert part in refusal
