"""What the tests of the file-system tier share: opening it, and what `du` and the folder say."""

import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.clock import SystemClock
from kvcellar.testing.chunks import bytes_of, make_want
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.filesystem import FileSystemTier

TIMEOUT_S = 30.0


@contextmanager
def open_folder(base, **options):
    tier = FileSystemTier(FileSystemOptions(name="disk", base_path=base, **options), SystemClock())
    try:
        assert tier.wait_until_counted(TIMEOUT_S)
        yield tier
    finally:
        tier.close()


def write(tier, *chunks):
    return tier.write_many(chunks, timeout_s=TIMEOUT_S)


def hits(tier, *chunks):
    """Say of each chunk by itself whether it is read; a hit has the right bytes and seals."""
    found = []
    for chunk in chunks:
        want = make_want(chunk)
        report = tier.read_many([want], timeout_s=TIMEOUT_S)
        if report.count:
            assert bytes_of(want) == bytes_of(chunk)
            assert report.seals == (chunk.record.seals,)
        found.append(report.count)
    return found


def path_of(base, chunk):
    name = chunk.record.key.hex()
    return base / name[:2] / f"{name}.kv"


def du(base):
    """Return what `du` says that a folder occupies, in bytes."""
    words = ["du", "-s", "-B1", "-x", str(base)]
    # It complains about files that vanish while it looks; its sum stands.
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    return int(answer.stdout.split()[0])


def occupied(base):
    """Return bytes that a folder occupied at one moment, while others write to it.

    `du` adds up what it meets at different moments: a chunk that left behind its back and the one
    that took its place are both counted. What two walks have met both was there between them.
    """
    first, second = _allocated(base), _allocated(base)
    return sum(min(size, second[file]) for file, size in first.items() if file in second)


def _allocated(base):
    """Return the allocated bytes of everything in a folder, by inode and time of change."""
    found = {}
    for folder, _, names in os.walk(base):
        for name in (".", *names):
            with suppress(FileNotFoundError):
                info = Path(folder, name).lstat()
                # An inode's number is given out again; a folder keeps its own.
                written_ns = 0 if name == "." else info.st_mtime_ns
                found[info.st_ino, written_ns] = info.st_blocks * 512
    return found


def stored_keys(base):
    """Return the keys of all files in a folder that are named as chunks are."""
    return {bytes.fromhex(path.stem) for path in base.glob("*/*.kv") if path.is_file()}


def unfinished(base):
    return [path for path in base.glob(".tmp/*") if path.is_file()]


def unfinished_bytes(base):
    """Return what writes that run have put on the disk."""
    total_bytes = 0
    for path in unfinished(base):
        with suppress(FileNotFoundError):
            total_bytes += path.stat().st_blocks * 512
    return total_bytes


def check(tier, base, *, cap_bytes=0):
    """Assert what holds between any two calls."""
    tier.check()
    usage = tier.usage()
    assert du(base) <= usage.used_bytes
    if cap_bytes:
        assert usage.used_bytes <= cap_bytes
    assert set(tier.known_keys()) == stored_keys(base)
    assert unfinished(base) == []
