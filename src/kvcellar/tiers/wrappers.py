"""What every tier is wrapped in: a bound on its calls, a breaker, and meters.

So a tier contains what is its own and nothing else. `registry` puts them around each one, from the
inside out `Limited`, `CircuitBroken`, `Metered`; the tier process talks to the outermost.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvcellar.clock import Clock
from kvcellar.errors import TierBusyError, TierUnavailableError
from kvcellar.telemetry.histogram import Histogram, HistogramSnapshot
from kvcellar.telemetry.logs import EventLog
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
from kvcellar.transport.deadline import Deadline

__all__ = ["CircuitBroken", "Limited", "Metered", "TierStatistics"]

_PROBE_MAX_S = 60.0
_Answer = TypeVar("_Answer")

_log = EventLog("kvcellar.tiers")


class _Around(Tier):
    """A tier around another: hands everything on."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> TierCapabilities:
        """Return the inner tier's."""
        return self._inner.capabilities

    @property
    def trouble(self) -> str:
        """Return the inner tier's."""
        return self._inner.trouble

    def usage(self) -> TierUsage:
        """Return the inner tier's."""
        return self._inner.usage()

    def set_quotas(self, limits: Mapping[str, int | None]) -> None:
        """Hand on."""
        self._inner.set_quotas(limits)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Hand on."""
        self._inner.touch(keys)

    def close(self) -> None:
        """Close the inner tier."""
        self._inner.close()


class _Turnstile:
    """Lets so many through at once, and so many wait; thread-safe."""

    def __init__(self, name: str, clock: Clock, *, calls_max: int, waiting_max: int) -> None:
        self._name = name
        self._clock = clock
        self._waiting_max = waiting_max
        self._places = threading.Semaphore(calls_max)
        self._lock = threading.Lock()
        self._waiting = 0

    @contextmanager
    def enter(self, timeout_s: float) -> Iterator[float]:
        """Wait for a place, and yield the seconds that are left.

        Raises:
            TierBusyError: too many wait already.
            TierUnavailableError: no place became free in time.
        """
        deadline = Deadline(self._clock, timeout_s)
        with self._lock:
            if self._waiting >= self._waiting_max:
                raise TierBusyError(f"tier {self._name}: {self._waiting} calls wait already")
            self._waiting += 1
        try:
            has_place = self._places.acquire(timeout=max(0.0, timeout_s))
        finally:
            with self._lock:
                self._waiting -= 1
        if not has_place:
            raise TierUnavailableError(f"tier {self._name}: no call ended within {timeout_s:g} s")
        try:
            yield deadline.remaining_s()
        finally:
            self._places.release()


class Limited(_Around):
    """Bounds how many calls run and how many wait; reads and writes each have their own places.

    A medium that hangs keeps the calls that it has, and all others end at their deadline.
    """

    def __init__(
        self,
        inner: Tier,
        clock: Clock,
        *,
        calls_max: int | None = None,
        waiting_max: int = 64,
    ) -> None:
        """Wrap.

        Args:
            inner: the tier.
            clock: for deadlines.
            calls_max: of each kind at once; what the tier says when None.
            waiting_max: of each kind.
        """
        super().__init__(inner)
        name, calls_max = inner.capabilities.name, calls_max or inner.capabilities.calls_max
        self._reads, self._writes = (
            _Turnstile(name, clock, calls_max=calls_max, waiting_max=waiting_max) for _ in range(2)
        )

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Look up when a place is free."""
        with self._reads.enter(timeout_s) as left_s:
            return self._inner.lookup(keys, timeout_s=left_s)

    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Read when a place is free."""
        with self._reads.enter(timeout_s) as left_s:
            return self._inner.read_many(wants, timeout_s=left_s)

    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Write when a place is free."""
        with self._writes.enter(timeout_s) as left_s:
            return self._inner.write_many(writes, timeout_s=left_s)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Remove when a place is free."""
        with self._writes.enter(timeout_s) as left_s:
            return self._inner.delete(keys, timeout_s=left_s)

    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Remove when a place is free."""
        with self._writes.enter(timeout_s) as left_s:
            return self._inner.clear(namespace, timeout_s=left_s)


