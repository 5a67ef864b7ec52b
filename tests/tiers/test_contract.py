"""The shipped test-suite, over the tiers that are shipped."""

import os

import pytest

from kvcellar.clock import SystemClock
from kvcellar.testing.memory_tier import MemoryTier
from kvcellar.testing.tier_tests import TierTests
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.filesystem import FileSystemTier


class TestMemoryTier(TierTests):
    def make_tier(self):
        return MemoryTier()

    def damage(self, tier, key):
        tier.flip_bit(key)
        return True


class TestFileSystemTier(TierTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.base = tmp_path / "tier"

    def options(self):
        return FileSystemOptions(name="disk", base_path=self.base)

    def make_tier(self):
        tier = FileSystemTier(self.options(), SystemClock())
        assert tier.wait_until_counted(10)
        return tier

    def reopen(self, tier):
        tier.close()
        return self.make_tier()

    def damage(self, tier, key):
        name = key.hex()
        with (self.base / name[:2] / f"{name}.kv").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return True


class TestFileSystemTierThroughThePageCache(TestFileSystemTier):
    def options(self):
        return FileSystemOptions(name="disk", base_path=self.base, direct=False, workers=1)


class TestSharedFolder(TestFileSystemTier):
    def options(self):
        return FileSystemOptions(name="disk", base_path=self.base, is_shared=True)


class TestCappedFolder(TestFileSystemTier):
    def options(self):
        return FileSystemOptions(name="disk", base_path=self.base, cap_bytes=16 << 20)
