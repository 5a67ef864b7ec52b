"""Runs vLLM once for each of several tiny models and writes down what became of it.

`vllm serve` needs three processes and a minute for each model on a busy machine; the engine alone,
in a process that goes from model to model, a third of that. Everything below the HTTP door is the
same: scheduler, connector and worker processes, all made anew for each model. Started twice by
`test_models`, the second time to load what the first one stored, with vLLM's multiprocessing off:
`python -m tests.e2e.model_driver JOB RESULT`.
"""

import gc
import json
import random
import re
import sys
import time
import traceback
import urllib.request
import zlib
from pathlib import Path
from typing import Any

SETTLE_S = 60.0


def main(job_path: Path, result_path: Path) -> None:
    """Run a job's cases in turn; the result has an entry for each, written as they end."""
    job = json.loads(job_path.read_text())
    results: dict[str, Any] = {}
    for case in job["cases"]:
        results[case["name"]] = _run(case, job)
        result_path.write_text(json.dumps(results))


def _run(case: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "num_gpu_blocks_override": 200,
        # With one rank vLLM would put the worker here, where the next model's found what it left.
        "distributed_executor_backend": "mp",
        "kv_transfer_config": job["transfer"],
        **case["options"],
    }
    try:
        llm = LLM(str(Path(job["folder"]) / case["kind"]), **options)
        result = _serve(llm, case, job)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it.
        result = {"refusal": "".join(traceback.format_exception(error))}
    gc.collect()  # An engine that failed has workers that end with it.
    return result


def _serve(llm: Any, case: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    core, loaded = llm.llm_engine.engine_core.engine_core, _loaded_chunks(job)
    stored = _objects(job) + case["objects"]
    # A request that comes before the server knows the engine is computed, after a second at most.
    binder = core.scheduler.connector._scheduler._binder
    _wait(lambda: binder.current() is not None, "a namespace")
    answers = [_ask(llm, core, prompt) for prompt in _prompts(case)]
    _wait(lambda: _objects(job) == stored, f"{stored} objects")
    return {"answers": answers, "loaded_chunks": _loaded_chunks(job) - loaded}


def _prompts(case: dict[str, Any]) -> list[list[int]]:
    """Return a prompt for each length; each repeats itself, so that n-grams find something."""
    source = random.Random(zlib.crc32(case["name"].encode()))
    prompts = []
    for length in case["lengths"]:
        start = [source.randrange(3, 1024) for _ in range(length // 2)]
        prompts.append([*start, *start, source.randrange(3, 1024)][:length])
    return prompts


def _ask(llm: Any, core: Any, prompt: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, detokenize=False
    )
    (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    (said,) = output.outputs
    _wait(lambda: not core.scheduler.has_requests() or core.step() is None, "an idle engine")
    return {
        "tokens": list(said.token_ids),
        "logprobs": [next(iter(each.values())).logprob for each in said.logprobs],
        "cached_tokens": output.num_cached_tokens,
    }


def _objects(job: dict[str, Any]) -> int:
    with urllib.request.urlopen(f"{job['http']}/status", timeout=10) as reply:
        return json.load(reply)["storage_manager"]["l1_manager"]["total_object_count"]


def _loaded_chunks(job: dict[str, Any]) -> int:
    with urllib.request.urlopen(f"{job['http']}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    found = re.search(r"^kvcellar_loaded_chunks_total(?:{.*})? (\S+)$", page, re.MULTILINE)
    return int(float(found[1])) if found else 0


def _wait(condition: Any, what: str) -> None:
    end_s = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
