"""The bytes of a block, in every layout that vLLM 0.25.1 and 0.32 have, against plain torch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvcellar.engines.vllm.regions import find_runs, shard_layouts
from kvcellar.errors import UnsupportedModelError

pytestmark = pytest.mark.engine


def attention_spec(heads=2, tokens=4, size=8, dtype=torch.float32, **more):
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=size, dtype=dtype, **more
    )


def config_of(specs, block_count, *, group_spec=None):
    group = KVCacheGroupSpec(list(specs), group_spec or next(iter(specs.values())))
    return KVCacheConfig(num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=[group])


def engine_config(names, *, backend="CPU_ATTN", rank=0, cache_dtype="auto"):
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, world_size=1),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
    )


def placed_views(layout, spec, names, block_count, kernel_tokens=None):
    """One allocation with a view a layer, made by vLLM's own function."""
    page, layers = spec.page_size_bytes, len(names)
    order = layout.stride_order
    if order[0] == 0:
        layer_stride, block_stride = page * block_count, page
    else:
        layer_stride, block_stride = page, page * layers
    if layout is KVCacheLayout.LHBNC:
        block_stride = page // spec.num_kv_heads
    if layout is KVCacheLayout.BHLNC:
        layer_stride = page // spec.num_kv_heads
    raw = torch.randint(-128, 128, (page * layers * block_count,), dtype=torch.int8)
    placement = KVCacheTensor(
        size=raw.numel(), layers=names, layer_stride=layer_stride, block_stride=block_stride
    )
    views = create_kv_cache_views(raw, spec, block_count, layout, placement, kernel_tokens)
    return dict(zip(names, views, strict=True))


def plain_page(tensor, block, block_count):
    """The bytes of a block in the order of memory, by torch alone."""
    ratio = tensor.shape[0] // block_count
    part = tensor[block * ratio : (block + 1) * ratio]
    order = sorted(range(part.dim()), key=lambda dim: -part.stride(dim))
    return bytes(part.permute(order).contiguous().view(torch.uint8).flatten().numpy())


def page_of(run, block):
    view = torch.empty(0, dtype=torch.uint8).set_(
        run.storage, run.offset_bytes + block * run.stride_bytes, (run.page_bytes,), (1,)
    )
    return bytes(view.numpy())


def assert_pages_are_plain(runs, tensors, block_count):
    for run in runs:
        for block in range(block_count):
            expected = b"".join(plain_page(tensors[n], block, block_count) for n in run.names)
            assert expected == page_of(run, block), (run.names, block)


WHOLE = [layout for layout in KVCacheLayout if layout.is_block_compact]


@settings(max_examples=40)
@given(
    layout=st.sampled_from(WHOLE),
    heads=st.integers(1, 3),
    layers=st.integers(1, 4),
    block_count=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_views_of_one_storage_give_the_bytes_of_each_block(
    layout, heads, layers, block_count, dtype
):
    names = [f"model.layers.{index}.attn" for index in range(layers)]
    spec = attention_spec(heads=heads, dtype=dtype)
    tensors = placed_views(layout, spec, names, block_count)
    (runs,) = find_runs(config_of(dict.fromkeys(names, spec), block_count), tensors)
    assert sorted(names) == sorted(name for run in runs for name in run.names)
    assert_pages_are_plain(runs, tensors, block_count)


def test_a_block_outermost_layout_is_one_run_for_all_layers():
    names = ["a", "b", "c"]
    spec = attention_spec()
    tensors = placed_views(KVCacheLayout.BLHNC, spec, names, 4)
    ((run,),) = find_runs(config_of(dict.fromkeys(names, spec), 4), tensors)
    assert run.names == ("a", "b", "c")
    assert 3 * spec.page_size_bytes == run.page_bytes == run.stride_bytes


def test_kernel_blocks_are_regrouped_to_the_engines_blocks():
    names = ["a", "b"]
    spec = attention_spec(tokens=8)
    tensors = placed_views(KVCacheLayout.LBHNC, spec, names, 3, kernel_tokens=2)
    assert tensors["a"].shape[0] == 12
    (runs,) = find_runs(config_of(dict.fromkeys(names, spec), 3), tensors)
    assert [spec.page_size_bytes] * 2 == [run.page_bytes for run in runs]
    assert_pages_are_plain(runs, tensors, 3)


def test_padding_at_a_pages_end_belongs_to_the_page():
    names = ["a", "b"]
    spec = attention_spec(page_size_padded=1024)
    assert spec.unpadded_page_size_bytes < 1024
    tensors = placed_views(KVCacheLayout.LBHNC, spec, names, 3)
    (runs,) = find_runs(config_of(dict.fromkeys(names, spec), 3), tensors)
    for run in runs:
        assert (run.page_bytes, run.stride_bytes) == (1024, 1024)
        for block in range(3):
            expected = plain_page(tensors[run.names[0]], block, 3)
            assert page_of(run, block).startswith(expected)


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC])
def test_a_layout_that_tears_blocks_apart_is_refused_by_layer(layout):
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    spec = attention_spec(heads=2)
    tensors = placed_views(layout, spec, names, 3)
    with pytest.raises(UnsupportedModelError, match=r"layer model\.layers\.0\.attn: .*one run"):
        find_runs(config_of(dict.fromkeys(names, spec), 3), tensors)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)], ids=["NHD", "HND"])
