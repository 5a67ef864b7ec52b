"""What every test shares: the order (engines last), the deadlines, the engine and its model."""

import importlib.util
import warnings
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
E2E_TIMEOUT_S = 900

# A machine that others use does not time examples.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Mark what lies in tests/e2e, give it time, and run it after everything else."""
    for item in items:
        if (ROOT / "tests" / "e2e") in item.path.parents:
            item.add_marker("e2e")
            # A warning of the engine's process is not ours to turn into an error.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


@pytest.fixture(scope="session")
def model_folder():
    """The small real model that `make setup` makes."""
    folder = ROOT / ".stack" / "model"
    if not (folder / "config.json").is_file():
        pytest.fail("no model: run `make setup`")
    return folder


@pytest.fixture(scope="session")
def engine():
    """The installed vLLM, or a clear failure where there is none."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("no vLLM here: run `make setup`")
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module("vllm")


@pytest.fixture(scope="session")
def vllm_sources():
    """Return a function from a vLLM version to the folder that holds its Python sources."""

    def find(version):
        folder = ROOT / ".stack" / f"vllm-{version}"
        if not (folder / "vllm").is_dir():
            pytest.fail(f"no sources of vLLM {version}: run `make setup-sources`")
        return folder

    return find
