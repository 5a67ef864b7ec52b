"""Who this engine is: everything but the tokens that makes its KV what it is.

Two engines share chunks exactly when all of these fields are equal, so each setting of vLLM that
can change KV has its place here, and what cannot be named safely is refused in `support`. Read
once at start by the scheduler half; the fields are kept, so that people can be told which of
them made two engines differ.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.versions import optional
from kvcellar.engines.vllm.weights import files_digest, local_folder, weight_files
from kvcellar.telemetry.logs import EventLog

__all__ = ["canonical_json", "engine_fields"]

# Any: configurations of vLLM and of the model, which have no types that its releases agree on.

log = EventLog("vllm.kvcellar.identity")

VOLATILE = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "transformers_version",
    }
)
"""Names in a model's configuration that say where it came from or who wrote it, not what it is."""

STRETCHED = ('"dynamic"', '"longrope"', '"su"')
"""Kinds of RoPE whose angles depend on the longest prompt that the engine was started for."""

MULTIMODAL = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Settings that change what an image's tokens hold, though the image is the same."""


def engine_fields(
    vllm_config: Any, *, groups: Sequence[KVGroup]
) -> dict[str, str | int | float | bool | bytes | None]:
    """Return the fields of the engine digest.

    Args:
        vllm_config: vLLM's configuration, complete (after all overrides).
        groups: the KV groups, in vLLM's order.

    Raises:
        OSError: a weight file is there and cannot be read.

    Blocks for the samples of the weight files.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    config = canonical_json(model.hf_config.to_dict())
    fields: dict[str, str | int | float | bool | bytes | None] = {
        "format": "kvcellar-vllm-1",
        "model.config": config,
        "model.dtype": str(model.dtype),
        "model.quantization": _text(model.quantization),
        "model.quantization_config": canonical_json(optional(model, "quantization_config")),
        "model.classes": canonical_json(optional(model, "model_class_overrides")),
        "model.runner": _text(optional(model, "runner_type")),
        "model.is_windowless": bool(model.disable_sliding_window),
        "model.longest": model.max_model_len if _is_stretched(config) else None,
        "model.multimodal": _multimodal(model),
        "cache.dtype": _text(cache.cache_dtype),
        "cache.dtype_skips": canonical_json(optional(cache, "kv_cache_dtype_skip_layers")),
        "cache.groups": "; ".join(group.describe() for group in groups),
        "parallel.tensor": parallel.tensor_parallel_size,
        "parallel.pipeline": parallel.pipeline_parallel_size,
        "parallel.decode_context": parallel.decode_context_parallel_size,
        "draft": _draft(vllm_config.speculative_config),
    }
    return fields | _weights(model, vllm_config.load_config)


def canonical_json(value: Any) -> str:
    """Return a configuration as text that is equal in every process and for every key order.

    A value that JSON cannot say is written as its type and its text; an object whose text holds
    its address in memory only as its type.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {
            _text(key): _plain(item) for key, item in value.items() if _text(key) not in VOLATILE
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=canonical_json)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    kind, text = f"{type(value).__module__}.{type(value).__qualname__}", str(value)
    return [kind] if " at 0x" in text else [kind, text]


def _text(value: Any) -> str | None:
    return None if value is None else str(optional(value, "value", value))


def _is_stretched(config: str) -> bool:
    return any(kind in config for kind in STRETCHED)


def _multimodal(model: Any) -> str | None:
    settings = optional(model, "multimodal_config")
    if settings is None:
        return None
    return canonical_json({name: optional(settings, name) for name in MULTIMODAL})


def _draft(speculative: Any) -> str | None:
    model = optional(speculative, "draft_model_config")
    if model is None:
        return None
    return canonical_json(
        {"config": model.hf_config, "model": model.model, "revision": model.revision}
    )


def _weights(model: Any, load: Any) -> dict[str, str | int | bytes | None]:
    """Return what names the weights: their bytes, or what made them where there are none."""
    load_format = _text(load.load_format)
    fields: dict[str, str | int | bytes | None] = {
        "model.revision": model.revision,
        "model.code_revision": model.code_revision,
    }
    if load_format == "dummy":
        # Made up from the seed: the configuration and the seed are all there is to know.
        return fields | {"weights.format": load_format, "weights.seed": model.seed}
    folder = local_folder(model.model, revision=model.revision, cache_dir=load.download_dir)
    files = [] if folder is None or model.model_weights else weight_files(folder)
    if files:
        return fields | {"weights.bytes": files_digest(files)}
    log.warning(
        "weights not found on this host; chunks are named by the model's name and revision",
        model=model.model,
        revision=model.revision,
        load_format=load_format,
    )
    return fields | {
        "weights.name": model.model,
        "weights.place": model.model_weights,
        "weights.format": load_format,
    }
