"""vLLM's entry point into kvcellar: puts the connectors' names into vLLM's registry.

vLLM calls `register` in each of its processes before it looks a connector up. Installed means
chosen: the name `LMCacheMPConnector` is taken also where vLLM or lmcache bring their own, unless
the environment says `KVCELLAR_VLLM_PLUGIN=0`. Nothing of torch or the connector is imported until
one of the names is used.
"""

import importlib
from collections.abc import Callable
from typing import Any

from kvcellar.config.load import is_switched_on
from kvcellar.telemetry.logs import EventLog

__all__ = ["register"]

log = EventLog("vllm.kvcellar.plugin")

SWITCH = "KVCELLAR_VLLM_PLUGIN"
CONNECTORS = {
    "KVCellarConnector": "kvcellar.engines.vllm.connector",
    "LMCacheMPConnector": "kvcellar.compat.vllm",
}


def register() -> None:
    """Register the connectors; may be called any number of times, and never fails."""
    if not is_switched_on(SWITCH):
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # The registry is private, and no release has another way to replace an entry.
        registry = KVConnectorFactory._registry
        for name, module in CONNECTORS.items():
            registry[name] = _loader(name, module)
    except Exception as error:  # noqa: BLE001 - an exception in a plug-in would end vLLM.
        log.error("connectors not registered", exception=error)  # noqa: TRY400 - it prints it.


def _loader(name: str, module: str) -> Callable[[], Any]:
    def load() -> Any:  # Any: a class of vLLM's kind; importing it here would cost every process.
        return getattr(importlib.import_module(module), name)

    return load
