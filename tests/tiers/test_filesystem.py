"""The file-system tier by itself: cap, order, owner, restart."""

import os
import subprocess
import sys
import threading

import pytest
from tests.tiers.folders import (
    check,
    du,
    hits,
    occupied,
    open_folder,
    path_of,
    stored_keys,
    unfinished,
    unfinished_bytes,
    write,
)

from kvcellar.clock import SystemClock
from kvcellar.errors import TierOwnedError, TierUnavailableError
from kvcellar.testing.chunks import make_chunk, make_key, make_want
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.base import TENANTS_MAX, ChunkRecord, WriteOutcome
from kvcellar.tiers.filesystem import FileSystemTier
from kvcellar.tiers.index import ChunkIndex
from kvcellar.units import MIB

WRITTEN, PRESENT, FULL, FAILED = WriteOutcome
CHUNK_BYTES = 256 * 1024


@pytest.fixture
def base(tmp_path):
    return tmp_path / "kv"


def chunk_of(number, **more):
    return make_chunk(number, (CHUNK_BYTES,), **more)


class TestCap:
    def test_du_never_passes_it_and_the_oldest_leave(self, base):
        with open_folder(base, cap_bytes=2 * MIB) as tier:
            for number in range(20):
                assert write(tier, chunk_of(number)).outcomes == (WRITTEN,)
                assert du(base) <= 2 * MIB
                check(tier, base, cap_bytes=2 * MIB)
            kept = tier.usage().chunks
            assert 5 <= kept <= 7
            expected = [0] * (20 - kept) + [1] * kept
            assert hits(tier, *(chunk_of(number) for number in range(20))) == expected
            assert tier.usage().evicted == 20 - kept

    def test_it_holds_at_every_moment_of_writes_by_many_threads(self, base):
        cap_bytes = 2 * MIB
        with open_folder(base, cap_bytes=cap_bytes, workers=8) as tier:
            stop, sizes = threading.Event(), []

            def watch():
                while not stop.is_set():
                    sizes.append(occupied(base))

            watcher = threading.Thread(target=watch)
            watcher.start()
            for start in range(0, 96, 16):
                write(tier, *(chunk_of(number) for number in range(start, start + 16)))
            stop.set()
            watcher.join()
            assert len(sizes) > 1
            assert max(sizes) <= cap_bytes
            check(tier, base, cap_bytes=cap_bytes)

    def test_a_chunk_that_can_never_fit_evicts_nobody(self, base):
        with open_folder(base, cap_bytes=MIB) as tier:
            write(tier, chunk_of(1))
            assert write(tier, make_chunk(2, (2 * MIB,))).outcomes == (FULL,)
            assert hits(tier, chunk_of(1)) == [1]

    def test_files_that_are_not_ours_count_and_stay(self, base):
        (base / "ours no more").mkdir(parents=True)
        stray = base / "ours no more" / "model.data"
        stray.write_bytes(bytes(MIB))
        with open_folder(base, cap_bytes=2 * MIB) as tier:
            for number in range(8):
                write(tier, chunk_of(number))
                check(tier, base, cap_bytes=2 * MIB)
            assert 1 <= tier.usage().chunks <= 3
        assert stray.read_bytes() == bytes(MIB)

    def test_a_folder_of_strays_above_the_cap_stores_nothing(self, base):
        base.mkdir()
        (base / "model.data").write_bytes(bytes(2 * MIB))
        with open_folder(base, cap_bytes=MIB) as tier:
            report = write(tier, chunk_of(1))
            assert (report.outcomes, report.failure) == ((FULL,), "")

    def test_a_restart_with_a_smaller_cap_keeps_the_newest(self, base):
        chunks = [chunk_of(number) for number in range(10)]
        with open_folder(base) as tier:
            for number, chunk in enumerate(chunks):
                write(tier, chunk)
                os.utime(path_of(base, chunk), (number, number))
        with open_folder(base, cap_bytes=MIB) as tier:
            check(tier, base, cap_bytes=MIB)
            kept = tier.usage().chunks
            assert 1 <= kept <= 3
            assert hits(tier, *chunks) == [0] * (10 - kept) + [1] * kept

    def test_noop_keeps_what_is_there(self, base):
        with open_folder(base, cap_bytes=MIB, may_evict=False) as tier:
            outcomes = [write(tier, chunk_of(number)).outcomes[0] for number in range(5)]
            assert outcomes == sorted(outcomes)
            assert set(outcomes) == {WRITTEN, FULL}
            assert hits(tier, chunk_of(0)) == [1]

    def test_without_a_cap_a_share_of_the_disk_stays_free(self, base, monkeypatch):
        real = os.statvfs

        class Nearly:
            f_blocks, f_frsize = 1000, 4096
            f_bavail = 50 + 100

        with open_folder(base) as tier:
            monkeypatch.setattr(os, "statvfs", lambda _path: Nearly)
            assert write(tier, chunk_of(1)).outcomes == (WRITTEN,)
            Nearly.f_bavail = 50 + 20
            assert write(tier, make_chunk(2, (32 * 4096,))).outcomes == (FULL,)
            monkeypatch.setattr(os, "statvfs", real)