def test_backend_shapes_of_old_releases_give_the_bytes_of_each_block(order):
    names, block_count = ["a", "b"], 4
    spec = attention_spec()
    tensors = {}
    for name in names:
        shape = (block_count, 2, 4, 2, 8)
        physical = torch.randn([shape[dim] for dim in order])
        tensors[name] = physical.permute([order.index(dim) for dim in range(5)])
        assert shape == tuple(tensors[name].shape)
    (runs,) = find_runs(config_of(dict.fromkeys(names, spec), block_count), tensors)
    assert len(runs) == 2
    assert_pages_are_plain(runs, tensors, block_count)


def test_old_packed_allocations_give_the_bytes_of_each_block():
    names, block_count, page = ["a", "b", "c"], 4, attention_spec().page_size_bytes
    raw = torch.randint(-128, 128, (block_count, 3 * page + 64), dtype=torch.int8)
    tensors = {}
    for index, name in enumerate(names):
        flat = raw[:, index * page : (index + 1) * page].view(torch.float32)
        tensors[name] = flat.unflatten(1, (2, 4, 2, 8))
    (runs,) = find_runs(config_of(dict.fromkeys(names, attention_spec()), block_count), tensors)
    assert [run.names for run in runs] == [("a", "b", "c")]
    assert 3 * page + 64 == runs[0].stride_bytes
    assert_pages_are_plain(runs, tensors, block_count)


def test_latent_and_indexer_layers_of_one_group_have_pages_of_their_own_size():
    mla = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    indexer = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=20, dtype=torch.uint8)
    specs = {"l0.attn": mla, "l0.indexer": indexer, "l1.attn": mla, "l1.indexer": indexer}
    tensors = {
        name: torch.randint(0, 255, (5, 4, spec.head_size * spec.dtype.itemsize))
        .to(torch.uint8)
        .view(spec.dtype)
        for name, spec in specs.items()
    }
    uniform = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    (runs,) = find_runs(config_of(specs, 5, group_spec=uniform), tensors)
    assert [run.page_bytes for run in runs] == [192, 80, 192, 80]
    assert_pages_are_plain(runs, tensors, 5)


@pytest.mark.parametrize(
    ("kinds", "shared_as"),
    [
        ([MLAAttentionSpec], 0),
        ([MLAAttentionSpec, MLAAttentionSpec], 0),
        ([MLAAttentionSpec, FullAttentionSpec], None),
        ([FullAttentionSpec], None),
    ],
)
def test_only_latents_are_the_same_on_all_ranks(kinds, shared_as):
    specs = {
        str(index): kind(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        for index, kind in enumerate(kinds)
    }
    tensors = {
        name: torch.zeros(5, spec.page_size_bytes // 2, dtype=torch.bfloat16)
        for name, spec in specs.items()
    }
    group_spec = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    config = config_of(specs, 5, group_spec=group_spec)
    (layout,) = shard_layouts(
        engine_config(specs, rank=2),
        config,
        tensors,
        runs=find_runs(config, tensors),
        instruction_set="",
    )
    assert layout.shared_as == shared_as
    assert layout.shard() == (2 if shared_as is None else 0)


def test_layers_that_share_memory_are_copied_once():
    spec = attention_spec()
    tensors = placed_views(KVCacheLayout.LBHNC, spec, ["a", "b"], 3)
    tensors["shares a"] = tensors["a"]
    tensors["not of the group"] = tensors["b"]
    config = config_of(dict.fromkeys(["a", "b", "shares a"], spec), 3)
    assert [run.names for run in find_runs(config, tensors)[0]] == [("a",), ("b",)]


def test_blocks_that_are_not_outermost_are_refused_by_layer():
    spec = attention_spec()
    tensors = {"kv first": torch.zeros(2, 5, 4, 2, 8)}
    with pytest.raises(UnsupportedModelError, match=r"layer kv first: .*multiple of 5 blocks"):
        find_runs(config_of({"kv first": spec}, 5), tensors)


def test_each_group_has_its_own_layers_in_memory_that_they_share():
    """vLLM lays a layer of each group over the same bytes; a block is that of one group."""
    spec, block_count = attention_spec(), 4
    tensors = placed_views(KVCacheLayout.LBHNC, spec, ["a0", "a1"], block_count)
    tensors |= {"b0": tensors["a0"], "b1": tensors["a1"]}
    groups = [KVCacheGroupSpec([f"{kind}0", f"{kind}1"], spec) for kind in "ab"]
    config = KVCacheConfig(num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=groups)
    runs = find_runs(config, tensors)
    assert [[run.names for run in each] for each in runs] == [
        [("a0",), ("a1",)],
        [("b0",), ("b1",)],
    ]
    for each in runs:
        assert_pages_are_plain(each, tensors, block_count)
    layouts = shard_layouts(
        engine_config(list(tensors)), config, tensors, runs=runs, instruction_set=""
    )
    assert [layout.regions[0].name for layout in layouts] == ["a0", "b0"]
    assert layouts[0].fingerprint() != layouts[1].fingerprint()


def test_a_shard_is_shared_only_where_every_group_is_a_latent():
    latent = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    tensor = torch.zeros(3, 4, 8)

    def shared(*specs):
        groups = [KVCacheGroupSpec([f"l{index}"], spec) for index, spec in enumerate(specs)]
        tensors = {f"l{index}": tensor for index in range(len(specs))}
        config = KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=groups)
        engine, runs = engine_config(list(tensors)), find_runs(config, tensors)
        layouts = shard_layouts(engine, config, tensors, runs=runs, instruction_set="")
        return [layout.shared_as for layout in layouts]

    assert shared(latent, latent) == [0, 0]
    assert shared(latent, attention_spec(heads=1, size=4)) == [None, None]


def test_a_state_cache_is_refused_by_layer():
    spec = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedModelError, match=r"layer mixer: .*MambaSpec"):
        find_runs(config_of({"mixer": spec}, 3), {"mixer": torch.zeros(3, 6)})


