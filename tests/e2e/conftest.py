"""Fixtures of the end-to-end tests: the tiny model, prompts, and proof that nothing is left."""

import random
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.processes import ROOT, Program, Surroundings
from tests.e2e.tiny_model import VOCABULARY, make_tiny_models

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests in the order in which they are written: starting an engine takes long."""
    places = [index for index, item in enumerate(items) if HERE in item.path.parents]
    ours = sorted((items[index] for index in places), key=_place_in_source)
    for index, item in zip(places, ours, strict=True):
        items[index] = item


def _place_in_source(item: pytest.Item) -> tuple[str, int]:
    path, line, _ = item.reportinfo()
    return str(path), line or 0


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The folder of the tiny model; its siblings are other weights and adapters."""
    return make_tiny_models(ROOT / ".stack" / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    """Where the module's programs write their logs."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="module")
def stopping() -> Iterator[Callable[[Program], Program]]:
    """Return a function that has a program stopped at the module's end, whatever its state.

    Nothing of the module's programs may be left then: no process, socket, file or memory.
    """
    surroundings = Surroundings()
    programs: list[Program] = []

    def note(program: Program) -> Program:
        programs.append(program)
        return program

    try:
        yield note
    finally:
        for program in reversed(programs):
            program.thaw()
            program.stop()
            program.close()
        surroundings.remove_what_vllm_leaves()
    ports = [port for program in programs for port in program.ports]
    assert surroundings.left_behind(ports) == []


@pytest.fixture
def prompt(request) -> Callable[[int], list[int]]:
    """Return a function from a length to a prompt of random tokens, new in each call and test."""
    source = random.Random(zlib.crc32(request.node.nodeid.encode()))

    def make(token_count: int) -> list[int]:
        return [source.randrange(3, VOCABULARY) for _ in range(token_count)]

    return make


@pytest.fixture
def at_once() -> Iterator[Callable[..., list[object]]]:
    """Return a function that runs actions in threads at once and returns their results in order."""
    with ThreadPoolExecutor(64) as threads:
        yield lambda actions: [
            future.result() for future in [threads.submit(action) for action in actions]
        ]