class _Circuit:
    """One direction of a breaker; thread-safe."""

    def __init__(self, name: str, clock: Clock, *, failures_max: int, probe_s: float) -> None:
        self._name = name
        self._clock = clock
        self._failures_max = failures_max
        self._first_probe_s = probe_s
        self._probe_s = probe_s
        self._lock = threading.Lock()
        self._failures = 0
        self._next_probe_s = 0.0
        self.reason = ""
        """Why it is open; "" while it is closed."""

    def pass_or_raise(self) -> None:
        """Let a call through, unless it is open and the next probe is not due.

        Raises:
            TierUnavailableError: it is open.
        """
        if not self.reason:
            return
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self.reason and now_s < self._next_probe_s:
                raise TierUnavailableError(f"{self._name} is fenced off: {self.reason}")
            # This call is the probe; the others go on waiting for what becomes of it.
            self._next_probe_s = now_s + self._probe_s

    def note(self, failure: str) -> None:
        """Note how a call ended; "" for well."""
        if not failure and not self._failures:
            return
        with self._lock:
            if not failure:
                if self.reason:
                    _log.info("tier is back", tier=self._name)
                self._failures, self.reason, self._probe_s = 0, "", self._first_probe_s
                return
            self._failures += 1
            if self._failures < self._failures_max:
                return
            if self.reason:
                self._probe_s = min(2 * self._probe_s, _PROBE_MAX_S)
            else:
                _log.warning("tier fenced off", tier=self._name, reason=failure)
            self.reason = failure
            self._next_probe_s = self._clock.monotonic_s() + self._probe_s