def test_a_layer_without_tensor_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="layer a: vLLM registered no tensor"):
        find_runs(config_of({"a": attention_spec()}, 3), {})


def layout_of(layout, spec, *, names=("a", "b"), blocks=3, isa="amd64 AVX512", **engine):
    tensors = placed_views(layout, spec, list(names), blocks)
    config = config_of(dict.fromkeys(names, spec), blocks)
    (layout,) = shard_layouts(
        engine_config(names, **engine),
        config,
        tensors,
        runs=find_runs(config, tensors),
        instruction_set=isa,
    )
    return layout


def test_engines_that_differ_in_blocks_only_share_a_layout():
    few = layout_of(KVCacheLayout.LBHNC, attention_spec(), blocks=3)
    many = layout_of(KVCacheLayout.LBHNC, attention_spec(), blocks=64)
    assert few == many == layout_of(KVCacheLayout.LBHNC, attention_spec(), blocks=1)
    assert few.fingerprint() == many.fingerprint()
    assert few.block_tokens == 4
    assert 2 * attention_spec().page_size_bytes == few.block_bytes()


def test_whatever_changes_the_meaning_of_the_bytes_changes_the_fingerprint():
    plain = attention_spec()
    variants = [
        layout_of(KVCacheLayout.LBHNC, plain),
        layout_of(KVCacheLayout.LBNHC, plain),
        layout_of(KVCacheLayout.BLHNC, plain),
        layout_of(KVCacheLayout.LBHNC, plain, isa="amd64 AVX2"),
        layout_of(KVCacheLayout.LBHNC, plain, backend="TRITON_ATTN"),
        layout_of(KVCacheLayout.LBHNC, plain, cache_dtype="fp8_e5m2"),
        layout_of(KVCacheLayout.LBHNC, plain, rank=1),
        layout_of(KVCacheLayout.LBHNC, plain, names=("b", "a")),
        layout_of(KVCacheLayout.LBHNC, plain, names=("a", "c")),
        layout_of(KVCacheLayout.LBHNC, plain, names=("a", "b", "c")),
        layout_of(KVCacheLayout.LBHNC, attention_spec(dtype=torch.int32)),
        layout_of(KVCacheLayout.LBHNC, attention_spec(dtype=torch.bfloat16)),
        layout_of(KVCacheLayout.LBHNC, attention_spec(heads=4, size=4)),
        layout_of(KVCacheLayout.LBHNC, attention_spec(tokens=8)),
        layout_of(KVCacheLayout.LBHNC, dataclasses.replace(plain, sliding_window=16)),
    ]
    assert len(variants) == len({variant.fingerprint() for variant in variants})


def test_the_format_stays_short_for_models_of_many_kinds_of_layers():
    names = [f"model.layers.{index}.attn" for index in range(200)]
    specs = {name: attention_spec(size=8 + index) for index, name in enumerate(names)}
    tensors = {
        name: placed_views(KVCacheLayout.LBHNC, spec, [name], 2)[name]
        for name, spec in specs.items()
    }
    config = config_of(
        specs, 2, group_spec=UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    )
    (layout,) = shard_layouts(
        engine_config(names),
        config,
        tensors,
        runs=find_runs(config, tensors),
        instruction_set="",
    )
    assert len(layout.format) <= 2048
    assert len(layout.regions) == 200
