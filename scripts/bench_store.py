#!/usr/bin/env python3
"""Time the store's calls by themselves, without socket or server, in microseconds.

    python scripts/bench_store.py [keys in the catalogue]

Processor time, the best of several rounds: others that run can only add to it. The collector of
reference cycles is off while a call is timed, as it is frozen in the server.
"""

import gc
import os
import sys
import time
from collections.abc import Callable

from kvcellar.keys.digest import NamespaceId
from kvcellar.memory.slots import SlotAllocator
from kvcellar.store.entries import OwnerId
from kvcellar.store.machine import Reserved, Store
from kvcellar.store.policies import LRU
from kvcellar.units import GIB, MIB

SCHEDULER, WORKER = OwnerId(1), OwnerId(2)
SPACE = NamespaceId(b"s" * 32)
LARGE_SPACE = NamespaceId(b"l" * 32)
SHARD_BYTES = 4 * MIB
ROUNDS = 7


def _names(count: int) -> bytes:
    return os.urandom(32 * count)


class Subject:
    """A store with an arena that has exactly as many slots as the catalogue gets keys."""

    def __init__(self, keys: int) -> None:
        self.store = Store(SlotAllocator(GIB), LRU())
        size_bytes = keys * SHARD_BYTES
        for offset in range(0, size_bytes, GIB):
            self.store.add_step(offset, min(GIB, size_bytes - offset))
        self.store.bind(SPACE, (SHARD_BYTES,))
        self.names: list[bytes] = []

    def reserve(self, names: bytes, parent: bytes = b"") -> Reserved:
        """Ask for slots."""
        return self.store.reserve(
            SCHEDULER, SPACE, names, parent=parent, writers=(WORKER,), now_s=0.0, request=1
        )

    def commit(self, reserved: Reserved) -> None:
        """Make what was reserved visible."""
        seals = bytes(len(reserved.offsets))
        self.store.commit(WORKER, reserved.reservation, 0, seals)

    def fill(self, keys: int) -> None:
        """Store chains of 80,000 chunks, eight at a time."""
        for number in range(0, keys, 8):
            parent = self.names[-1][-32:] if number % 80_000 else b""
            self.names.append(_names(8))
            self.commit(self.reserve(self.names[-1], parent))


def best_us(call: Callable[[], object], *, times: int) -> float:
    """Return the microseconds of one call: the best round's mean."""
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        for _ in range(times):
            call()
        rounds.append((time.process_time() - start_s) / times * 1e6)
    return min(rounds)


def show(what: str, duration_us: float) -> None:
    """Print one figure."""
    print(f"{what:<46}{duration_us:>12.1f} us")


def lookups(subject: Subject) -> None:
    """Time lookups of prefixes that are all there."""
    store, everything = subject.store, b"".join(subject.names[:1250])
    for count in (1, 8, 100, 1000, 10_000):
        keys = everything[: 32 * count]
        leases: list[int] = []
        show(
            f"lookup of {count} keys",
            best_us(
                lambda keys=keys, leases=leases: leases.append(
                    store.lookup(SCHEDULER, SPACE, keys, request=1).lease
                ),
                times=max(5, 2000 // count),
            ),
        )
        store.release(SCHEDULER, leases)
        show(
            f"lookup of {count} keys and release",
            best_us(
                lambda keys=keys: store.release(
                    SCHEDULER, [store.lookup(SCHEDULER, SPACE, keys, request=1).lease]
                ),
                times=max(5, 2000 // count),
            ),
        )


def stores(subject: Subject) -> None:
    """Time stores into a full arena."""
    made: list[Reserved] = []
    evicted = subject.store.statistics.evicted
    show(
        "reserve of 8 chunks, evicting 8",
        best_us(lambda: made.append(subject.reserve(_names(8))), times=200),
    )
    assert subject.store.statistics.evicted - evicted == 8 * 200 * ROUNDS
    waiting = iter(made)
    show("commit of 8 chunks", best_us(lambda: subject.commit(next(waiting)), times=200))


def rare_calls(subject: Subject) -> None:
    """Time what is linear in the catalogue."""
    store = subject.store
    store.bind(LARGE_SPACE, (GIB,))

    def large() -> None:
        store.reserve(
            SCHEDULER, LARGE_SPACE, _names(1), parent=b"", writers=(WORKER,), now_s=0, request=1
        )

    start_s = time.process_time()
    large()
    show("reserve that empties a growth step", (time.process_time() - start_s) * 1e6)
    assert store.statistics.steps_reclaimed == 1
    start_s = time.process_time()
    chunks, _ = store.clear(None)
    show(f"clear of {chunks} chunks", (time.process_time() - start_s) * 1e6)


def main() -> None:
    """Fill a store and time its calls."""
    keys = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    subject = Subject(keys)
    start_s = time.process_time()
    subject.fill(keys)
    print(f"{keys} keys, filled in {time.process_time() - start_s:.1f} s")
    gc.collect()
    gc.disable()
    lookups(subject)
    stores(subject)
    rare_calls(subject)


if __name__ == "__main__":
    main()
