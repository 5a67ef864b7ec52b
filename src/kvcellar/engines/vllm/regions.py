"""Finds the bytes of a block in vLLM's KV cache, and says in the layout what they mean.

vLLM hands a worker one tensor for each layer, in shapes and strides that depend on release,
attention backend and platform. Copies need none of that, only where a block's page begins; the
fingerprint needs all of it, because the same bytes mean something else under another backend,
dtype or instruction set. A layer whose block is not one run of bytes is refused by name. Called by
the worker half when vLLM registers its caches.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import vllm
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheTensor, MLAAttentionSpec

from kvcellar.engines.pages import PageRun, Storage, merge_adjacent
from kvcellar.engines.vllm.versions import optional
from kvcellar.errors import UnsupportedModelError
from kvcellar.layout.shard import PageRegion, ShardLayout, Vectors

__all__ = ["LayerTensor", "find_runs", "shard_layouts"]


# Any: vLLM's configuration objects, see `versions`.

_VECTOR_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16"}
_FORMAT_MAX = 2048


class LayerTensor(Protocol):
    """What is needed of a `torch.Tensor`; the blocks are its first dimension."""

    shape: Sequence[int]
    dtype: object
    device: object

    def stride(self) -> Sequence[int]:
        """Return the strides in elements."""
        ...

    def element_size(self) -> int:
        """Return the bytes of an element."""
        ...

    def storage_offset(self) -> int:
        """Return the first element's index in the storage."""
        ...

    def untyped_storage(self) -> Storage:
        """Return the memory behind the tensor."""
        ...


def find_runs(kv_cache_config: Any, kv_caches: Mapping[str, LayerTensor]) -> list[list[PageRun]]:
    """Return for each KV group where its layers' pages lie, in the order of a shard's bytes.

    Groups may lie in the same memory: a block belongs to one of them.

    Args:
        kv_cache_config: the worker's `KVCacheConfig`.
        kv_caches: layer name to tensor, as vLLM registers them; names that no group lists share
            another layer's memory and are passed over.

    Raises:
        UnsupportedModelError: a layer's blocks are not runs of bytes; the message names it.
    """
    block_count = int(kv_cache_config.num_blocks)
    groups = [
        merge_adjacent(_group_runs(group, kv_caches, block_count))
        for group in kv_cache_config.kv_cache_groups
    ]
    devices = sorted({run.device for runs in groups for run in runs})
    if len(devices) != 1:
        raise UnsupportedModelError(f"the layers lie on {len(devices)} devices {devices}, not one")
    return groups


def _group_runs(
    group: Any, kv_caches: Mapping[str, LayerTensor], block_count: int
) -> list[PageRun]:
    runs = []
    for name, spec in _layer_specs(group).items():
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedModelError(
                f"layer {name}: its cache is a {type(spec).__name__}, which is not kept; "
                "serve this model without the connector"
            )
        if name not in kv_caches:
            raise UnsupportedModelError(f"layer {name}: vLLM registered no tensor for it")
        runs.append(_page_run(name, kv_caches[name], int(spec.page_size_bytes), block_count))
    return runs


def shard_layouts(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, LayerTensor],
    *,
    runs: Sequence[Sequence[PageRun]],
    instruction_set: str,
) -> tuple[ShardLayout, ...]:
    """Return this rank's layout of each KV group, with all that its bytes depend on in it.

    Not in it: addresses, and how many blocks the engine has.

    Args:
        vllm_config: for rank, cache dtype and attention backends.
        kv_cache_config: the worker's `KVCacheConfig`.
        kv_caches: layer name to tensor.
        runs: what `find_runs` gave.
        instruction_set: of the CPU that packs the pages; empty where an accelerator does.
    """
    groups = kv_cache_config.kv_cache_groups
    shared_as = _shared_as(groups)
    about = [
        f"vllm {vllm.__version__.partition('+')[0]}",
        f"layout {_layout_generation(kv_cache_config)}",
        f"cache dtype {vllm_config.cache_config.cache_dtype}",
        f"instruction set {instruction_set or 'none'}",
    ]
    found = []
    for group, its_runs in zip(groups, runs, strict=True):
        pages = {
            name: _describe_page(
                vllm_config, name, spec, kv_caches[name], int(kv_cache_config.num_blocks)
            )
            for name, spec in _layer_specs(group).items()
        }
        layout = ShardLayout(
            rank=int(vllm_config.parallel_config.rank),
            block_tokens=int(group.kv_cache_spec.block_size),
            regions=tuple(PageRegion(run.names[0], run.page_bytes) for run in its_runs),
            format=_format(about, pages, its_runs),
            vectors=_only_vectors(group, kv_caches, its_runs),
            shared_as=shared_as,
        )
        found.append(layout)
    return tuple(found)


def _format(about: list[str], pages: Mapping[str, str], runs: Sequence[PageRun]) -> str:
    """Return what the bytes of a group's pages mean, as text."""
    order = [f"{name} {pages[name]}" for run in runs for name in run.names]
    head = [*about, f"layers {len(order)}, digest {_digest(order)}"]
    kinds = [*dict.fromkeys(pages.values())]
    text = "\n".join([*head, *kinds])
    # Models whose every layer is another kind would give a text without end.
    return text if len(text) <= _FORMAT_MAX else "\n".join([*head, f"pages {_digest(kinds)}"])


