"""A LoRA adapter is its files; its path, name and number are not enough."""

from types import SimpleNamespace

import pytest

from kvcellar.engines.vllm.adapters import Adapters

pytestmark = pytest.mark.engine


@pytest.fixture
def adapter(tmp_path):
    """Return a function that writes an adapter and returns vLLM's request for it."""

    def make(folder, weights, *, name="one", number=1):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "adapter_config.json").write_text("{}")
        (place / "adapter_model.safetensors").write_bytes(weights)
        return SimpleNamespace(lora_name=name, lora_path=str(place), lora_int_id=number)

    return make


def test_an_adapter_has_one_identity_in_every_engine(adapter):
    request = adapter("a", b"weights")
    one, other = Adapters(), Adapters()
    assert one.identity(request) is not None
    assert one.identity(request) == one.identity(request) == other.identity(request)


def test_its_number_does_not_count(adapter):
    """Each engine counts adapters in the order in which it meets them."""
    one = Adapters().identity(adapter("a", b"weights", number=1))
    assert Adapters().identity(adapter("a", b"weights", number=2)) == one


def test_other_weights_names_or_places_are_other_adapters(adapter):
    identities = [
        Adapters().identity(adapter("a", b"weights")),
        Adapters().identity(adapter("a", b"heights")),
        Adapters().identity(adapter("b", b"weights")),
        Adapters().identity(adapter("a", b"weights", name="two")),
    ]
    assert None not in identities
    assert len(set(identities)) == 4


def test_an_adapter_that_changes_under_a_running_engine_is_not_cached(adapter, caplog):
    """The engine may still compute with what it loaded before, or have loaded it again."""
    adapters = Adapters()
    adapters.identity(adapter("a", b"weights"))
    changed = adapter("a", b"more weights")
    assert adapters.identity(changed) is None
    assert adapters.identity(changed) is None
    assert caplog.text.count("adapter changed on disk") == 1
    reloaded = SimpleNamespace(**{**vars(changed), "lora_int_id": 2})
    assert adapters.identity(reloaded) == Adapters().identity(changed)


def test_an_adapter_that_is_nowhere_on_this_host_is_not_cached():
    request = SimpleNamespace(lora_name="x", lora_path="some/where-else", lora_int_id=1)
    assert Adapters().identity(request) is None
