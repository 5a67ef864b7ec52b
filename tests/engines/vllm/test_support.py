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
)

from kvcellar.engines.vllm.support import require_supported
from kvcellar.errors import UnsupportedModelError

pytestmark = pytest.mark.engine

HEADS = {"block_size": 16, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=128)
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
    assert require_supported(settings(), groups(spec)) == 16


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_a_draft_model_changes_nothing(method):
    assert require_supported(settings(method=method), groups(FULL)) == 16


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([FULL, WINDOW], ["KV group 1 (SlidingWindowSpec: model.layers.1.attn and 1 more)"]),
        ([FULL, FULL], ["2 KV groups", "model.layers.0.attn", "model.layers.1.attn"]),
        ([WINDOW], ["KV group 0", "SlidingWindowSpec", "--disable-hybrid-kv-cache-manager"]),
        ([FULL, MAMBA], ["KV group 1 (MambaSpec", "without --kv-transfer-config"]),
        ([CrossAttentionSpec(**HEADS)], ["CrossAttentionSpec"]),
        (
            [ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)],
            ["ChunkedLocalAttentionSpec"],
        ),
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
    assert require(latent, "cuda") == require(latent, is_chunked=True) == require(FULL) == 16


def test_a_window_on_some_layers_is_answered_with_the_flag_that_helps():
    with pytest.raises(UnsupportedModelError, match="--disable-hybrid-kv-cache-manager"):
        require_supported(settings(), groups(FULL, WINDOW))


def test_a_group_of_draft_layers_is_named():
    with pytest.raises(UnsupportedModelError, match="drafts tokens"):
        require_supported(settings(), groups(FULL, is_eagle_group=True))


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