def _layer_specs(group: Any) -> Mapping[str, Any]:
    """Return each layer's own specification; layers of one group may have pages of other sizes."""
    each = optional(group.kv_cache_spec, "kv_cache_specs") or {}
    return {name: each.get(name, group.kv_cache_spec) for name in group.layer_names}


def _shared_as(groups: Sequence[Any]) -> int | None:
    """Return the shard that all ranks hold alike; None where each has heads of its own.

    A chunk has the same shards in each KV group, so all of them have to be of that kind.

    What MLA keeps of a token is one latent for all heads, computed alike by every rank of tensor
    parallelism (the only kind, besides data parallelism, that `support` lets through).
    """
    specs = (spec for group in groups for spec in _layer_specs(group).values())
    is_latent = all(type(spec) is MLAAttentionSpec for spec in specs)
    return 0 if is_latent else None


def _layout_generation(kv_cache_config: Any) -> str:
    """Return how this release shapes layers, with the physical order where it has a name."""
    if "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}:
        return f"views {kv_cache_config.kv_cache_layout}"
    return "backend shapes"


def _page_run(name: str, tensor: LayerTensor, page_bytes: int, block_count: int) -> PageRun:
    if isinstance(tensor, list | tuple):
        raise UnsupportedModelError(f"layer {name}: its cache is {len(tensor)} tensors, not one")
    kernel_blocks = tensor.shape[0]
    if kernel_blocks == 0 or kernel_blocks % block_count != 0:
        raise UnsupportedModelError(
            f"layer {name}: shape {tuple(tensor.shape)} does not begin with a multiple of "
            f"{block_count} blocks"
        )
    # An attention kernel may cut the engine's block into several of its own.
    ratio = kernel_blocks // block_count
    element = tensor.element_size()
    strides = tensor.stride()
    stride_bytes = strides[0] * element * ratio
    content_bytes = math.prod(tensor.shape[1:]) * element * ratio
    dims = list(zip(tensor.shape[1:], strides[1:], strict=True))
    if ratio > 1:
        dims.append((ratio, strides[0]))
    offset_bytes = tensor.storage_offset() * element
    storage = tensor.untyped_storage()
    end_bytes = offset_bytes + (block_count - 1) * stride_bytes + page_bytes
    if (
        not _is_dense(dims)
        or content_bytes > page_bytes
        or (block_count > 1 and stride_bytes < page_bytes)
        or end_bytes > storage.nbytes()
    ):
        raise UnsupportedModelError(
            f"layer {name}: a block of shape {tuple(tensor.shape)}, strides {tuple(strides)} in a "
            f"page of {page_bytes} bytes is not one run of bytes; choose a layout that keeps "
            "blocks whole (VLLM_KV_CACHE_LAYOUT=LBHNC)"
        )
    return PageRun(
        names=(name,),
        storage=storage,
        device=str(tensor.device),
        offset_bytes=offset_bytes,
        stride_bytes=stride_bytes if block_count > 1 else max(stride_bytes, page_bytes),
        page_bytes=page_bytes,
        block_count=block_count,
    )


def _is_dense(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether (size, stride) pairs in any order cover one run without holes or overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in dims if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _describe_page(
    vllm_config: Any, name: str, spec: Any, tensor: LayerTensor, block_count: int
) -> str:
    ratio = tensor.shape[0] // block_count
    layer = vllm_config.compilation_config.static_forward_context[name]
    return (
        f"{layer.get_attn_backend().get_name()} {tensor.dtype} {ratio}x{tuple(tensor.shape[1:])}"
        f"/{tuple(tensor.stride()[1:])} of {spec!r}"
    )


def _only_vectors(
    group: Any, kv_caches: Mapping[str, LayerTensor], runs: Sequence[PageRun]
) -> Vectors | None:
    """Return how all pages divide into vectors; None where that is not known or not one answer."""
    if any(len(run.names) != 1 or run.device.startswith("cpu") for run in runs):
        return None
    found = {
        _vectors(spec, kv_caches[name], page_bytes=int(spec.page_size_bytes))
        for name, spec in _layer_specs(group).items()
    }
    return found.pop() if len(found) == 1 else None


def _vectors(spec: Any, tensor: LayerTensor, *, page_bytes: int) -> Vectors | None:
    dtype = _VECTOR_DTYPES.get(str(tensor.dtype))
    elements, tokens = optional(spec, "head_size"), int(spec.block_size)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    # Releases agree in this: blocks first, tokens third, the vectors' elements last.
    is_known = (
        dtype is not None
        and isinstance(elements, int)
        and len(shape) in {4, 5}
        and shape[2] == tokens
        and strides[-1] == 1
        and shape[-1] in {elements, 2 * elements}
        and math.prod(shape[1:]) * tensor.element_size() == page_bytes
    )
    if dtype is None or not is_known or strides[2] % elements:
        return None
    return Vectors(dtype, elements, strides[2] // elements, math.prod(shape[1:]) // elements)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
