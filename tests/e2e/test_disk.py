"""A disk behind the server's memory: what outlives a server, what memory cannot hold, what breaks.

One engine, one server and one folder. Where chunks came from is read from the engine's counters and
from the server's; each answer is compared with the one that plain computing gave.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.engine import Answer, Engine, assert_same_answer
from tests.e2e.node import own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS
from tests.e2e.processes import eventually

pytestmark = pytest.mark.e2e

HEARTBEAT_S = 0.5
FETCH_TIMEOUT_S = 3.0
BACK_S = 30.0
SLOWEST_S = FETCH_TIMEOUT_S + 8.0
"""Bound for one request while the tier process stands; without a cache it takes a second."""


@dataclass
class Node:
    """One server with a disk, and one engine that is faithful to its address."""

    cellar: Cellar
    engine: Engine
    disk: Path

    def compute(self, prompts: list[list[int]]) -> list[Answer]:
        """Have prompts computed, one after the other, and wait until the disk has their chunks."""
        answers = []
        for tokens in prompts:
            before = self.on_disk()
            answers.append(self.engine.complete(tokens))
            self.wait_for_disk(before + len(tokens) // CHUNK_TOKENS)
        return answers

    def on_disk(self) -> int:
        """Return how many chunks the disk has."""
        return int(self.cellar.metric("kvcellar_tier_chunks"))

    def wait_for_disk(self, count: int) -> None:
        """Wait until the disk has so many chunks and nothing is on its way."""
        eventually(
            lambda: self.on_disk() == count and self.cellar.is_quiet(),
            20,
            what=f"{count} chunks on the disk (now {self.on_disk()})",
        )

    def restart(self) -> None:
        """Kill the server and start it again: only the disk remembers anything."""
        self.cellar.kill()
        self.cellar.start_and_wait()
        eventually(
            lambda: self.cellar.status()["kvcellar"]["instances"], BACK_S, what="the engine's hello"
        )
        eventually(lambda: self.tier()["is_complete"], BACK_S, what="a folder that is counted")

    def tier(self) -> dict[str, object]:
        """Return what the server says of its tier."""
        (adapter,) = self.cellar.status()["storage_manager"]["l2_adapters"]
        return adapter

    def ask(self, tokens: list[int], expected: Answer) -> int:
        """Ask once more, with an empty pool; return the tokens that were loaded."""
        self.engine.reset_prefix_cache()
        answer, counted = watched(self.engine, lambda: self.engine.complete(tokens))
        assert_same_answer(answer, expected)
        return counted.external_hits

    def is_hit(self, tokens: list[int], expected: Answer) -> bool:
        """Whether all full chunks of a prompt are loaded."""
        return self.ask(tokens, expected) == len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS

    def is_hit_from_disk(self, tokens: list[int], expected: Answer) -> bool:
        """Whether all full chunks are loaded though memory has none; a miss puts them there."""
        self.cellar.wait_until_quiet(10)
        self.cellar.clear()
        return self.is_hit(tokens, expected)

    def tier_process(self) -> psutil.Process:
        """Return the server's child that reads and writes."""
        (found,) = [
            p for p in self.cellar.members() if "kvcellar.tiers.process" in str(p.cmdline())
        ]
        return found

    def check_quiet(self) -> None:
        """Check that nothing is held: at the server, nor in the engine's pool."""
        eventually(self.engine.is_idle, 5, what="an idle engine")
        self.cellar.wait_until_quiet(5)
        self.engine.reset_prefix_cache(5.0)


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    disk = folder / "disk"
    cellar = stopping(Cellar("node", folder=folder, l1_gb=0.25, flags=["--disk-path", str(disk)]))
    cellar.start_and_wait()
    options = {"heartbeat_s": HEARTBEAT_S, "fetch_timeout_s": FETCH_TIMEOUT_S}
    engine = stopping(
        Engine(
            "engine",
            tiny,
            folder=folder,
            transfer=own_transfer(cellar, **options),
            options=["--max-model-len", "4096", "--num-gpu-blocks-override", "70"],
        )
    )
    engine.start()
    engine.wait_until_ready()
    engine.complete([3])
    return Node(cellar, engine, disk)


@pytest.fixture
def node(shared) -> Node:
    """The module's node, with nothing cached anywhere."""
    if not shared.cellar.is_alive:
        shared.cellar.start_and_wait()
    shared.cellar.wait_until_quiet(10)
    eventually(lambda: shared.tier()["is_complete"], BACK_S, what="a folder that is counted")
    reply = shared.cellar.http.post("/cache/clear", json={"tier": "all"})
    assert reply.status_code == 200, reply.text
    # The number on the page is that of the last report.
    shared.wait_for_disk(0)
    shared.engine.reset_prefix_cache()
    return shared


def test_a_prompt_is_loaded_from_disk_after_the_server_was_killed(node, prompt):
    tokens = prompt(2000)
    (cold,) = node.compute([tokens])
    node.restart()
    assert node.cellar.objects() == 0

    assert node.is_hit(tokens, cold)

    assert node.cellar.metric("kvcellar_tier_fetched_chunks_total") == 7
    eventually(lambda: node.tier()["read_chunks"] == 7, 5, what="7 chunks read")
    assert node.cellar.metric("kvcellar_loaded_chunks_total") == 7
    assert node.tier()["written_chunks"] == 0
    # The second time memory has them.
    assert node.is_hit(tokens, cold)
    assert node.cellar.metric("kvcellar_tier_fetched_chunks_total") == 7
    node.check_quiet()


