"""The file-system tier: one file a chunk, straight between slots and the disk.

A write goes to a temporary file and is renamed when it is whole, a read is one call for header
and shards, and the seals are computed on the threads that read, so that the disk works on one
chunk while a processor proves another. Nothing is flushed: what a power cut leaves half-written
does not pass its seals. The tier process makes one of these for each configured folder; why the
record is as it is, is in docs/decisions/0008.
"""

import errno
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvcellar.clock import Clock
from kvcellar.errors import TierUnavailableError
from kvcellar.memory.seal import warm_up
from kvcellar.telemetry.logs import EventLog, OncePer
from kvcellar.tiers.adapters import FileSystemOptions
from kvcellar.tiers.base import (
    ChunkWrite,
    ReadReport,
    ReadWant,
    Tier,
    TierCapabilities,
    TierUsage,
    WriteOutcome,
    WriteReport,
)
from kvcellar.tiers.census import Census
from kvcellar.tiers.chunk_file import (
    DamagedRecordError,
    occupied_bytes,
    read_chunk,
    read_header,
    write_chunk,
)
from kvcellar.tiers.folder import Folder
from kvcellar.tiers.index import ChunkIndex, Presence
from kvcellar.tiers.record import record_bytes
from kvcellar.tiers.room import Room
from kvcellar.tiers.traffic import Traffic
from kvcellar.transport.deadline import Deadline
from kvcellar.units import format_bytes

