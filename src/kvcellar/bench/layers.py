"""The KV layers that are measured side by side: vLLM alone, its own, two peers, and kvcellar.

Each is the server to start, if it has one, and what vLLM must be told. kvcellar loads every hit, as
the others do; `kvcellar-gate` is kvcellar as it is shipped, which computes where that is quicker. A
layer whose package cannot be imported here is named with the reason and left out, never counted as
slow. Used by `side_by_side`.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvcellar.bench.node import free_port
from kvcellar.units import GIB

__all__ = ["LAYERS", "Layer", "make_layer"]

_CHUNK_TOKENS = "256"


@dataclass(frozen=True)
class Layer:
    """One layer on free ports.

    Attributes:
        name: of the case.
        transfer: what `--kv-transfer-config` says; None for vLLM alone.
        server: the words of its server's command; empty when it has none.
        ready: port and path that answer with success when the server serves.
        environment: variables for server and engine.
        missing: why it cannot be measured here; empty when it can.
        kv_bytes_share: bytes that cross the link for a byte of KV, chunks' exact tokens left out.
        prepared: words that the engine logs when it needs no more preparation; empty for none.
    """

    name: str = ""
    transfer: Mapping[str, object] | None = None
    server: tuple[str, ...] = ()
    ready: tuple[int, str] = (0, "")
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    kv_bytes_share: float = 1.0
    prepared: str = ""


def _none(_l1_gb: float) -> Layer:
    return Layer()


def _offload(l1_gb: float) -> Layer:
    size = {"cpu_bytes_to_use": int(l1_gb * GIB)}
    return Layer(transfer=_transfer("OffloadingConnector", size))


def _kvcellar(
    l1_gb: float, *flags: str, kv_bytes_share: float = 1.0, has_gate: bool = False
) -> Layer:
    port, http_port = free_port(), free_port()
    words = ["-m", "kvcellar", "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
    words += ["--l1-size-gb", f"{l1_gb:g}", "--eviction-policy", "LRU"]
    words += ["--chunk-size", _CHUNK_TOKENS, *flags]
    transfer = _transfer("KVCellarConnector", {"kvcellar.host": "127.0.0.1", "kvcellar.port": port})
    # Where kvcellar is only a folder on the path, vLLM does not find it by its entry point.
    transfer["kv_connector_module_path"] = "kvcellar.engines.vllm.connector"
    return Layer(
        transfer=transfer,
        server=(sys.executable, *words),
        ready=(http_port, "/healthcheck"),
        kv_bytes_share=kv_bytes_share,
        prepared="arena is prepared",
    )


def _kvcellar_int8(l1_gb: float) -> Layer:
    # A byte for two, and a scale of two bytes for a vector of 128 elements.
    return _kvcellar(l1_gb, "--l1-codec", "int8", kv_bytes_share=0.5 + 1 / 128)


def _kvcellar_gate(l1_gb: float) -> Layer:
    return _kvcellar(l1_gb, has_gate=True)


def _lmcache(l1_gb: float) -> Layer:
    missing = _missing("lmcache")
    port, http_port = free_port(), free_port()
    words = ["-m", "lmcache.cli.main", "server", "--port", str(port), "--http-port", str(http_port)]
    words += ["--l1-size-gb", f"{l1_gb:g}", "--eviction-policy", "LRU"]
    words += ["--chunk-size", _CHUNK_TOKENS, "--instance-id", "peer"]
    keys = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    return Layer(
        transfer=_transfer("LMCacheMPConnector", keys),
        server=(sys.executable, *words),
        ready=(http_port, "/status"),
        # Empty: no plug-in of ours takes the connector's name.
        environment={"VLLM_PLUGINS": "", "LMCACHE_TRACK_USAGE": "false"},
        missing=missing,
    )


def _pegaflow(l1_gb: float) -> Layer:
    http_port = free_port()
    # Its connector's default address is this port.
    words = ["-m", "pegaflow._server", "--addr", "127.0.0.1:50055", "--devices", "0"]
    words += ["--pool-size", f"{l1_gb:g}gb", "--http-addr", f"127.0.0.1:{http_port}"]
    transfer = _transfer("PegaKVConnector", {})
    transfer["kv_connector_module_path"] = "pegaflow.connector"
    return Layer(
        transfer=transfer,
        server=(sys.executable, *words),
        ready=(http_port, "/health"),
        missing=_missing("pegaflow"),
    )


_MAKERS: Mapping[str, Callable[[float], Layer]] = {
    "none": _none,
    "offload": _offload,
    "lmcache": _lmcache,
    "pegaflow": _pegaflow,
    "kvcellar": _kvcellar,
    "kvcellar-int8": _kvcellar_int8,
    "kvcellar-gate": _kvcellar_gate,
    "none-again": _none,
}
LAYERS = tuple(_MAKERS)
"""The names of all cases, in the order in which they are measured: vLLM alone first and last."""


def make_layer(name: str, *, l1_gb: float) -> Layer:
    """Return the layer of a case of `LAYERS`, which may use so many GiB of host memory."""
    return replace(_MAKERS[name](l1_gb), name=name)


def _transfer(connector: str, extra: Mapping[str, object]) -> dict[str, object]:
    transfer: dict[str, object] = {"kv_connector": connector, "kv_role": "kv_both"}
    if extra:
        transfer["kv_connector_extra_config"] = dict(extra)
    return transfer


def _missing(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} cannot be imported here"
