"""Any order of calls, deaths, restarts and damage: the cap holds, and no hit is wrong.

A kill is what the folder looks like afterwards: the process is gone without `close`, and writes
that had begun left their temporary files. The real SIGKILL is in `test_filesystem`.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tiers.folders import TIMEOUT_S, check, du, hits, path_of, write

from kvcellar.clock import SystemClock
from kvcellar.testing.chunks import NAMESPACE, make_chunk, make_key
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.base import WriteOutcome
from kvcellar.tiers.filesystem import FileSystemTier

NUMBERS = st.integers(0, 11)
SOME = st.lists(NUMBERS, min_size=1, max_size=5, unique=True)
CAPS = st.sampled_from([0, 200_000, 400_000, 1_000_000])
OTHERS = b"o" * 32


def chunk_of(number):
    """Return a chunk; some have several shards, odd sizes, a tenant or another namespace."""
    sizes = [(40_000,), (1,), (100_000, 3), (4096, 8192, 4095)][number % 4]
    namespace = NAMESPACE if number % 3 else OTHERS
    return make_chunk(number, sizes, tenant=f"t{number % 3}", namespace=namespace)


class Disk(RuleBasedStateMachine):
    """One folder, and what may be in it."""

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="kvcellar-states-"))
        self.tier = None
        self.cap_bytes = 0
        self.maybe = set()  # what was written and not removed; the cap may have pushed it out
        self.is_bounded = False  # whether anything can have been pushed out

    def teardown(self):
        if self.tier is not None:
            self.tier.close()
        shutil.rmtree(self.base)

    @initialize(cap_bytes=CAPS)
    def begin(self, cap_bytes):
        self.open(cap_bytes)

    def open(self, cap_bytes):
        self.cap_bytes = cap_bytes
        self.is_bounded |= cap_bytes > 0
        options = FileSystemOptions(name="disk", base_path=self.base, cap_bytes=cap_bytes)
        self.tier = FileSystemTier(options, SystemClock())
        assert self.tier.wait_until_counted(TIMEOUT_S)

    @rule(numbers=SOME)
    def write(self, numbers):
        report = write(self.tier, *map(chunk_of, numbers))
        assert report.failure == ""
        for number, outcome in zip(numbers, report.outcomes, strict=True):
            if outcome is WriteOutcome.WRITTEN:
                self.maybe.add(number)
            elif outcome is WriteOutcome.PRESENT:
                assert number in self.maybe
            else:
                assert outcome is WriteOutcome.FULL
                assert self.cap_bytes

    @rule(numbers=SOME)
    def read(self, numbers):
        found = hits(self.tier, *map(chunk_of, numbers))
        for number, hit in zip(numbers, found, strict=True):
            if hit:
                assert number in self.maybe
            elif not self.is_bounded:
                assert number not in self.maybe

    @rule(numbers=SOME)
    def look_up(self, numbers):
        count = self.tier.lookup([make_key(number) for number in numbers], timeout_s=TIMEOUT_S)
        assert set(numbers[:count]) <= self.maybe

    @rule(numbers=SOME)
    def delete(self, numbers):
        before = {key for key in map(make_key, numbers) if key in self.tier.known_keys()}
        count = self.tier.delete([make_key(number) for number in numbers], timeout_s=TIMEOUT_S)
        assert count == len(before)
        self.maybe -= set(numbers)

    @rule(namespace=st.sampled_from([NAMESPACE, OTHERS, b""]))
    def clear(self, namespace):
        self.tier.clear(namespace, timeout_s=TIMEOUT_S)
        self.maybe = {
            number
            for number in self.maybe
            if namespace and chunk_of(number).record.namespace != namespace
        }

    @rule(number=NUMBERS, offset=st.integers(0, 20_000))
    def damage(self, number, offset):
        path = path_of(self.base, chunk_of(number))
        if path.exists():
            content = bytearray(path.read_bytes())
            content[offset % len(content)] ^= 1
            path.write_bytes(content)
            assert hits(self.tier, chunk_of(number)) == [0]
            self.maybe.discard(number)

    @rule(cap_bytes=CAPS)
    def reopen(self, cap_bytes):
        self.tier.close()
        self.open(cap_bytes)

    @rule(cap_bytes=CAPS, number=NUMBERS, size_bytes=st.integers(0, 50_000))
    def kill(self, cap_bytes, number, size_bytes):
        used_bytes = du(self.base)
        self.tier.close()
        unfinished = self.base / ".tmp" / f"{make_key(number).hex()}.{number}.tmp"
        if not self.cap_bytes or used_bytes + size_bytes + 4096 <= self.cap_bytes:
            unfinished.write_bytes(bytes(size_bytes))
        self.open(cap_bytes)
        assert not unfinished.exists()

    @invariant()
    def holds(self):
        if self.tier is not None:
            check(self.tier, self.base, cap_bytes=self.cap_bytes)


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
