"""The plug-in points vLLM's registry at us, in every process, before a name is looked up."""

import subprocess
import sys
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvcellar.compat.vllm_plugin import register

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Return vLLM's registry as it came, put back afterwards."""
    entries = dict(KVConnectorFactory._registry)
    monkeypatch.setattr(KVConnectorFactory, "_registry", entries)
    entries.pop("KVCellarConnector", None)
    return entries


def test_both_names_lead_to_us(registry):
    others = {name: load for name, load in registry.items() if name != "LMCacheMPConnector"}
    register()
    register()
    for name in ("KVCellarConnector", "LMCacheMPConnector"):
        found = KVConnectorFactory.get_connector_class_by_name(name)
        assert found.__name__ == name
        assert found.__module__.startswith("kvcellar.")
    assert {name: registry[name] for name in others} == others


def test_the_other_name_of_lmcache_is_left_alone(registry):
    before = registry["LMCacheConnectorV1"]
    register()
    assert registry["LMCacheConnectorV1"] is before


@pytest.mark.parametrize("value", ["0", "false", "off"])
def test_it_stands_back_on_demand(registry, monkeypatch, value):
    monkeypatch.setenv("KVCELLAR_VLLM_PLUGIN", value)
    before = dict(registry)
    register()
    assert registry == before


def test_it_never_ends_vllm(monkeypatch, caplog):
    monkeypatch.setattr(KVConnectorFactory, "_registry", None)
    register()
    assert "connectors not registered" in caplog.text


def test_it_imports_nothing_heavy_before_a_name_is_used():
    code = (
        "import sys, types\n"
        "factory = types.ModuleType('factory')\n"
        "factory.KVConnectorFactory = types.SimpleNamespace(_registry={})\n"
        "name = 'vllm.distributed.kv_transfer.kv_connector.factory'\n"
        "sys.modules[name] = factory\n"
        "for end in range(1, 4): sys.modules[name.rsplit('.', end)[0]] = types.ModuleType('x')\n"
        "from kvcellar.compat.vllm_plugin import register\n"
        "register()\n"
        "assert set(factory.KVConnectorFactory._registry) == "
        "{'KVCellarConnector', 'LMCacheMPConnector'}\n"
        "print([n for n in ('torch', 'numpy', 'kvcellar.engines') if n in sys.modules])\n"
    )
    source = Path(__file__).parents[2] / "src"
    printed = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, text=True, timeout=30
    )
    assert printed == "[]\n"
