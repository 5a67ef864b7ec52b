"""A server and a model folder for the tests that run vLLM's scheduler."""

import pytest
from tests.server.running import RunningServer, eventually

CHUNK_TOKENS = 32
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Have no deadline decide a test that is not about deadlines, however busy the machine is."""
    monkeypatch.setattr("kvcellar.engines.vllm.stores.RESERVE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("kvcellar.engines.vllm.binding.SETTLE_S", PATIENCE_S)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    from tests.engines.vllm.toy_model import write_model

    return write_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cellar():
    """A server whose chunks are two of the toy engine's blocks."""
    with RunningServer("--chunk-size", str(CHUNK_TOKENS)) as server:
        # It answers before it has memory, and what was offered then is not what tests are about.
        eventually(lambda: server.status()["kvcellar"]["arena"]["ready_bytes"])
        yield server
        assert server.process.poll() is None, server.log()
        assert "Traceback" not in server.log()
