"""The connector under LMCache's name: `LMCacheMPConnector`, with LMCache's keys and log line.

vLLM finds it by the plug-in (`compat.vllm_plugin`) or by `"kv_connector_module_path":
"kvcellar.compat.vllm"`. It is `KVCellarConnector` in all else.
"""

import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcellar.compat.vllm_options import read_lmcache_options
from kvcellar.engines.vllm.connector import KVCellarConnector
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.engines.vllm.receipts import Receipt, Transfers
from kvcellar.units import GIB

__all__ = ["LMCacheMPConnector"]

# A child of vLLM's logger: what is logged elsewhere, an engine does not print.
logger = logging.getLogger("vllm.kvcellar.lmcache")

# Any: vLLM's objects, see `engines.vllm.versions`.


class LMCacheMPConnector(KVCellarConnector):
    """vLLM's view of kvcellar where a configuration asks for LMCache."""

    wish_prefixes: ClassVar[tuple[str, ...]] = ("kvcellar.", "lmcache.")

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make the half for a role; see `KVCellarConnector`."""
        if role == KVConnectorRole.SCHEDULER:
            _say_who_serves()
            extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
            for note in read_lmcache_options(extra_config)[1]:
                logger.warning("%s", note)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def read_options(cls, extra_config: Mapping[str, object]) -> ConnectorOptions:
        """Return the options, from LMCache's keys and kvcellar's own."""
        return read_lmcache_options(extra_config)[0]

    def receipt_log(self) -> Callable[[Receipt], None]:
        """Return what prints LMCache's line for each request of which anything was moved."""
        return _print_receipt


def _say_who_serves() -> None:
    beside = (
        "; the installed lmcache is not used (KVCELLAR_VLLM_PLUGIN=0 gives it its name back)"
        if importlib.util.find_spec("lmcache") is not None
        else ""
    )
    logger.info("LMCacheMPConnector is served by kvcellar%s", beside)


def _print_receipt(receipt: Receipt) -> None:
    parts = [
        _part(verb, transfers)
        for verb, transfers in (("Retrieved", receipt.loaded), ("Stored", receipt.stored))
        if transfers.token_count
    ]
    if parts:
        logger.info("[req_id=%s] %s", receipt.request_id, " ".join(parts))


def _part(verb: str, transfers: Transfers) -> str:
    return (
        f"{verb} {transfers.token_count} tokens. size: {transfers.size_bytes / GIB:.4f} gb, "
        f"cost {transfers.copy_s * 1e3:.4f} ms, throughput: {transfers.rate_gbps():.4f} GB/s;"
    )