def test_damaged_records_are_misses_and_everything_else_still_hits(node, prompt):
    prompts = [prompt(600) for _ in range(6)]
    cold = node.compute(prompts)
    records = sorted(
        (path for path in node.disk.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )[-12:]
    assert min(path.stat().st_size for path in records) > CHUNK_TOKENS * 1024
    flipped, cut, emptied, gone = records[:4]
    with flipped.open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 4]))
    os.truncate(cut, 50_000)
    os.truncate(emptied, 0)
    gone.unlink()
    (node.disk / "stray").write_bytes(b"what is this")
    node.restart()

    loaded = [node.ask(tokens, answer) for tokens, answer in zip(prompts, cold, strict=True)]

    # Four of twelve are bad, so at least two of six prompts are there as a whole.
    assert 4 * CHUNK_TOKENS <= sum(loaded) <= 8 * CHUNK_TOKENS
    assert node.cellar.metric("kvcellar_tier_damaged_chunks_total") >= 1
    # What was computed again is written again.
    node.wait_for_disk(12)
    assert all(node.is_hit(*case) for case in zip(prompts, cold, strict=True))
    node.check_quiet()


def test_a_frozen_tier_process_costs_a_bounded_wait_and_is_used_again(node, prompt):
    tokens = prompt(1500)
    (cold,) = node.compute([tokens])
    node.restart()
    frozen = node.tier_process()
    frozen.suspend()
    try:
        for _ in range(3):
            started = time.monotonic()
            node.ask(tokens, cold)
            assert time.monotonic() - started < SLOWEST_S
            assert node.cellar.metric("kvcellar_tier_fetched_chunks_total") == 0
    finally:
        # One that stood for too long has been replaced.
        with contextlib.suppress(psutil.NoSuchProcess):
            frozen.resume()
    eventually(lambda: node.is_hit_from_disk(tokens, cold), BACK_S, what="a hit after the thaw")
    node.check_quiet()


def test_a_tier_process_that_is_killed_during_a_fetch_costs_hits_and_nothing_else(
    node, prompt, at_once
):
    tokens = prompt(1500)
    (cold,) = node.compute([tokens])
    node.restart()
    # It stands with the question unread, and dies with the fetch under way.
    victim = node.tier_process()
    victim.suspend()

    def kill() -> None:
        eventually(
            lambda: node.cellar.metric("kvcellar_tier_fetches_total") > 0, 20, what="a fetch"
        )
        victim.send_signal(signal.SIGKILL)

    _, loaded = at_once([kill, lambda: node.ask(tokens, cold)])

    assert loaded == 0
    eventually(lambda: node.cellar.metric("kvcellar_tier_up") == 1, BACK_S, what="another one")
    eventually(lambda: node.is_hit_from_disk(tokens, cold), BACK_S, what="a hit by the next one")
    assert node.cellar.metric("kvcellar_tier_restarts_total") == 1
    node.check_quiet()


@pytest.fixture
def small_disk(folder):
    """A file system of 6 MiB; a chunk has 0.75."""
    place = folder / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system takes root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_and_a_small_memory_keep_what_fits(node, prompt, folder, stopping, small_disk):
    """L1 has ten slots; somebody's file leaves the disk no room for one chunk, and goes again."""
    node.cellar.stop()
    flags = ["--l2-adapter", f'{{"type":"fs","base_path":"{small_disk}/kv","max_capacity_gb":1}}']
    small = stopping(
        Cellar("small", folder=folder, l1_gb=8 / 1024, ports=node.cellar.ports, flags=flags)
    )
    tight = Node(small, node.engine, small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(11 << 19))
    small.start_and_wait()
    eventually(lambda: small.status()["kvcellar"]["instances"], BACK_S, what="the engine's hello")
    prompts = [prompt(600) for _ in range(8)]
    cold = [tight.engine.complete(tokens) for tokens in prompts]
    eventually(
        lambda: (
            small.metric("kvcellar_tier_unwritten_chunks_total")
            + small.metric("kvcellar_tier_written_chunks_total")
            == 16
            and small.is_quiet()
        ),
        30,
        what="all chunks tried",
    )
    assert small.metric("kvcellar_tier_unwritten_chunks_total") > 0
    for tokens, answer in zip(prompts, cold, strict=True):
        tight.ask(tokens, answer)
    ballast.unlink()

    # With space again new chunks go to the disk, and come back from there.
    def is_back() -> bool:
        tokens = prompt(600)
        answer = tight.engine.complete(tokens)
        eventually(small.is_quiet, 10, what="no holdings")
        small.clear()
        return tight.is_hit(tokens, answer)

    eventually(is_back, BACK_S, what="a chunk that was written after the disk had been full")
    tight.check_quiet()
    small.stop()


def test_a_working_set_larger_than_memory_hits(node, prompt, folder, stopping):
    """Sixteen chunks of eight prompts, ten slots of memory."""
    node.cellar.stop()
    flags = ["--disk-path", str(folder / "large"), "--disk-size-gb", "0.1"]
    small = stopping(
        Cellar("tight", folder=folder, l1_gb=8 / 1024, ports=node.cellar.ports, flags=flags)
    )
    small.start_and_wait()
    eventually(lambda: small.status()["kvcellar"]["instances"], BACK_S, what="the engine's hello")
    tight = Node(small, node.engine, folder / "large")
    eventually(lambda: tight.tier()["is_complete"], BACK_S, what="a folder that is counted")
    prompts = [prompt(600) for _ in range(8)]
    cold = tight.compute(prompts)

    for tokens, answer in zip(prompts * 2, cold * 2, strict=True):
        assert tight.is_hit(tokens, answer)

    assert small.metric("kvcellar_tier_fetched_chunks_total") >= 16
    tight.check_quiet()
    small.stop()
