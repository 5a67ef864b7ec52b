"""LMCache's keys of `kv_connector_extra_config`, in terms of the connector's own options.

Keys with a counterpart are translated; keys that cannot mean anything here are accepted with one
line that says why; keys of a later release are refused with that reason; unknown ones with the
key that was probably meant. Used by `compat.vllm` alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvcellar.engines.vllm.options import OPTION_KEYS, ConnectorOptions, options_from, unknown_key

__all__ = ["read_lmcache_options"]

TRANSLATED: Mapping[str, str] = {
    "lmcache.mp.host": "host",
    "lmcache.mp.port": "port",
    "lmcache.mp.server_urls": "server_urls",
    "lmcache.mp.mq_timeout": "timeout_s",
    "lmcache.mp.heartbeat_interval": "heartbeat_s",
    "lmcache.mp.eager_prefetch": "eager_prefetch",
    "lmcache.mp.save_decode_cache": "save_decode_cache",
    "lmcache.mp.autostart": "autostart",
    "lmcache.mp.autostart.server_args": "autostart_server_args",
    "lmcache.mp.autostart.wait_timeout": "autostart_wait_s",
}

_WORKERS_COPY = "the workers copy by themselves, straight into the server's memory"
_STORED_AT_ONCE = "chunks are stored in the step that computes them"

MEANINGLESS: Mapping[str, str] = {
    "lmcache.mp.nonblocking_lookup_status": "a lookup never blocks a step",
    "lmcache.mp.mp_transfer_mode": _WORKERS_COPY,
    "lmcache.mp.isolated_ipc": _WORKERS_COPY,
    "lmcache.mp.use_vmm_api": _WORKERS_COPY,
    "lmcache.mp.transfer_intermediate_tensors": "only KV is kept",
    "lmcache.mp.hash_algorithm": "keys are blake3 in any case",
    "lmcache.mp.lazy_offload": _STORED_AT_ONCE,
    "lmcache.mp.lazy_offload_policy": _STORED_AT_ONCE,
    "lmcache.mp.lazy_offload_threshold": _STORED_AT_ONCE,
    "lmcache.mp.lazy_offload_select_count": _STORED_AT_ONCE,
    "lmcache_rpc_port": "the server is found by lmcache.mp.host and lmcache.mp.port",
    "discard_partial_chunks": "only whole chunks are kept",
}


def read_lmcache_options(
    extra_config: Mapping[str, object],
) -> tuple[ConnectorOptions, tuple[str, ...]]:
    """Return the options of an `LMCacheMPConnector`, and a line for each key that means nothing.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`; kvcellar's own keys may stand in it too.

    Raises:
        ConfigError: a key is unknown or refused, or its value does not fit.
    """
    fields = {**TRANSLATED, **OPTION_KEYS}
    given: dict[str, tuple[str, object]] = {}
    notes: list[str] = []
    for key, value in extra_config.items():
        if key in fields:
            given[key] = (fields[key], value)
        elif key in MEANINGLESS:
            notes.append(f"{key}={value!r} has no effect: {MEANINGLESS[key]}")
        else:
            raise unknown_key(key, {*fields, *MEANINGLESS})
    options = options_from(given)
    if options.autostart:
        # The server that it starts understands LMCache's flags.
        options = replace(options, server_module="kvcellar.compat.lmcache_cli")
    return options, tuple(notes)