class CircuitBroken(_Around):
    """Stops asking a medium that fails; reads and writes are fenced off apart.

    After so many failures in a row calls end at once with `TierUnavailableError`, but for one now
    and then, which tries again. A disk that became read-only is still read.
    """

    def __init__(
        self, inner: Tier, clock: Clock, *, failures_max: int = 5, probe_s: float = 2.0
    ) -> None:
        """Wrap.

        Args:
            inner: the tier.
            clock: for the probes.
            failures_max: failures in a row that open it.
            probe_s: from opening to the first probe; doubled after each failed one, to a minute.
        """
        super().__init__(inner)
        name = inner.capabilities.name
        self._reads, self._writes = (
            _Circuit(f"{what} {name}", clock, failures_max=failures_max, probe_s=probe_s)
            for what in ("reading from", "writing to")
        )

    @property
    def trouble(self) -> str:
        """Return what is fenced off, and why."""
        open_ones = (
            f"{what} is fenced off: {circuit.reason}"
            for what, circuit in (("reading", self._reads), ("writing", self._writes))
            if circuit.reason
        )
        return "; ".join(open_ones) or self._inner.trouble

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Look up unless reads are fenced off."""
        return _guarded(
            self._reads, lambda: self._inner.lookup(keys, timeout_s=timeout_s), lambda _count: ""
        )

    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Read unless reads are fenced off."""
        return _guarded(
            self._reads,
            lambda: self._inner.read_many(wants, timeout_s=timeout_s),
            lambda report: report.failure,
        )

    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Write unless writes are fenced off."""
        return _guarded(
            self._writes,
            lambda: self._inner.write_many(writes, timeout_s=timeout_s),
            lambda report: report.failure,
        )

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Remove, also while writes are fenced off: a damaged chunk has to leave if it can."""
        return self._inner.delete(keys, timeout_s=timeout_s)

    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Remove, also while writes are fenced off."""
        return self._inner.clear(namespace, timeout_s=timeout_s)


class TierStatistics(msgspec.Struct, frozen=True):
    """What a tier was asked and did, since it was opened.

    Attributes:
        lookups: calls.
        asked_chunks: chunks that they asked for.
        found_chunks: chunks that they found.
        read_chunks: chunks that were read and verified.
        read_bytes: their bytes.
        missed_chunks: chunks that a read was asked for and did not give.
        damaged_chunks: records that a read found damaged.
        written_chunks: chunks that were written.
        written_bytes: their bytes.
        present_chunks: chunks that were there already.
        full_chunks: chunks for which there was no room.
        failed_chunks: chunks that were not written because the medium failed or time was up.
        failures: calls in which the medium failed or could not be asked.
        lookup_s: how long lookups took.
        read_s: how long reads took.
        write_s: how long writes took.
    """

    lookups: int
    asked_chunks: int
    found_chunks: int
    read_chunks: int
    read_bytes: int
    missed_chunks: int
    damaged_chunks: int
    written_chunks: int
    written_bytes: int
    present_chunks: int
    full_chunks: int
    failed_chunks: int
    failures: int
    lookup_s: HistogramSnapshot
    read_s: HistogramSnapshot
    write_s: HistogramSnapshot


class Metered(_Around):
    """Counts what a tier is asked and does."""

    def __init__(self, inner: Tier, clock: Clock) -> None:
        """Wrap; everything begins at zero."""
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._lookup_s, self._read_s, self._write_s = Histogram(), Histogram(), Histogram()

    def statistics(self) -> TierStatistics:
        """Return the counts as they are now; from any thread."""
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTS}
            return TierStatistics(
                **counts,
                lookup_s=self._lookup_s.snapshot(),
                read_s=self._read_s.snapshot(),
                write_s=self._write_s.snapshot(),
            )

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Look up, and count."""
        with self._measured(self._lookup_s):
            found = self._inner.lookup(keys, timeout_s=timeout_s)
        self._count(lookups=1, asked_chunks=len(keys), found_chunks=found)
        return found

    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Read, and count."""
        with self._measured(self._read_s):
            report = self._inner.read_many(wants, timeout_s=timeout_s)
        self._count(
            read_chunks=report.count,
            read_bytes=sum(sum(want.shard_bytes) for want in wants[: report.count]),
            missed_chunks=len(wants) - report.count,
            damaged_chunks=len(report.damaged),
            failures=bool(report.failure),
        )
        return report

    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Write, and count."""
        with self._measured(self._write_s):
            report = self._inner.write_many(writes, timeout_s=timeout_s)
        by_outcome = Counter(report.outcomes)
        pairs = zip(writes, report.outcomes, strict=True)
        self._count(
            written_chunks=by_outcome[WriteOutcome.WRITTEN],
            written_bytes=sum(
                sum(write.record.shard_bytes)
                for write, outcome in pairs
                if outcome is WriteOutcome.WRITTEN
            ),
            present_chunks=by_outcome[WriteOutcome.PRESENT],
            full_chunks=by_outcome[WriteOutcome.FULL],
            failed_chunks=by_outcome[WriteOutcome.FAILED],
            failures=bool(report.failure),
        )
        return report

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Remove; only a failure counts."""
        with self._measured(None):
            return self._inner.delete(keys, timeout_s=timeout_s)

    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Remove; only a failure counts."""
        with self._measured(None):
            return self._inner.clear(namespace, timeout_s=timeout_s)

    @contextmanager
    def _measured(self, histogram: Histogram | None) -> Iterator[None]:
        """Observe how long a call takes, and count one that cannot be made."""
        start_s = self._clock.monotonic_s()
        try:
            yield
        except TierUnavailableError:
            self._count(failures=1)
            raise
        finally:
            if histogram is not None:
                with self._lock:
                    histogram.observe(self._clock.monotonic_s() - start_s)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


_COUNTS = tuple(field for field in TierStatistics.__struct_fields__ if not field.endswith("_s"))


def _guarded(
    circuit: _Circuit, call: Callable[[], _Answer], failure_in: Callable[[_Answer], str]
) -> _Answer:
    """Make a call through a circuit, and tell it how the call ended."""
    circuit.pass_or_raise()
    try:
        answer = call()
    except TierBusyError:
        # Nothing was learnt about the medium.
        raise
    except TierUnavailableError as error:
        circuit.note(str(error))
        raise
    circuit.note(failure_in(answer))
    return answer