__all__ = ["FileSystemTier"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What concerns one file, so that it is of no use; anything else may pass and costs no chunk.
_OF_ONE_FILE = frozenset(
    {errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM, errno.EUCLEAN}
)
_BATCH_MAX = 256
_LOG_INTERVAL_S = 60.0

_log = EventLog("kvcellar.tiers")


class FileSystemTier(Tier):
    """Chunks in one folder."""

    def __init__(self, options: FileSystemOptions, clock: Clock) -> None:
        """Open the folder; what is in it is found out in the background.

        Blocks for the second that it takes to compile the seal.

        Raises:
            TierOwnedError: another process has the folder.
            OSError: the folder cannot be made or read.
        """
        self._options = options
        self._clock = clock
        self._index = ChunkIndex(is_shared=options.is_shared, is_isolated=options.is_isolated)
        self._folder = Folder(options.base_path, options.temporary_dir, is_shared=options.is_shared)
        self._direct = options.direct and self._folder.can_bypass_the_page_cache()
        if options.direct and not self._direct:
            _log.info("no O_DIRECT here: the page cache is used", base_path=options.base_path)
        self._room = Room(
            self._index,
            options.base_path,
            self._remove,
            cap_bytes=options.cap_bytes,
            may_evict=options.may_evict,
        )
        self._traffic = Traffic()
        # Twice as many threads as may be at the disk: while one half proves bytes or renames files,
        # the other keeps the disk busy.
        self._readers = ThreadPoolExecutor(2 * options.workers, f"{options.name}-read")
        self._disk = threading.BoundedSemaphore(options.workers)
        self._writers = ThreadPoolExecutor(options.workers, f"{options.name}-write")
        self._disk_for_writes = threading.BoundedSemaphore(-(-options.workers // 2))
        self._numbers = itertools.count()
        self._log_rate = OncePer(clock, _LOG_INTERVAL_S)
        self._lock = threading.Lock()
        self._damaged = 0
        self._is_closed = False
        self._census = Census(
            self._folder,
            self._index,
            on_counted=self._after_counting,
            on_damage=self._remove_damaged,
            discard=None if options.keeps_chunks else self._remove,
        )
        self._census.start()
        # Now, and not by the first read; until it is done numpy does the sums.
        threading.Thread(target=warm_up, name="warm-up", daemon=True).start()

    @property
    def capabilities(self) -> TierCapabilities:
        """Return what this tier is."""
        return TierCapabilities(
            name=self._options.name,
            batch_max=_BATCH_MAX,
            calls_max=self._options.workers,
            is_persistent=self._options.keeps_chunks,
            is_shared=self._options.is_shared,
        )

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Return how many leading keys are there; asks the disk only for what is not known."""
        self._check_open()
        deadline = Deadline(self._clock, timeout_s)
        count = 0
        for key in keys:
            if not self._is_there(key, deadline):
                break
            count += 1
        self._index.touch(keys[:count])
        return count

    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Read files into slots and verify them, `workers` at once."""
        self._check_open()
        assert len(wants) <= _BATCH_MAX, len(wants)
        batch = _ReadBatch(self, wants, Deadline(self._clock, timeout_s))
        with self._traffic.reading():
            self._run(self._readers, batch.read, len(wants))
        report = batch.report()
        self._index.touch([want.key for want in wants[: report.count]])
        return report

    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Write files, each when no read is on its way, at the latest after 0.25 s."""
        self._check_open()
        assert len(writes) <= _BATCH_MAX, len(writes)
        deadline = Deadline(self._clock, timeout_s)
        outcomes = [WriteOutcome.FAILED] * len(writes)
        failures: list[str] = []

        def write(position: int) -> None:
            self._traffic.wait_for_quiet(deadline)
            if deadline.remaining_s() > 0:
                outcome, failure = self._write(writes[position])
                outcomes[position] = outcome
                if failure:
                    failures.append(failure)

        self._run(self._writers, write, len(writes))
        self._index.touch(
            [
                write.record.key
                for write, outcome in zip(writes, outcomes, strict=True)
                if outcome in {WriteOutcome.WRITTEN, WriteOutcome.PRESENT}
            ]
        )
        return WriteReport(tuple(outcomes), failures[0] if failures else "")

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Remove files."""
        self._check_open()
        deadline = Deadline(self._clock, timeout_s)
        return self._remove_all((key for key in keys if self._index.may_have_file(key)), deadline)

    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Remove the files of a namespace; reads the headers of those that are not known yet."""
        self._check_open()
        deadline = Deadline(self._clock, timeout_s)
        if not self._census.wait(deadline.remaining_s()) or not self._index.is_complete:
            raise TierUnavailableError(f"tier {self._options.name} is still counted")
        sure, unsure = self._index.keys_of(namespace)
        found = itertools.chain(sure, (key for key in unsure if self._is_of(key, namespace)))
        return self._remove_all(found, deadline)

    def usage(self) -> TierUsage:
        """Return the sums that the cap is kept with."""
        return TierUsage(
            used_bytes=self._index.used_bytes,
            cap_bytes=self._options.cap_bytes,
            chunks=len(self._index),
            tenant_bytes=self._index.tenant_bytes(),
            evicted=self._room.evicted,
            damaged=self._damaged,
            is_complete=self._index.is_complete,
        )

    def set_quotas(self, limits: Mapping[str, int | None]) -> None:
        """Keep tenants within these bounds from now on."""
        self._index.set_limits(limits)
        for tenant in limits:
            self._room.shrink(tenant)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Move keys to the end of the order."""
        self._index.touch(keys)

    def close(self) -> None:
        """Wait for what runs, then let go of the folder."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._census.stop()
        self._readers.shutdown()
        self._writers.shutdown()
        if not self._options.keeps_chunks:
            for key in self._index.all_keys():
                self._remove(key)
        self._folder.close()

    def check(self) -> None:
        """Assert the index's invariants; linear, for tests."""
        self._index.check()

    def known_keys(self) -> tuple[bytes, ...]:
        """Return the keys that are known, the least recently used first."""
        return self._index.all_keys()

    def wait_until_counted(self, timeout_s: float) -> bool:
        """Wait until the folder has been read to its end; for tests and benchmarks."""
        return self._census.wait(timeout_s)

    def read_one(self, want: ReadWant) -> tuple[int, ...] | None:
        """Read and verify one chunk on this thread.

        Returns:
            Its seals; None for a miss.

        Raises:
            DamagedRecordError: the record did not pass and was removed.
            OSError: the medium failed; where it is this file's fault, that was removed.
        """
        if self._index.look(want.key) is Presence.MISSING and not self._options.is_shared:
            return None
        path = self._folder.path(want.key)
        try:
            seals, occupied = read_chunk(path, want, self._disk, direct=self._direct)
        except FileNotFoundError:
            self._folder.check_device()
            self._remove(want.key)
            return None
        except DamagedRecordError as damage:
            self._remove_damaged(want.key, str(damage))
            raise
        except OSError as error:
            if error.errno in _OF_ONE_FILE:
                self._remove_damaged(want.key, _reason("read", error))
            raise
        self._index.found(want.key, occupied)
        return seals

    def _is_there(self, key: bytes, deadline: Deadline) -> bool:
        presence = self._index.look(key)
        if presence is Presence.THERE:
            return True
        if presence is Presence.MISSING and not self._options.is_shared:
            return False
        if deadline.remaining_s() <= 0:
            return False
        try:
            occupied = occupied_bytes(self._folder.path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TierUnavailableError(_reason("look up", error)) from error
        self._index.found(key, occupied)
        return True

    def _is_of(self, key: bytes, namespace: bytes) -> bool:
        try:
            return read_header(self._folder.path(key), key).namespace == namespace
        except (DamagedRecordError, OSError):
            # Whatever it is, nobody will miss it.
            return True

    def _write(self, write: ChunkWrite) -> tuple[WriteOutcome, str]:
        """Store one chunk; returns why the medium failed as well."""
        record = write.record
        if not self._index.is_complete:
            known = self._index.look(record.key) is Presence.THERE
            return (WriteOutcome.PRESENT if known else WriteOutcome.FULL), ""
        try:
            has_room = self._room.reserve(
                record.key, record_bytes(record.shard_bytes), record.tenant
            )
            if not has_room:
                return (WriteOutcome.PRESENT if has_room is None else WriteOutcome.FULL), ""
        except OSError as error:
            return WriteOutcome.FAILED, _reason("write", error)
        try:
            occupied = self._put(write)
        except OSError as error:
            self._index.drop_write(record.key)
            if error.errno in _FULL:
                return WriteOutcome.FULL, ""
            return WriteOutcome.FAILED, _reason("write", error)
        except BaseException:
            self._index.drop_write(record.key)
            raise
        self._index.end_write(record, occupied)
        return WriteOutcome.WRITTEN, ""

    def _put(self, write: ChunkWrite) -> int:
        """Write a file and give it its name; returns what it occupies. Evicts once when full."""
        key = write.record.key
        temporary = self._folder.temporary_path(key, next(self._numbers))
        path = self._folder.path(key)
        self._folder.check_device()
        try:
            occupied = write_chunk(
                temporary, path, write, self._disk_for_writes, direct=self._direct
            )
        except OSError as error:
            needed_bytes = record_bytes(write.record.shard_bytes)
            if error.errno not in _FULL or not self._room.free(needed_bytes):
                raise
            occupied = write_chunk(
                temporary, path, write, self._disk_for_writes, direct=self._direct
            )
        for name in (path.parent.name, "."):
            self._index.set_fixed(name, self._folder.occupied_bytes(name))
        return occupied

    def _remove_all(self, keys: Iterable[bytes], deadline: Deadline) -> int:
        """Remove chunks' files and return how many there were.

        Raises:
            TierUnavailableError: some are left: this life does not find them, the next one may.
        """
        count = left = 0
        for key in keys:
            if deadline.remaining_s() <= 0:
                raise TierUnavailableError(f"tier {self._options.name} did not remove all in time")
            removed = self._remove(key)
            count += removed is True
            left += removed is None
        if left:
            raise TierUnavailableError(f"tier {self._options.name} cannot remove {left} chunks")
        return count

    def _remove(self, key: bytes) -> bool | None:
        """Remove a chunk's file; returns whether there was one, None where it cannot be removed."""
        if not self._index.take(key):
            return False
        is_gone = was_there = False
        try:
            self._folder.path(key).unlink()
            is_gone = was_there = True
        except FileNotFoundError:
            is_gone = True
        except OSError as error:
            if self._log_rate.admit("remove") is not None:
                _log.warning("chunk not removed", reason=_reason("remove", error))
        finally:
            self._index.left(key, is_gone=is_gone)
        return was_there if is_gone else None

    def _remove_damaged(self, key: bytes, reason: str) -> None:
        self._remove(key)
        with self._lock:
            self._damaged += 1
        held_back = self._log_rate.admit("damaged")
        if held_back is not None:
            name = self._options.name
            _log.warning("chunk damaged", tier=name, reason=reason, held_back=held_back)

    def _after_counting(self) -> None:
        """Keep the cap from the first moment on that it can be known."""
        self._room.trim()
        _log.info(
            "folder counted",
            tier=self._options.name,
            chunks=len(self._index),
            used=format_bytes(self._index.used_bytes),
            cap=format_bytes(self._options.cap_bytes) if self._options.cap_bytes else "5% free",
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailableError(f"tier {self._options.name} is closed")

    def _run(self, pool: ThreadPoolExecutor, act: Callable[[int], None], count: int) -> None:
        """Do `act` for each position and return when none runs any more."""
        futures: list[Future[None]] = []
        try:
            futures.extend(pool.submit(act, position) for position in range(count))
        except RuntimeError:
            # Closed meanwhile: what was begun is waited for, the rest counts as missing.
            _log.debug("tier closed in a call", tier=self._options.name)
        for future in futures:
            future.result()


class _ReadBatch:
    """One `read_many`: its results, and where it ended."""

    def __init__(self, tier: FileSystemTier, wants: Sequence[ReadWant], deadline: Deadline) -> None:
        self._tier = tier
        self._wants = wants
        self._deadline = deadline
        self._seals: list[tuple[int, ...] | None] = [None] * len(wants)
        self._damaged: list[bytes] = []
        self._failures: list[str] = []
        # Only ever lowered, and a thread that reads an old value only does work for nothing.
        self._end = len(wants)

    def read(self, position: int) -> None:
        """Read one chunk, unless one before it is missing."""
        if position > self._end:
            return
        want = self._wants[position]
        seals = None
        try:
            if self._deadline.remaining_s() > 0:
                seals = self._tier.read_one(want)
            else:
                self._failures.append("read: not begun in time")
        except DamagedRecordError:
            self._damaged.append(want.key)
        except OSError as error:
            if error.errno in _OF_ONE_FILE:
                self._damaged.append(want.key)
            self._failures.append(_reason("read", error))
        self._seals[position] = seals
        if seals is None:
            self._end = min(self._end, position)

    def report(self) -> ReadReport:
        """Return the leading chunks that came."""
        leading = list(itertools.takewhile(lambda seals: seals is not None, self._seals))
        return ReadReport(
            count=len(leading),
            seals=tuple(seals for seals in leading if seals is not None),
            damaged=tuple(self._damaged),
            failure=self._failures[0] if self._failures else "",
        )


def _reason(what: str, error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return f"{what}: {error.strerror or error} ({name})"
