"""Models and settings that are refused at start, with their name and the way out."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.support import require_supported
from kvcellar.errors import UnsupportedModelError

pytestmark = pytest.mark.engine

HEADS = {"block_size": 16, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=128)
EXTENDED = SlidingWindowSpec(**HEADS, sliding_window=128, extra_retained_tokens=4)
LOCAL = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
MAMBA = MambaSpec(block_size=64, shapes=((2, 2),), dtypes=(torch.float32,))


def settings(*, method=None, scales=False, **parallel):
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **parallel,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        speculative_config=SimpleNamespace(method=method) if method else None,
        cache_config=SimpleNamespace(calculate_kv_scales=scales),
    )


def groups(*specs, **flags):
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"model.layers.{index}.attn", "another"], spec, **flags)
            for index, spec in enumerate(specs)
        ],
    )


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        MLAAttentionSpec(**{**HEADS, "num_kv_heads": 1}),
        FullAttentionSpec(**HEADS, sliding_window=128),
    ],
)
def test_one_group_of_full_attention_is_kept(spec):
    assert require_supported(settings(), groups(spec)) == (KVGroup(0, 16),)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_a_draft_model_changes_nothing(method):
    assert require_supported(settings(method=method), groups(FULL)) == (KVGroup(0, 16),)


def test_groups_that_free_blocks_are_kept_each_by_its_own_rule():
    found = require_supported(settings(), groups(WINDOW, FULL, LOCAL, EXTENDED))
    assert found == (
        KVGroup(0, 16, window=128),
        KVGroup(1, 16),
        KVGroup(2, 16, local=64),
        KVGroup(3, 16, window=132),
    )
    assert require_supported(settings(), groups(WINDOW)) == found[:1]


def test_layers_of_one_group_must_keep_the_same_tokens():
    mixed = UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={
            "model.layers.0.attn": WINDOW,
            "another": SlidingWindowSpec(**HEADS, sliding_window=64),
        },
    )
    with pytest.raises(UnsupportedModelError, match="keep different tokens"):
        require_supported(settings(), groups(mixed))


@pytest.mark.parametrize("specs", [[FULL, WINDOW], [FULL, FULL], [WINDOW], [LOCAL]])
def test_a_vllm_that_cannot_fail_a_whole_load_is_told_which_groups_it_would_take(
    specs, monkeypatch
):
    monkeypatch.setattr("kvcellar.engines.vllm.support.can_fail_whole_loads", lambda: False)
    with pytest.raises(UnsupportedModelError) as refusal:
        require_supported(settings(), groups(*specs))
    for name in ["KV group 0", "--disable-hybrid-kv-cache-manager", "a newer vLLM"]:
        assert name in str(refusal.value)
    assert require_supported(settings(), groups(FULL)) == (KVGroup(0, 16),)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([FULL, MAMBA], ["KV group 1 (MambaSpec", "without --kv-transfer-config"]),
        ([CrossAttentionSpec(**HEADS)], ["CrossAttentionSpec"]),
        ([FullAttentionSpec(**HEADS, non_causal=True)], ["looks ahead"]),
        ([], ["no KV cache"]),
    ],
)
def test_other_groups_are_named(specs, names):
    with pytest.raises(UnsupportedModelError) as refusal:
        require_supported(settings(), groups(*specs))
    for name in names:
        assert name in str(refusal.value)
    assert "--kv-transfer-config" in str(refusal.value)


def test_mla_that_cannot_compute_after_a_load_is_refused():
    latent = MLAAttentionSpec(**{**HEADS, "num_kv_heads": 1})

    def require(spec, device="cpu", *, is_chunked=False):
        config = settings()
        config.device_config = SimpleNamespace(device_type=device)
        config.scheduler_config = SimpleNamespace(enable_chunked_prefill=is_chunked)
        return require_supported(config, groups(spec))

    with pytest.raises(UnsupportedModelError, match=r"MLA on this CPU.*--kv-transfer-config"):
        require(latent)
    kept = (KVGroup(0, 16),)
    assert require(latent, "cuda") == require(latent, is_chunked=True) == require(FULL) == kept


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ({"is_eagle_group": True}, "drafts tokens"),
        ({"enable_kv_transfer": False}, "is closed to connectors"),
        ({"host_resident": True}, "lies in host memory"),
    ],
)
@pytest.mark.parametrize("specs", [[FULL], [WINDOW, FULL]])
def test_a_group_of_a_special_kind_is_named(flag, name, specs):
    with pytest.raises(UnsupportedModelError, match=name):
        require_supported(settings(), groups(*specs, **flag))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"prefill_context_parallel_size": 4}, "--prefill-context-parallel-size 4"),
        ({"scales": True}, "--calculate-kv-scales"),
        ({"method": "eagle3"}, "'eagle3'"),
        ({"method": "draft_model"}, "'draft_model'"),
    ],
)
def test_settings_that_make_other_kv_are_named(change, name):
    with pytest.raises(UnsupportedModelError) as refusal:
        require_supported(settings(**change), groups(FULL))
    assert name in str(refusal.value)
    assert "--kv-transfer-config" in str(refusal.value)