class TestOrder:
    def test_a_prefix_leaves_from_its_tail(self, base):
        prefix = [chunk_of(number) for number in range(4)]
        with open_folder(base, cap_bytes=2 * MIB) as tier:
            write(tier, *prefix)
            for number in range(10, 14):
                write(tier, chunk_of(number))
            found = hits(tier, *prefix)
            assert found == sorted(found, reverse=True)
            assert 0 < sum(found) < 4

    def test_what_is_read_looked_up_or_touched_stays(self, base):
        with open_folder(base, cap_bytes=2 * MIB) as tier:
            write(tier, *(chunk_of(number) for number in range(5)))
            for number in range(10, 30):
                hits(tier, chunk_of(0))
                tier.lookup([make_key(1)], timeout_s=1)
                tier.touch([make_key(2)])
                write(tier, chunk_of(number))
            assert hits(tier, *(chunk_of(number) for number in range(5))) == [1, 1, 1, 0, 0]


class TestOwner:
    def test_a_second_owner_is_refused_with_the_pid_of_the_first(self, base):
        with open_folder(base) as tier:
            with pytest.raises(TierOwnedError, match=rf"{base} is used by pid {os.getpid()} on"):
                FileSystemTier(FileSystemOptions(name="2", base_path=base), SystemClock())
            write(tier, chunk_of(1))
            check(tier, base)
        with open_folder(base) as tier:
            assert hits(tier, chunk_of(1)) == [1]

    def test_two_may_share_if_both_say_so(self, base):
        with open_folder(base, is_shared=True) as one, open_folder(base, is_shared=True) as two:
            write(one, chunk_of(1))
            assert two.lookup([make_key(1)], timeout_s=1) == 1
            assert hits(two, chunk_of(1)) == [1]
            assert write(two, chunk_of(1)).outcomes == (PRESENT,)
            assert two.usage().chunks == 1
            assert one.delete([make_key(1)], timeout_s=1) == 1
            assert hits(two, chunk_of(1)) == [0]
            assert two.usage().chunks == 0


class TestRestart:
    def test_tenants_are_known_again(self, base):
        with open_folder(base) as tier:
            write(tier, chunk_of(1, tenant="a"), chunk_of(2, tenant="b"), chunk_of(3))
            before = tier.usage()
        with open_folder(base) as tier:
            while set(tier.usage().tenant_bytes) != {"a", "b", ""}:
                threading.Event().wait(0.001)
            assert tier.usage().tenant_bytes == before.tenant_bytes
            assert tier.usage().used_bytes == before.used_bytes
            check(tier, base)

    def test_before_all_is_counted_chunks_are_found_and_none_is_stored(self, base, monkeypatch):
        with open_folder(base) as tier:
            write(tier, chunk_of(1))
        gate = threading.Event()
        real = ChunkIndex.complete

        def complete(index):
            gate.wait(30)
            real(index)

        monkeypatch.setattr(ChunkIndex, "found", lambda *_: None)
        monkeypatch.setattr(ChunkIndex, "complete", complete)
        tier = FileSystemTier(FileSystemOptions(name="disk", base_path=base), SystemClock())
        try:
            assert not tier.usage().is_complete
            assert tier.lookup([make_key(1), make_key(2)], timeout_s=1) == 1
            assert hits(tier, chunk_of(1), chunk_of(2)) == [1, 0]
            assert write(tier, chunk_of(2)).outcomes == (FULL,)
            with pytest.raises(TierUnavailableError, match="still counted"):
                tier.clear(b"", timeout_s=0.01)
            gate.set()
            assert tier.wait_until_counted(30)
            assert write(tier, chunk_of(2)).outcomes == (WRITTEN,)
        finally:
            gate.set()
            tier.close()

    def test_nothing_is_kept_on_request(self, base):
        with open_folder(base, keeps_chunks=False) as tier:
            write(tier, chunk_of(1))
            assert hits(tier, chunk_of(1)) == [1]
            assert not tier.capabilities.is_persistent
        assert stored_keys(base) == set()
        with open_folder(base) as tier:
            write(tier, chunk_of(1))
        with open_folder(base, keeps_chunks=False) as tier:
            assert hits(tier, chunk_of(1)) == [0]
            check(tier, base)


