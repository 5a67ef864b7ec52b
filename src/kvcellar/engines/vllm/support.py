"""Which models and settings the connector can keep safely, and what to do about the others.

A model whose KV is not a plain function of the tokens before it, block by block, would be kept
wrongly; so would one whose groups free blocks, in a vLLM that cannot be told that a load of theirs
failed. It is refused at start with the name of the group or setting and the way out. Called by both
halves before anything else, so that no chunk is ever stored for such a model.
"""

from typing import Any

from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.versions import (
    can_fail_whole_loads,
    group_flags,
    has_measured_kv_scales,
    optional,
)
from kvcellar.errors import UnsupportedModelError

__all__ = ["require_supported"]

# Any: vLLM's configuration objects, see `versions`.

WHOLE_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Kinds of KV whose blocks depend on the tokens before them and stay as long as the request."""
WINDOW_KIND = "SlidingWindowSpec"
LOCAL_KIND = "ChunkedLocalAttentionSpec"
GROUP_KINDS = WHOLE_KINDS | {WINDOW_KIND, LOCAL_KIND}
"""All kinds that are kept; those with a window or with local spans free blocks as they go."""

DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways to speculate that keep no KV of their own."""


def require_supported(vllm_config: Any, kv_cache_config: Any) -> tuple[KVGroup, ...]:
    """Check the engine's settings and the model's KV groups.

    Returns:
        What the groups keep, in vLLM's order.

    Raises:
        UnsupportedModelError: the connector cannot keep this; the message names what and the fix.
    """
    _require_settings(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedModelError(
            "the model has no KV cache: remove --kv-transfer-config, there is nothing to keep"
        )
    for index, group in enumerate(groups):
        _require_plain(index, group)
        _require_resumable(vllm_config, group)
    found = tuple(_kept(index, group) for index, group in enumerate(groups))
    if not can_fail_whole_loads() and not (len(found) == 1 and found[0].is_whole):
        names = "; ".join(_named(index, group) for index, group in enumerate(groups))
        raise UnsupportedModelError(
            f"this vLLM cannot be told that a load of several KV groups or of a window failed, and "
            f"the model has {len(found)}: {names}. {_ONE_GROUP}, or use a newer vLLM"
        )
    return found


def _kept(index: int, group: Any) -> KVGroup:
    """Return what a group keeps; its layers must agree."""
    kept = {_kept_of(index, group, spec) for spec in _layer_specs(group)}
    if len(kept) != 1:
        kinds = ", ".join(sorted(each.describe() for each in kept))
        raise UnsupportedModelError(
            f"{_named(index, group)} cannot be kept: its layers keep different tokens ({kinds}); "
            "run this model without --kv-transfer-config"
        )
    return kept.pop()


def _kept_of(index: int, group: Any, spec: Any) -> KVGroup:
    block_tokens, kind = int(group.kv_cache_spec.block_size), type(spec).__name__
    if kind == WINDOW_KIND:
        # Some ways to speculate have vLLM keep more than the window.
        window = int(spec.sliding_window) + int(optional(spec, "extra_retained_tokens", 0))
        return KVGroup(index, block_tokens, window=window)
    if kind == LOCAL_KIND:
        return KVGroup(index, block_tokens, local=int(spec.attention_chunk_size))
    return KVGroup(index, block_tokens)


_ONE_GROUP = (
    "Start vLLM with --disable-hybrid-kv-cache-manager, which gives every attention layer "
    "full-length KV in one group, or without --kv-transfer-config"
)


def _require_plain(index: int, group: Any) -> None:
    name = _named(index, group)
    kinds = sorted({type(spec).__name__ for spec in _layer_specs(group)})
    strange = [kind for kind in kinds if kind not in GROUP_KINDS]
    if strange:
        fix = (
            "run this model without --kv-transfer-config"
            if any(kind.startswith(("Mamba", "Cross", "Encoder")) for kind in strange)
            else _ONE_GROUP[0].lower() + _ONE_GROUP[1:]
        )
        raise UnsupportedModelError(f"{name} cannot be kept: {', '.join(strange)}; {fix}")
    if any(optional(spec, "non_causal", False) for spec in _layer_specs(group)):
        raise UnsupportedModelError(
            f"{name} cannot be kept: its attention looks ahead (prefix LM), so a prefix's KV "
            "depends on what follows; run this model without --kv-transfer-config"
        )
    flags = group_flags(group)
    if flags:
        raise UnsupportedModelError(
            f"{name} cannot be kept: it {', '.join(flags)}; run without --kv-transfer-config"
        )


def _require_resumable(vllm_config: Any, group: Any) -> None:
    """Refuse vLLM's reference MLA on a CPU, which computes nothing after KV that was loaded.

    It turns chunked prefill and its own prefix cache off for that reason: a prefill reaches a
    kernel that is not there, and a decode step gives other answers than the prefill would.
    """
    is_latent = any(type(spec).__name__ == "MLAAttentionSpec" for spec in _layer_specs(group))
    device = optional(optional(vllm_config, "device_config"), "device_type")
    if is_latent and device == "cpu" and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise UnsupportedModelError(
            "vLLM's MLA on this CPU cannot compute on after KV that was loaded (it turns its own "
            "prefix cache off, too): run this model without --kv-transfer-config"
        )


def _require_settings(vllm_config: Any) -> None:
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for setting, flag in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = optional(parallel, setting, 1)
        if size > 1:
            raise UnsupportedModelError(
                f"{flag} {size} is not supported: start vLLM with {flag} 1 "
                "(tensor and data parallelism are), or without --kv-transfer-config"
            )
    if has_measured_kv_scales(vllm_config.cache_config):
        raise UnsupportedModelError(
            "--calculate-kv-scales makes KV that only this process can read: leave it out (scales "
            "then come from the checkpoint), or start without --kv-transfer-config"
        )
    method = optional(speculative, "method")
    if speculative is not None and method not in DRAFTLESS:
        raise UnsupportedModelError(
            f"speculative decoding with method {method!r} keeps KV of a draft model, which is not "
            f"supported: choose one of {', '.join(sorted(DRAFTLESS))} in --speculative-config, or "
            "start without --kv-transfer-config"
        )


def _layer_specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    inner = optional(spec, "kv_cache_specs")
    return list(inner.values()) if inner else [spec]


def _named(index: int, group: Any) -> str:
    layers = list(group.layer_names)
    shown = layers[0] + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
    return f"KV group {index} ({type(group.kv_cache_spec).__name__}: {shown})"
