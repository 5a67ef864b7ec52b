"""What `--kv-transfer-config` says in the tests, and how one watches where a prompt came from."""

from collections.abc import Callable, Sequence

from tests.e2e.cellar import Cellar
from tests.e2e.device import IS_INSTALLED
from tests.e2e.engine import Answer, Counters, Engine

__all__ = ["lmcache_transfer", "own_transfer", "servers_transfer", "watched"]


def lmcache_transfer(cellar: Cellar) -> dict[str, object]:
    """Say what LMCache's guide says, with the server's port, and that every hit is loaded."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": cellar.port,
            "kvcellar.gate": False,
        },
    }


def servers_transfer(cellars: Sequence[Cellar], *, heartbeat_s: float) -> dict[str, object]:
    """Say in LMCache's words that an engine's ranks are divided among several servers."""
    transfer = lmcache_transfer(cellars[0])
    urls = ",".join(f"tcp://localhost:{cellar.port}" for cellar in cellars)
    transfer["kv_connector_extra_config"] = {
        "lmcache.mp.server_urls": urls,
        "lmcache.mp.heartbeat_interval": heartbeat_s,
        "kvcellar.gate": False,
    }
    return transfer


def own_transfer(cellar: Cellar, **options: object) -> dict[str, object]:
    """Say the same in our own words; `options` are further keys without their prefix.

    Every hit is loaded unless they say otherwise: how fast a machine computes is not to decide what
    a test sees.
    """
    extra = {"kvcellar.host": "localhost", "kvcellar.port": cellar.port, "kvcellar.gate": False}
    extra |= {f"kvcellar.{name}": value for name, value in options.items()}
    transfer = {
        "kv_connector": "KVCellarConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if not IS_INSTALLED:
        transfer["kv_connector_module_path"] = "kvcellar.engines.vllm.connector"
    return transfer


def watched(engine: Engine, action: Callable[[], Answer]) -> tuple[Answer, Counters]:
    """Return what an action answers and how the engine's counters changed."""
    before = engine.counters()
    answer = action()
    return answer, engine.counters() - before
