"""What every test shares: the order, from cheap to dear, and the deadlines."""

from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
SLOW_TIMEOUTS_S = {1: 300, 2: 900}

# A machine that others use does not time examples.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Mark what lies in tests/e2e, give what is slow its time, and run it after the rest."""
    for item in items:
        if (ROOT / "tests" / "e2e") in item.path.parents:
            item.add_marker("e2e")
            # A warning of the engine's process is not ours to turn into an error.
            item.add_marker(pytest.mark.filterwarnings("default"))
        if _cost(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUTS_S[_cost(item)]))
    items.sort(key=_cost)


def _cost(item):
    """Return 2 for what runs engines, 1 for what imports other releases of one, 0 for the rest."""
    if item.get_closest_marker("e2e") is not None:
        return 2
    return int(item.get_closest_marker("sources") is not None)


@pytest.fixture(scope="session")
def model_folder():
    """Return the folder of the small real model that `make setup` makes."""
    folder = ROOT / ".stack" / "model"
    if not (folder / "config.json").is_file():
        pytest.fail("no model: run `make setup`")
    return folder
