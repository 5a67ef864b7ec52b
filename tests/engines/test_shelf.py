"""Which arena is mapped for whom and until when; on real sealed files."""

import logging
from pathlib import Path

import pytest
import torch

from kvcellar.clock import FakeClock
from kvcellar.engines.copy_cpu import CpuCopier
from kvcellar.engines.pages import PageRun
from kvcellar.engines.shelf import RETIRED_S, ArenaShelf
from kvcellar.engines.touch import Toucher
from kvcellar.memory.arena import Arena, ArenaView

MIB = 1 << 20
SIZE = 4 * MIB


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def shelf(clock):
    shelf = ArenaShelf(clock)
    yield shelf
    shelf.close()


def view(size_bytes=SIZE):
    arena = Arena.create(size_bytes, size_bytes)
    arena.grow_step(0)
    mapped = ArenaView(arena.fd, size_bytes)
    arena.close()
    return mapped


def read(shelf, hold):
    with shelf.reading(hold) as arena:
        return arena


def test_only_the_present_arena_can_be_taken(shelf):
    assert shelf.take(b"a") is None
    first, second = view(), view()
    shelf.install(b"a", first)
    assert read(shelf, shelf.take(b"a")) is first
    assert shelf.take(b"b") is None
    shelf.install(b"b", second)
    assert shelf.take(b"a") is None
    assert read(shelf, shelf.take(b"b")) is second


def test_an_arena_stays_while_no_other_comes(shelf, clock):
    arena = view()
    shelf.install(b"a", arena)
    clock.advance(1e6)
    shelf.sweep()
    assert not arena.is_closed
    assert read(shelf, shelf.take(b"a")) is arena


def test_a_second_mapping_of_the_same_arena_is_closed_and_holds_stay_good(shelf):
    first, again = view(), view()
    shelf.install(b"a", first)
    hold = shelf.take(b"a")
    shelf.install(b"a", again)
    assert again.is_closed
    assert read(shelf, hold) is first


def test_a_retired_arena_goes_with_its_last_hold(shelf):
    old = view()
    shelf.install(b"a", old)
    holds = [shelf.take(b"a"), shelf.take(b"a")]
    shelf.install(b"b", view())
    shelf.give_back(holds[0])
    shelf.sweep()
    assert not old.is_closed
    assert read(shelf, holds[1]) is old
    shelf.give_back(holds[1])
    shelf.sweep()
    assert old.is_closed


def test_a_retired_arena_goes_at_the_end_of_its_time_but_not_under_a_copy(shelf, clock):
    old = view()
    shelf.install(b"a", old)
    hold = shelf.take(b"a")
    shelf.install(b"b", view())
    with shelf.reading(hold) as arena:
        assert arena is old
        clock.advance(RETIRED_S)
        shelf.sweep()
        assert not old.is_closed
    assert read(shelf, hold) is None
    shelf.sweep()
    assert old.is_closed
    shelf.give_back(hold)


def test_closing_unmaps_everything_that_no_copy_uses(clock):
    shelf = ArenaShelf(clock)
    old, new = view(), view()
    shelf.install(b"a", old)
    hold = shelf.take(b"a")
    shelf.install(b"b", new)
    with shelf.reading(hold):
        shelf.close()
        assert new.is_closed
        assert not old.is_closed
    shelf.close()
    assert old.is_closed


def copier():
    storage = torch.zeros(64, dtype=torch.uint8).untyped_storage()
    return CpuCopier([PageRun(("l0",), storage, "cpu", 0, 64, 64, 1)])


def resident_bytes():
    size_bytes, is_arena = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if "-" in line.split(" ")[0]:
            is_arena = "kvcellar-arena" in line
        elif is_arena and line.startswith("Rss:"):
            size_bytes += int(line.split()[1]) * 1024
    return size_bytes


def test_touching_maps_what_is_ready_and_nothing_else(shelf, clock, caplog):
    caplog.set_level(logging.INFO)
    before, ready = resident_bytes(), (1, MIB)
    toucher = Toucher(shelf, copier(), ready=lambda: ready, clock=clock)
    toucher.touch()
    shelf.install(b"a", view())
    assert resident_bytes() == before
    toucher.touch()
    # The kernel maps a few neighbours with each page.
    assert MIB <= resident_bytes() - before < 2 * MIB
    assert "arena is prepared" not in caplog.text
    ready = (SIZE // MIB, MIB)
    toucher.touch()
    assert resident_bytes() - before == SIZE
    assert f"arena is prepared size_bytes={SIZE}" in caplog.text
    shelf.install(b"b", view())
    shelf.sweep()
    toucher.touch()
    assert resident_bytes() - before == SIZE


def test_touching_does_not_keep_an_arena_that_is_retired(shelf, clock):
    old = view()
    shelf.install(b"a", old)
    toucher = Toucher(shelf, copier(), ready=lambda: (SIZE // MIB, MIB), clock=clock)
    toucher.touch()
    shelf.install(b"b", view())
    shelf.sweep()
    assert old.is_closed