def test_a_read_does_not_wait_for_writes(base):
    """Writes let reads pass: while a read is on its way no write begins."""
    with open_folder(base, workers=2) as tier:
        write(tier, chunk_of(1))
        with tier._traffic.reading():
            assert write(tier, chunk_of(2)).outcomes == (WRITTEN,)  # after its patience
            report = tier.write_many([chunk_of(3)], timeout_s=0.01)
            assert report.outcomes == (FAILED,)
        assert tier.write_many([chunk_of(3)], timeout_s=5).outcomes == (WRITTEN,)


def test_more_tenants_than_are_named_are_summed(base):
    index = ChunkIndex()
    index.complete()
    for number in range(TENANTS_MAX + 5):
        record = ChunkRecord(make_key(number), bytes(32), (1,), (0,), tenant=f"t{number}")
        assert index.begin_write(record.key, 4096)
        index.end_write(record, 4096 * (number + 1))
    named = index.tenant_bytes()
    assert len(named) == TENANTS_MAX
    assert named[""] == 4096 * sum(range(1, 7))
    index.check()


WRITER = """
import sys
from pathlib import Path
from kvcellar.testing.chunks import aligned_view, make_key
from kvcellar.tiers.base import ChunkRecord, ChunkWrite
from tests.tiers.folders import open_folder

sizes = (16 << 20,) * 4
record = ChunkRecord(make_key(100), bytes(32), sizes, (0,) * 4)
chunk = ChunkWrite(record, tuple(map(aligned_view, sizes)))
with open_folder(Path(sys.argv[1]), cap_bytes=128 << 20) as tier:
    print("writing", flush=True)
    while True:
        tier.write_many([chunk], timeout_s=30)
        tier.delete([record.key], timeout_s=30)
"""


def test_a_tier_that_dies_in_a_large_write_leaves_nothing_behind(base):
    """SIGKILL while a chunk of 64 MiB is being written; then a new life of the folder."""
    with open_folder(base, cap_bytes=128 * MIB) as tier:
        write(tier, chunk_of(1), chunk_of(2))
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(base)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"writing\n"
        while not unfinished_bytes(base):
            assert child.poll() is None
    finally:
        child.kill()
        child.wait(30)
        child.stdout.close()
    assert unfinished(base) != []
    assert du(base) <= 128 * MIB
    with open_folder(base, cap_bytes=128 * MIB) as tier:
        check(tier, base, cap_bytes=128 * MIB)
        assert hits(tier, chunk_of(1), chunk_of(2)) == [1, 1]
        assert write(tier, chunk_of(3)).outcomes == (WRITTEN,)


def test_reads_and_a_census_of_many_files_go_together(base):
    chunks = [make_chunk(number, (4096,)) for number in range(300)]
    with open_folder(base) as tier:
        write(tier, *chunks[:150])
        write(tier, *chunks[150:])
    tier = FileSystemTier(FileSystemOptions(name="disk", base_path=base), SystemClock())
    try:
        wants = [make_want(chunk) for chunk in chunks[:200]]
        assert tier.read_many(wants, timeout_s=30).count == 200
        assert tier.wait_until_counted(30)
        check(tier, base)
        assert tier.usage().chunks == 300
    finally:
        tier.close()


@pytest.mark.parametrize(
    "remove",
    [
        lambda tier: tier.delete([make_key(1), make_key(2)], timeout_s=5),
        lambda tier: tier.clear(b"", timeout_s=5),
    ],
    ids=["delete", "clear"],
)
def test_a_file_that_cannot_be_removed_is_no_success(base, remove):
    """This life finds it no more, but the next one would."""
    with open_folder(base) as tier:
        write(tier, chunk_of(1), chunk_of(2))
        path = path_of(base, chunk_of(1))
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        with pytest.raises(TierUnavailableError, match="cannot remove 1 chunks"):
            remove(tier)
        assert hits(tier, chunk_of(1), chunk_of(2)) == [0, 0]
        assert not path_of(base, chunk_of(2)).exists()
    path.rmdir()
    path.write_bytes(content)
    with open_folder(base) as tier:
        assert hits(tier, chunk_of(1)) == [1]


def test_what_is_not_removed_in_time_is_no_success(base):
    with open_folder(base) as tier:
        write(tier, chunk_of(1))
        with pytest.raises(TierUnavailableError, match="in time"):
            tier.delete([make_key(1)], timeout_s=0)
        assert hits(tier, chunk_of(1)) == [1]
