"""Tenants on a disk: quotas hold, shares decide who leaves, and a restart forgets nobody's."""

import pytest
from tests.tiers.folders import check, hits, open_folder, write

from kvcellar.testing.chunks import make_chunk
from kvcellar.tiers.base import WriteOutcome
from kvcellar.tiers.room import OVERHEAD_BYTES
from kvcellar.units import MIB

SHARD_BYTES = 60_000
RECORD_BYTES = 64 * 1024 + 4096


def chunk_of(number, tenant):
    return make_chunk(number, (SHARD_BYTES,), tenant=tenant)


def room_for(count):
    """Return a quota with room for so many chunks, with what a file may take while it is new."""
    return count * RECORD_BYTES + OVERHEAD_BYTES


@pytest.fixture
def base(tmp_path):
    return tmp_path / "disk"


def test_a_quota_holds_while_the_disk_has_room(base):
    with open_folder(base, is_isolated=True, cap_bytes=64 * MIB) as tier:
        tier.set_quotas({"a": room_for(3)})
        chunks = [chunk_of(number, "a") for number in range(5)]
        for chunk in chunks:
            assert write(tier, chunk).outcomes == (WriteOutcome.WRITTEN,)
            assert tier.usage().tenant_bytes["a"] <= room_for(3)
        assert hits(tier, *chunks) == [0, 0, 1, 1, 1]
        check(tier, base)


def test_a_tenant_within_its_quota_outlasts_what_others_write(base):
    with open_folder(base, is_isolated=True, cap_bytes=1 * MIB) as tier:
        tier.set_quotas({"kept": room_for(4)})
        kept = [chunk_of(number, "kept") for number in range(4)]
        for chunk in kept:
            # One by one: what is being written counts with what a new file may take.
            write(tier, chunk)
        for number in range(100, 140):
            write(tier, chunk_of(number, f"guest{number % 3}"))
        assert tier.usage().evicted > 20
        assert hits(tier, *kept) == [1, 1, 1, 1]
        check(tier, base)


def test_a_lowered_quota_takes_effect_at_once_and_one_of_nothing_stores_nothing(base):
    with open_folder(base, is_isolated=True, cap_bytes=64 * MIB) as tier:
        chunks = [chunk_of(number, "a") for number in range(6)]
        other = chunk_of(9, "b")
        write(tier, *chunks, other)
        tier.set_quotas({"a": room_for(2)})
        assert sum(hits(tier, *chunks)) == 2
        tier.set_quotas({"a": 0})
        assert hits(tier, *chunks, other) == [0] * 6 + [1]
        assert write(tier, chunks[0]).outcomes == (WriteOutcome.FULL,)
        tier.set_quotas({"a": None})
        assert write(tier, chunks[0]).outcomes == (WriteOutcome.WRITTEN,)
        check(tier, base)


def test_a_folder_in_the_order_of_use_alone_keeps_no_quotas(base):
    with open_folder(base, cap_bytes=64 * MIB) as tier:
        tier.set_quotas({"a": 0})
        assert write(tier, chunk_of(1, "a")).outcomes == (WriteOutcome.WRITTEN,)


def test_after_a_restart_it_is_known_whose_the_chunks_are(base):
    with open_folder(base, is_isolated=True, cap_bytes=64 * MIB) as tier:
        chunks = [chunk_of(number, "a") for number in range(4)]
        other = chunk_of(9, "b")
        write(tier, *chunks, other)
    with open_folder(base, is_isolated=True, cap_bytes=64 * MIB) as tier:
        while set(tier.usage().tenant_bytes) != {"a", "b"}:
            pass
        tier.set_quotas({"a": room_for(1)})
        assert sum(hits(tier, *chunks)) == 1
        assert hits(tier, other) == [1]
        check(tier, base)
