import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcellar.clock import FakeClock, SystemClock
from kvcellar.errors import ConfigError, TierBusyError, TierUnavailableError
from kvcellar.testing.chunks import make_chunk, make_key, make_want
from kvcellar.testing.memory_tier import MemoryTier
from kvcellar.testing.tier_tests import TierTests
from kvcellar.tiers.adapters import read_adapter
from kvcellar.tiers.registry import open_tier
from kvcellar.tiers.wrappers import CircuitBroken, Limited, Metered


class TestWrapped(TierTests):
    def make_tier(self):
        clock = SystemClock()
        return Metered(CircuitBroken(Limited(MemoryTier(), clock), clock), clock)


class TestMetered:
    def test_it_counts_what_was_asked_and_what_was_done(self):
        tier = Metered(MemoryTier(cap_bytes=16_384), FakeClock())
        tier.write_many([make_chunk(1), make_chunk(2)], timeout_s=1)
        tier.write_many([make_chunk(2), make_chunk(3, (20_000,))], timeout_s=1)
        tier.lookup([make_key(1), make_key(2), make_key(9)], timeout_s=1)
        tier.read_many([make_want(make_chunk(n)) for n in (1, 2, 9)], timeout_s=1)
        found = tier.statistics()
        assert (found.lookups, found.asked_chunks, found.found_chunks) == (1, 3, 2)
        assert (found.read_chunks, found.read_bytes, found.missed_chunks) == (2, 16_384, 1)
        assert (found.written_chunks, found.written_bytes) == (2, 16_384)
        assert (found.present_chunks, found.full_chunks, found.failed_chunks) == (1, 1, 0)
        assert sum(found.read_s.counts) == sum(found.lookup_s.counts) == 1
        assert sum(found.write_s.counts) == 2
        assert found.failures == 0

    def test_it_counts_failures_and_damage(self):
        inner = MemoryTier()
        tier = Metered(inner, FakeClock())
        tier.write_many([make_chunk(1)], timeout_s=1)
        inner.flip_bit(make_key(1))
        tier.read_many([make_want(make_chunk(1))], timeout_s=1)
        inner.failure = "unplugged"
        with pytest.raises(TierUnavailableError, match="unplugged"):
            tier.lookup([make_key(1)], timeout_s=1)
        assert (tier.statistics().damaged_chunks, tier.statistics().failures) == (1, 1)
        assert sum(tier.statistics().lookup_s.counts) == 1


class TestCircuitBroken:
    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    def inner(self):
        return MemoryTier()

    @pytest.fixture
    def tier(self, inner, clock):
        return CircuitBroken(inner, clock, failures_max=3, probe_s=2.0)

    def lookup(self, tier):
        try:
            return tier.lookup([make_key(1)], timeout_s=1)
        except TierUnavailableError as error:
            return str(error)

    def test_it_opens_after_failures_in_a_row_and_not_before(self, tier, inner):
        inner.failure = "unplugged"
        assert self.lookup(tier) == self.lookup(tier) == "unplugged"
        inner.failure = ""
        assert self.lookup(tier) == 0
        inner.failure = "unplugged"
        assert [self.lookup(tier) for _ in range(3)] == ["unplugged"] * 3
        assert tier.trouble == "reading is fenced off: unplugged"
        inner.failure = ""
        assert self.lookup(tier) == "reading from memory is fenced off: unplugged"

    def test_a_probe_closes_it_or_waits_longer(self, tier, inner, clock):
        inner.failure = "unplugged"
        for _ in range(3):
            self.lookup(tier)
        clock.advance(2.0)
        assert self.lookup(tier) == "unplugged"
        clock.advance(3.9)
        assert "fenced off" in self.lookup(tier)
        clock.advance(0.1)
        inner.failure = ""
        assert self.lookup(tier) == 0
        assert tier.trouble == ""
        assert self.lookup(tier) == 0

    def test_only_one_call_is_the_probe(self, tier, inner, clock):
        inner.failure = "unplugged"
        for _ in range(3):
            self.lookup(tier)
        inner.failure = ""
        inner.gate.clear()
        clock.advance(2.0)
        with ThreadPoolExecutor(1) as pool:
            probe = pool.submit(tier.read_many, [make_want(make_chunk(1))], timeout_s=30)
            while tier._reads._next_probe_s <= clock.monotonic_s():
                threading.Event().wait(0.001)
            assert "fenced off" in self.lookup(tier)
            inner.gate.set()
            assert probe.result().count == 0
        assert self.lookup(tier) == 0

    def test_writes_fail_alone(self, tier, inner):
        tier.write_many([make_chunk(1)], timeout_s=1)
        inner.gate.clear()
        for _ in range(3):
            report = tier.write_many([make_chunk(2)], timeout_s=0.001)
            assert report.failure == "the medium hangs"
        inner.gate.set()
        with pytest.raises(TierUnavailableError, match="writing to memory is fenced off"):
            tier.write_many([make_chunk(2)], timeout_s=1)
        assert tier.read_many([make_want(make_chunk(1))], timeout_s=1).count == 1
        assert tier.delete([make_key(1)], timeout_s=1) == 1

    def test_a_full_queue_is_no_failure_of_the_medium(self, clock):
        class Busy(MemoryTier):
            def lookup(self, keys, *, timeout_s):
                raise TierBusyError("many wait")

        tier = CircuitBroken(Busy(), clock, failures_max=1)
        assert self.lookup(tier) == self.lookup(tier) == "many wait"


class TestLimited:
    def test_a_hanging_medium_keeps_its_calls_and_the_others_end_in_time(self):
        inner = MemoryTier()
        tier = Limited(inner, SystemClock(), calls_max=1, waiting_max=1)
        inner.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(tier.read_many, [make_want(make_chunk(1))], timeout_s=30)
            while tier._reads._places._value:
                threading.Event().wait(0.001)
            with pytest.raises(TierUnavailableError, match=r"no call ended within 0\.01 s"):
                tier.lookup([make_key(1)], timeout_s=0.01)
            assert tier.write_many([], timeout_s=0.01).failure == "the medium hangs"
            inner.gate.set()
            assert hanging.result().count == 0
        assert tier.lookup([make_key(1)], timeout_s=1) == 0

    def test_more_than_may_wait_are_refused_at_once(self):
        inner = MemoryTier()
        tier = Limited(inner, SystemClock(), calls_max=1, waiting_max=1)
        inner.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(tier.read_many, [make_want(make_chunk(1))], timeout_s=30)
                for _ in range(2)
            ]
            while not tier._reads._waiting or tier._reads._places._value:
                threading.Event().wait(0.001)
            with pytest.raises(TierBusyError, match="1 calls wait already"):
                tier.lookup([make_key(1)], timeout_s=30)
            inner.gate.set()
            assert [call.result().count for call in calls] == [0, 0]


class TestRegistry:
    def test_an_adapter_becomes_a_tier(self, tmp_path):
        adapter = read_adapter(f'{{"type":"fs","base_path":"{tmp_path}/kv"}}', position=1)
        tier = open_tier(adapter, SystemClock())
        try:
            assert tier.capabilities.name == "fs-1"
            assert tier.trouble == ""
        finally:
            tier.close()

    def test_a_folder_that_cannot_be_one_is_refused_by_name(self, tmp_path):
        (tmp_path / "file").touch()
        adapter = read_adapter(f'{{"type":"fs","base_path":"{tmp_path}/file/kv"}}')
        with pytest.raises(ConfigError, match=r"base_path .*/file/kv cannot be used: Not a dir"):
            open_tier(adapter, SystemClock())
