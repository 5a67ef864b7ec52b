"""What a real medium does to a tier: full, read-only, damaged files, missing permissions."""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.tiers.folders import check, du, hits, open_folder, path_of, unfinished, write

from kvcellar.clock import SystemClock
from kvcellar.errors import TierUnavailableError
from kvcellar.testing.chunks import make_chunk, make_key, make_want
from kvcellar.tiers import chunk_file
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.base import WriteOutcome
from kvcellar.tiers.filesystem import FileSystemTier
from kvcellar.units import MIB

WRITTEN, PRESENT, FULL, FAILED = WriteOutcome
NOBODY = 65_534
SHAPE = (CHUNK := 256 * 1024 - 100, 5000)


def chunk_of(number):
    return make_chunk(number, SHAPE)


def mount(*words):
    answer = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip(f"cannot mount: {answer.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "none", str(disk))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def base(tmp_path):
    return tmp_path / "kv"


class TestFullDisk:
    def test_older_chunks_leave_when_it_is_smaller_than_the_cap(self, small_disk):
        base = small_disk / "kv"
        with open_folder(base, cap_bytes=64 * MIB) as tier:
            for number in range(30):
                report = write(tier, chunk_of(number))
                assert (report.outcomes, report.failure) == ((WRITTEN,), "")
                check(tier, base)
            found = hits(tier, *(chunk_of(number) for number in range(30)))
            assert found == sorted(found)
            assert 10 <= sum(found) < 16

    def test_it_stores_again_when_space_returns(self, small_disk):
        base, filler = small_disk / "kv", small_disk / "filler"
        with open_folder(base, cap_bytes=64 * MIB, may_evict=False) as tier:
            write(tier, chunk_of(0))
            fill(filler)
            report = write(tier, chunk_of(1), chunk_of(2))
            assert (report.outcomes, report.failure) == ((FULL, FULL), "")
            assert hits(tier, chunk_of(0), chunk_of(1)) == [1, 0]
            check(tier, base)
            filler.unlink()
            assert write(tier, chunk_of(1)).outcomes == (WRITTEN,)
            assert hits(tier, chunk_of(0), chunk_of(1)) == [1, 1]

    def test_a_full_disk_can_be_opened_and_read(self, small_disk):
        base = small_disk / "kv"
        with open_folder(base) as tier:
            write(tier, chunk_of(0))
        (base / ".owner").unlink()
        fill(small_disk / "filler")
        with open_folder(base, may_evict=False) as tier:
            assert hits(tier, chunk_of(0)) == [1]
            assert write(tier, chunk_of(1)).outcomes == (FULL,)

    def test_without_a_cap_it_is_never_filled(self, small_disk):
        base = small_disk / "kv"
        with open_folder(base) as tier:
            for number in range(30):
                assert write(tier, chunk_of(number)).outcomes == (WRITTEN,)
                assert shutil.disk_usage(small_disk).free >= 0.05 * 4 * MIB
                check(tier, base)


def fill(path):
    """Take what is free, to the last page."""
    free_bytes = shutil.disk_usage(path.parent).free
    path.write_bytes(bytes(free_bytes))


class TestReadOnlyDisk:
    def test_it_is_read_and_written_again_when_it_can_be(self, small_disk):
        base = small_disk / "kv"
        with open_folder(base) as tier:
            write(tier, *(chunk_of(number) for number in range(3)))
            flip(path_of(base, chunk_of(2)), 5000)
            mount("-o", "remount,ro", str(small_disk))
            report = write(tier, chunk_of(5))
            assert report.outcomes == (FAILED,)
            assert "EROFS" in report.failure
            assert hits(tier, chunk_of(0), chunk_of(1), chunk_of(2)) == [1, 1, 0]
            with pytest.raises(TierUnavailableError):
                tier.delete([make_key(0)], timeout_s=1)
            assert tier.lookup([make_key(1), make_key(2)], timeout_s=1) == 1
            assert du(base) <= tier.usage().used_bytes
            mount("-o", "remount,rw", str(small_disk))
            report = write(tier, chunk_of(2), chunk_of(5))
            assert report.outcomes == (WRITTEN, WRITTEN)
            assert hits(tier, *(chunk_of(number) for number in (1, 2, 5))) == [1, 1, 1]
            tier.delete([make_key(0)], timeout_s=1)
            check(tier, base)

    def test_it_can_be_opened(self, small_disk):
        base = small_disk / "kv"
        with open_folder(base) as tier:
            write(tier, chunk_of(0))
        mount("-o", "remount,ro", str(small_disk))
        with open_folder(base) as tier:
            assert hits(tier, chunk_of(0)) == [1]
            assert "EROFS" in write(tier, chunk_of(1)).failure


class TestLostDisk:
    def test_nothing_is_written_below_it_and_nothing_forgotten(self, small_disk):
        """The disk is unmounted under the tier, which leaves the folder of the mount point."""
        base = small_disk / "kv"
        beside = small_disk.parent / "beside"
        beside.mkdir()
        mount("--bind", str(small_disk), str(beside))
        try:
            with open_folder(base) as tier:
                write(tier, chunk_of(1))
                subprocess.run(["umount", "-l", str(small_disk)], check=True)
                base.mkdir()
                assert "ENODEV" in write(tier, chunk_of(2)).failure
                report = tier.read_many([make_want(chunk_of(1))], timeout_s=5)
                assert (report.count, report.damaged) == (0, ())
                assert "ENODEV" in report.failure
                assert list(base.iterdir()) == []
                mount("--bind", str(beside), str(small_disk))
                assert hits(tier, chunk_of(1)) == [1]
                assert write(tier, chunk_of(2)).outcomes == (WRITTEN,)
                check(tier, base)
        finally:
            subprocess.run(["umount", str(beside)], check=True)


def flip(path, offset):
    """Flip one bit; a negative offset counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def swap(path, other):
    aside = path.with_suffix(".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def replace_by(make):
    def act(path, _other):
        path.unlink()
        make(path)

    return act


# What is done to the second of three files; where the third suffers as well its name says so.
DAMAGES = {
    "a bit of the magic": lambda path, _: flip(path, 0),
    "a bit of the key": lambda path, _: flip(path, 30),
    "a bit of a seal": lambda path, _: flip(path, 430),
    "a bit behind the header's fields": lambda path, _: flip(path, 3000),
    "a bit of the header's digest": lambda path, _: flip(path, 4090),
    "the first bit of the first shard": lambda path, _: flip(path, 4096),
    "a bit in the middle": lambda path, _: flip(path, 4096 + CHUNK // 2),
    "a bit of the first shard's last byte": lambda path, _: flip(path, 4096 + CHUNK - 1),
    "a bit behind the first shard": lambda path, _: flip(path, 4096 + CHUNK),
    "the file's last bit": lambda path, _: flip(path, -1),
    "cut by a byte": lambda path, _: os.truncate(path, path.stat().st_size - 1),
    "cut by a page": lambda path, _: os.truncate(path, path.stat().st_size - 4096),
    "cut to its header": lambda path, _: os.truncate(path, 4096),
    "cut within its header": lambda path, _: os.truncate(path, 100),
    "emptied": lambda path, _: os.truncate(path, 0),
    "too long": lambda path, _: os.truncate(path, path.stat().st_size + 4096),
    "swapped with the third": swap,
    "a copy of the third": lambda path, other: shutil.copy(other, path),
    "a pipe": replace_by(os.mkfifo),
    "a link to nowhere": replace_by(lambda path: path.symlink_to("nowhere")),
    "a link to the third's folder": replace_by(lambda path: path.symlink_to("../")),
}


@pytest.mark.parametrize("restarts", [False, True], ids=["while it runs", "before a restart"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_counted_miss_and_the_others_are_read(base, name, restarts):
    chunks = [chunk_of(number) for number in range(3)]
    expected = [1, 0, 0 if "swapped" in name else 1]
    with open_folder(base) as tier:
        write(tier, *chunks)
        if not restarts:
            DAMAGES[name](path_of(base, chunks[1]), path_of(base, chunks[2]))
            assert hits(tier, *chunks) == expected
            assert tier.usage().damaged == expected.count(0)
            assert write(tier, *chunks).outcomes.count(WRITTEN) == expected.count(0)
            assert hits(tier, *chunks) == [1, 1, 1]
            check(tier, base)
            return
    DAMAGES[name](path_of(base, chunks[1]), path_of(base, chunks[2]))
    with open_folder(base) as tier:
        assert hits(tier, *chunks) == expected
        # The census met it as well, and may be about to remove it.
        while write(tier, chunks[1]).outcomes == (PRESENT,):
            assert hits(tier, chunks[1]) == [0]
        assert hits(tier, *chunks)[1] == 1


def test_a_file_that_was_removed_by_hand_is_a_miss_and_no_damage(base):
    with open_folder(base) as tier:
        write(tier, chunk_of(1), chunk_of(2))
        path_of(base, chunk_of(1)).unlink()
        assert hits(tier, chunk_of(1), chunk_of(2)) == [0, 1]
        assert tier.usage().damaged == 0
        check(tier, base)
        assert write(tier, chunk_of(1)).outcomes == (WRITTEN,)


def test_a_folder_in_a_chunks_place_is_a_miss(base):
    with open_folder(base) as tier:
        write(tier, chunk_of(1), chunk_of(2))
        path_of(base, chunk_of(1)).unlink()
        path_of(base, chunk_of(1)).mkdir()
        assert hits(tier, chunk_of(1), chunk_of(2)) == [0, 1]
        report = write(tier, chunk_of(1))
        assert report.outcomes == (FAILED,)
        assert "EISDIR" in report.failure
        assert unfinished(base) == []


def test_strays_are_counted_and_left_alone(base):
    with open_folder(base) as tier:
        write(tier, chunk_of(1))
    name = make_key(1).hex()
    strays = [
        base / "notes.txt",
        base / f"{name}.kv",
        base / name[:2] / f"{name[:-1]}.kv",
        base / name[:2] / f"{name.upper()}.kv",
        base / name[:2] / "deep" / f"{name}.kv",
        base / ".tmp" / "somebody's.tmp",
        base / "zz" / f"{'z' * 64}.kv",
    ]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"not ours" * 1000)
    with open_folder(base) as tier:
        assert tier.usage().chunks == 1
        assert hits(tier, chunk_of(1)) == [1]
        assert du(base) <= tier.usage().used_bytes
        tier.clear(b"", timeout_s=30)
    assert all(stray.read_bytes() == b"not ours" * 1000 for stray in strays)


class TestPermissions:
    @pytest.fixture
    def theirs(self):
        """A folder of a user without privileges, and this process as that user."""
        if os.geteuid():
            pytest.skip("only root can become somebody else")
        folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(0)
            shutil.rmtree(folder)

    def test_a_file_that_may_not_be_read_is_a_miss_and_leaves(self, theirs):
        with open_folder(theirs) as tier:
            write(tier, chunk_of(1), chunk_of(2))
            path_of(theirs, chunk_of(1)).chmod(0)
            report = tier.read_many([make_want(chunk_of(1))], timeout_s=5)
            assert (report.count, report.damaged) == (0, (make_key(1),))
            assert "EACCES" in report.failure
            assert hits(tier, chunk_of(2)) == [1]
            assert write(tier, chunk_of(1)).outcomes == (WRITTEN,)
            assert hits(tier, chunk_of(1)) == [1]
            check(tier, theirs)

    def test_a_folder_that_may_not_be_written_is_read(self, theirs):
        with open_folder(theirs) as tier:
            write(tier, chunk_of(1))
            folders = [theirs, *(path for path in theirs.iterdir() if path.is_dir())]
            for folder in folders:
                folder.chmod(0o500)
            report = write(tier, chunk_of(2))
            assert report.outcomes == (FAILED,)
            assert "EACCES" in report.failure
            assert hits(tier, chunk_of(1)) == [1]
            for folder in folders:
                folder.chmod(0o700)
            assert write(tier, chunk_of(2)).outcomes == (WRITTEN,)
            check(tier, theirs)

    def test_a_folder_that_may_not_be_used_is_refused_or_asked_in_vain(self, theirs):
        with open_folder(theirs, is_shared=True) as tier:
            theirs.chmod(0)
            with pytest.raises(TierUnavailableError, match="EACCES"):
                tier.lookup([make_key(1)], timeout_s=1)
            with pytest.raises(OSError, match="Permission denied"):
                FileSystemTier(
                    FileSystemOptions(name="2", base_path=theirs / "below"), SystemClock()
                )
            theirs.chmod(0o700)


def test_an_input_output_error_is_reported_and_that_chunk_leaves(base, monkeypatch):
    """No medium here fails on order, so the system call is made to."""
    with open_folder(base) as tier:
        write(tier, chunk_of(1), chunk_of(2))

        def fail(*_):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(chunk_file.os, "preadv", fail)
            report = tier.read_many([make_want(chunk_of(1))], timeout_s=5)
        assert (report.count, report.damaged) == (0, (make_key(1),))
        assert "EIO" in report.failure
        with monkeypatch.context() as patch:
            patch.setattr(chunk_file.os, "pwritev", fail)
            report = write(tier, chunk_of(3))
        assert report.outcomes == (FAILED,)
        assert "EIO" in report.failure
        assert hits(tier, chunk_of(1), chunk_of(2), chunk_of(3)) == [0, 1, 0]
        check(tier, base)


def test_running_out_of_descriptors_costs_no_chunk(base, monkeypatch):
    with open_folder(base) as tier:
        write(tier, chunk_of(1))
        real = os.open

        def full(path, *arguments, **more):
            if str(path).endswith(".kv"):
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(chunk_file.os, "open", full)
            report = tier.read_many([make_want(chunk_of(1))], timeout_s=5)
        assert (report.count, report.damaged) == (0, ())
        assert "EMFILE" in report.failure
        assert hits(tier, chunk_of(1)) == [1]
