"""Two engines are the same engine exactly when their KV is."""

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engines.vllm.toy_engine import make_config
from tests.engines.vllm.toy_model import write_model

from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.identity import canonical_json, engine_fields
from kvcellar.keys.digest import engine_digest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(toy):
    """Return a maker of configurations; an argument `a__b` sets the attribute `a.b`."""
    made = make_config(toy, 5555, blocks=8)

    def make(**changes):
        one = copy.deepcopy(made)
        for path, value in changes.items():
            *parents, name = path.split("__")
            target = one
            for parent in parents:
                target = getattr(target, parent)
            setattr(target, name, value)
        return one

    return make


def digest(config, *groups):
    return engine_digest(engine_fields(config, groups=groups or (KVGroup(0, 16),)))


def test_what_kv_does_not_depend_on_does_not_count(config):
    """Names, ports, limits, seeds of sampling: two such engines share their chunks."""
    plain = digest(config())
    for changes in (
        {"model_config__served_model_name": "other"},
        {"model_config__seed": 7},
        {"model_config__max_model_len": 512},
        {"model_config__enforce_eager": True},
        {"cache_config__num_gpu_blocks": 9},
        {"cache_config__enable_prefix_caching": False},
        {"scheduler_config__max_num_seqs": 3},
        {"kv_transfer_config__engine_id": "other"},
        {"parallel_config__data_parallel_rank": 1},
        {"model_config__hf_config___name_or_path": "elsewhere"},
        {"model_config__hf_config__transformers_version": "9.9"},
    ):
        assert digest(config(**changes)) == plain, changes


def test_everything_that_kv_depends_on_counts(config):
    variants = [
        config(),
        config(model_config__dtype="bfloat16"),
        config(model_config__quantization="fp8"),
        config(model_config__revision="v2"),
        config(model_config__disable_sliding_window=True),
        config(model_config__hf_config__rope_theta=20_000.0),
        config(model_config__hf_config__num_key_value_heads=2),
        config(cache_config__cache_dtype="fp8"),
        config(cache_config__kv_cache_dtype_skip_layers=["0"]),
        config(parallel_config__tensor_parallel_size=2),
        config(load_config__load_format="dummy"),
        config(load_config__load_format="dummy", model_config__seed=7),
    ]
    digests = [digest(variant) for variant in variants] + [
        digest(variants[0], KVGroup(0, 32)),
        digest(variants[0], KVGroup(0, 16), KVGroup(1, 16)),
        digest(variants[0], KVGroup(0, 16), KVGroup(1, 16, window=64)),
        digest(variants[0], KVGroup(0, 16), KVGroup(1, 16, local=64)),
    ]
    assert len(set(digests)) == len(digests)


def test_the_longest_prompt_counts_where_the_angles_depend_on_it(config):
    stretched = {"rope_type": "longrope", "factor": 4.0}
    short = config(model_config__hf_config__rope_scaling=stretched)
    long = config(model_config__hf_config__rope_scaling=stretched, model_config__max_model_len=512)
    assert digest(short) != digest(long)


def test_other_weights_under_the_same_name_count(config, tmp_path):
    folder = write_model(tmp_path / "model", seed=1)
    one = config(model_config__model=str(folder))
    before = digest(one)
    assert digest(one) == before
    write_model(folder, seed=2)
    assert digest(one) != before


def test_the_same_weights_elsewhere_are_the_same(config, tmp_path, toy):
    moved = write_model(tmp_path / "moved")
    assert digest(config(model_config__model=str(moved))) == digest(config())


def test_weights_that_cannot_be_found_are_named_and_said(config, caplog):
    unknown = config(model_config__model="nobody/such-model")
    fields = engine_fields(unknown, groups=(KVGroup(0, 16),))
    assert fields["weights.name"] == "nobody/such-model"
    assert "weights not found" in caplog.text
    other = config(model_config__model="nobody/another-model")
    assert digest(other) != digest(unknown)


def test_a_draft_model_counts(config, toy):
    def drafting(name):
        model = SimpleNamespace(
            hf_config=config().model_config.hf_config, model=name, revision=None
        )
        return config(speculative_config=SimpleNamespace(draft_model_config=model))

    assert len({digest(config()), digest(drafting("a")), digest(drafting("b"))}) == 3


def test_settings_of_images_count(config):
    def seeing(**settings):
        return config(model_config__multimodal_config=SimpleNamespace(**settings))

    one = seeing(mm_processor_kwargs={"min_pixels": 1})
    other = seeing(mm_processor_kwargs={"min_pixels": 2})
    cached = seeing(mm_processor_kwargs={"min_pixels": 1}, mm_processor_cache_gb=9)
    assert digest(one) != digest(other)
    assert digest(one) == digest(cached)


def test_text_is_the_same_for_equal_configurations_and_no_others():
    assert canonical_json({"b": 1, "a": (1, 2)}) == canonical_json({"a": [1, 2], "b": 1})
    assert canonical_json({"a": {3, 1, 2}}) == canonical_json({"a": {2, 3, 1}})
    texts = [canonical_json(value) for value in (1, 1.0, True, "1", None, [1], {"1": 1}, {})]
    assert len(set(texts)) == len(texts)


def test_text_holds_no_address_in_memory():
    assert canonical_json({"a": object()}) == canonical_json({"a": object()})


def plain_config():
    """Return a configuration of plain objects, for a process without vLLM."""
    named = SimpleNamespace
    settings = {"b": {"y", "x", "z"}, "a": [1, 2.5, None], "_name_or_path": "here"}
    return named(
        model_config=named(
            hf_config=named(to_dict=lambda: settings),
            dtype="float32",
            quantization=None,
            disable_sliding_window=False,
            revision=None,
            code_revision=None,
            seed=3,
        ),
        cache_config=named(cache_dtype="auto", kv_cache_dtype_skip_layers={"2", "1", "0"}),
        parallel_config=named(
            tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        load_config=named(load_format="dummy"),
        speculative_config=None,
    )


@pytest.mark.parametrize("seed", ["1", "77"])
def test_other_processes_with_other_hash_seeds_come_to_the_same(seed):
    code = (
        "import sys, types\n"
        "from types import SimpleNamespace\n"
        "sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "from kvcellar.engines.vllm.groups import KVGroup\n"
        "from kvcellar.engines.vllm.identity import engine_fields\n"
        "from kvcellar.keys.digest import engine_digest\n"
        f"{inspect.getsource(plain_config)}"
        "print(engine_digest(engine_fields(plain_config(), groups=[KVGroup(0, 16)])).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")}
    printed = subprocess.check_output(
        [sys.executable, "-c", code], env=environment, text=True, timeout=100
    )
    assert printed.strip() == digest(plain_config()).hex()
