"""The tests that every tier passes; subclass, say how to make one, and run pytest.

    class TestMyTier(TierTests):
        def make_tier(self):
            return MyTier(...)

Each test makes its own tier and closes it. Two hooks show more of a tier: `reopen`, for one that
keeps its chunks, and `damage`, for one whose medium can be reached. The tests are plain asserts;
this module needs no test framework.
"""

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from kvcellar.errors import TierUnavailableError
from kvcellar.testing.chunks import NAMESPACE, bytes_of, make_chunk, make_key, make_want
from kvcellar.tiers.base import ChunkWrite, ReadWant, Tier, WriteOutcome, WriteReport

__all__ = ["TierTests"]

TIMEOUT_S = 30.0
_WRITTEN = WriteOutcome.WRITTEN


class TierTests:
    """What a tier promises, one test a promise."""

    def make_tier(self) -> Tier:
        """Return an empty tier that has room for 16 MiB; the test closes it."""
        raise NotImplementedError

    def reopen(self, tier: Tier) -> Tier | None:
        """Close a tier and return its next life over the same data; None where there is none."""
        tier.close()
        return None

    def damage(self, tier: Tier, key: bytes) -> bool:
        """Flip one bit of a stored chunk; False where that cannot be done from outside."""
        _ = tier, key
        return False

    @contextmanager
    def open_tier(self) -> Iterator[Tier]:
        """Make a tier, and close it whatever happens."""
        tier = self.make_tier()
        try:
            yield tier
        finally:
            tier.close()

    def test_what_was_written_is_read(self) -> None:
        with self.open_tier() as tier:
            shapes = [(4096,), (8192, 4096), (1,), (4095, 4097), (12_345, 8192, 3, 70_000)]
            chunks = [make_chunk(number, shape) for number, shape in enumerate(shapes)]
            assert _write(tier, *chunks).outcomes == (_WRITTEN,) * len(chunks)
            wants = [make_want(chunk) for chunk in chunks]
            report = tier.read_many(wants, timeout_s=TIMEOUT_S)
            assert report.count == len(chunks)
            assert report.seals == tuple(chunk.record.seals for chunk in chunks)
            assert [bytes_of(want) for want in wants] == [bytes_of(chunk) for chunk in chunks]
            assert (report.damaged, report.failure) == ((), "")

    def test_a_chunk_of_many_shards_is_read(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1, tuple(range(1, 301)))
            _write(tier, chunk)
            assert _reads(tier, chunk) == 1

    def test_an_unknown_key_is_missing(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1)
            assert tier.lookup([chunk.record.key], timeout_s=TIMEOUT_S) == 0
            report = tier.read_many([make_want(chunk)], timeout_s=TIMEOUT_S)
            assert (report.count, report.seals, report.damaged) == (0, (), ())
            assert report.failure == ""

    def test_lookup_and_read_stop_at_the_first_that_is_missing(self) -> None:
        with self.open_tier() as tier:
            chunks = [make_chunk(number) for number in range(5)]
            _write(tier, *chunks[:2], *chunks[3:])
            keys = [chunk.record.key for chunk in chunks]
            assert tier.lookup(keys, timeout_s=TIMEOUT_S) == 2
            assert tier.lookup(keys[3:], timeout_s=TIMEOUT_S) == 2
            wants = [make_want(chunk) for chunk in chunks]
            assert tier.read_many(wants, timeout_s=TIMEOUT_S).count == 2
            assert [bytes_of(want) for want in wants[:2]] == [bytes_of(c) for c in chunks[:2]]

    def test_nothing_asked_is_nothing_done(self) -> None:
        with self.open_tier() as tier:
            assert tier.lookup([], timeout_s=TIMEOUT_S) == 0
            assert tier.read_many([], timeout_s=TIMEOUT_S).count == 0
            assert _write(tier).outcomes == ()
            assert tier.delete([], timeout_s=TIMEOUT_S) == 0

    def test_a_second_write_of_a_key_finds_it_present(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1)
            _write(tier, chunk)
            assert _write(tier, chunk, make_chunk(2)).outcomes == (WriteOutcome.PRESENT, _WRITTEN)
            assert _reads(tier, chunk) == 1

    def test_what_is_deleted_is_gone_and_can_be_written_again(self) -> None:
        with self.open_tier() as tier:
            chunks = [make_chunk(number) for number in range(3)]
            _write(tier, *chunks)
            keys = [chunk.record.key for chunk in chunks]
            assert tier.delete([keys[1], make_key(99)], timeout_s=TIMEOUT_S) == 1
            assert tier.delete([keys[1]], timeout_s=TIMEOUT_S) == 0
            assert tier.lookup(keys, timeout_s=TIMEOUT_S) == 1
            assert [_reads(tier, chunk) for chunk in chunks] == [1, 0, 1]
            assert _write(tier, chunks[1]).outcomes == (_WRITTEN,)
            assert _reads(tier, *chunks) == 3

    def test_a_namespace_or_everything_can_be_cleared(self) -> None:
        with self.open_tier() as tier:
            theirs = [make_chunk(number, namespace=b"t" * 32) for number in range(3)]
            ours = [make_chunk(number) for number in range(3, 5)]
            _write(tier, *theirs, *ours)
            assert tier.clear(b"t" * 32, timeout_s=TIMEOUT_S) == 3
            assert tier.clear(b"t" * 32, timeout_s=TIMEOUT_S) == 0
            assert (_reads(tier, *theirs), _reads(tier, *ours)) == (0, 2)
            assert tier.clear(b"", timeout_s=TIMEOUT_S) == 2
            assert tier.usage().chunks == 0
            assert _write(tier, *ours).outcomes == (_WRITTEN,) * 2

    def test_a_chunk_is_given_only_to_who_wants_exactly_it(self) -> None:
        with self.open_tier() as tier:
            others: list[dict[str, Any]] = [
                {"namespace": b"x" * 32},
                {"codec": "int8"},
                {"shard_bytes": (8192,), "views": make_want(make_chunk(1, (8192,))).views},
                {
                    "shard_bytes": (8192, 4096),
                    "views": make_want(make_chunk(1, (8192, 4096))).views,
                },
            ]
            for number, other in enumerate(others):
                chunk = make_chunk(number, (4096, 8192))
                _write(tier, chunk)
                want: ReadWant = msgspec.structs.replace(make_want(chunk), **other)
                assert tier.read_many([want], timeout_s=TIMEOUT_S).count == 0, other

    def test_a_codec_and_a_tenant_are_kept(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1, tenant="ü" * 128, codec="int8", namespace=b"z" * 32)
            assert _write(tier, chunk).outcomes == (_WRITTEN,)
            assert _reads(tier, chunk) == 1
            assert set(tier.usage().tenant_bytes) == {"ü" * 128}

    def test_bytes_that_do_not_match_their_seal_are_a_miss_and_leave(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1, (4096, 5000))
            chunk.views[1][4999] ^= 1
            _write(tier, chunk, make_chunk(2))
            report = tier.read_many([make_want(chunk)], timeout_s=TIMEOUT_S)
            assert (report.count, report.damaged) == (0, (chunk.record.key,))
            assert report.failure == ""
            assert tier.lookup([chunk.record.key], timeout_s=TIMEOUT_S) == 0
            assert tier.usage().damaged == 1
            assert _reads(tier, make_chunk(2)) == 1
            chunk.views[1][4999] ^= 1
            assert _write(tier, chunk).outcomes == (_WRITTEN,)
            assert _reads(tier, chunk) == 1

    def test_a_flipped_bit_is_a_miss_and_the_others_are_read(self) -> None:
        with self.open_tier() as tier:
            chunks = [make_chunk(number) for number in range(3)]
            _write(tier, *chunks)
            if not self.damage(tier, chunks[1].record.key):
                return
            wants = [make_want(chunk) for chunk in chunks]
            report = tier.read_many(wants, timeout_s=TIMEOUT_S)
            assert (report.count, report.damaged) == (1, (chunks[1].record.key,))
            assert bytes_of(wants[0]) == bytes_of(chunks[0])
            assert _reads(tier, chunks[2]) == 1
            assert _write(tier, chunks[1]).outcomes == (_WRITTEN,)
            assert _reads(tier, *chunks) == 3

    def test_usage_follows_what_is_there(self) -> None:
        with self.open_tier() as tier:
            before = tier.usage()
            assert (before.chunks, before.evicted, before.damaged) == (0, 0, 0)
            _write(tier, make_chunk(1, (40_960,), tenant="a"), make_chunk(2, (8192,), tenant="b"))
            _write(tier, make_chunk(3, (8192,)))
            usage = tier.usage()
            assert usage.chunks == 3
            assert usage.used_bytes - before.used_bytes >= 40_960 + 2 * 8192
            assert set(usage.tenant_bytes) == {"a", "b", ""}
            assert usage.tenant_bytes["a"] >= 40_960 > usage.tenant_bytes["b"] >= 8192
            tier.delete([make_key(1)], timeout_s=TIMEOUT_S)
            assert set(tier.usage().tenant_bytes) == {"b", ""}
            assert tier.usage().used_bytes <= usage.used_bytes - 40_960

    def test_without_time_nothing_is_begun(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1)
            assert tier.write_many([chunk], timeout_s=0.0).outcomes == (WriteOutcome.FAILED,)
            assert _reads(tier, chunk) == 0
            _write(tier, chunk)
            assert tier.read_many([make_want(chunk)], timeout_s=0.0).count == 0
            assert _reads(tier, chunk) == 1

    def test_no_view_is_kept(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1, (5000,))
            _write(tier, chunk)
            want = make_want(chunk)
            tier.read_many([want], timeout_s=TIMEOUT_S)
            for view in (*chunk.views, *want.views):
                mapping = view.obj
                assert isinstance(mapping, mmap.mmap)
                view.release()
                # Raises BufferError while anything made from the view is alive.
                mapping.close()

    def test_a_batch_may_be_as_large_as_it_says(self) -> None:
        with self.open_tier() as tier:
            chunks = [make_chunk(number, (100,)) for number in range(tier.capabilities.batch_max)]
            assert _write(tier, *chunks).outcomes == (_WRITTEN,) * len(chunks)
            keys = [chunk.record.key for chunk in chunks]
            assert tier.lookup(keys, timeout_s=TIMEOUT_S) == len(keys)
            assert _reads(tier, *chunks) == len(chunks)

    def test_of_many_writers_of_a_key_one_writes(self) -> None:
        with self.open_tier() as tier:
            gate = threading.Barrier(4)
            chunk = make_chunk(1, (100_000,))

            def write() -> WriteOutcome:
                gate.wait(TIMEOUT_S)
                return _write(tier, chunk).outcomes[0]

            with ThreadPoolExecutor(4) as pool:
                outcomes = [future.result() for future in [pool.submit(write) for _ in range(4)]]
            assert sorted(outcomes) == [_WRITTEN] + [WriteOutcome.PRESENT] * 3
            assert _reads(tier, chunk) == 1

    def test_readers_get_right_bytes_or_a_miss_while_others_delete(self) -> None:
        with self.open_tier() as tier:
            chunk = make_chunk(1, (50_000,))
            stop = threading.Event()

            def churn() -> None:
                while not stop.is_set():
                    _write(tier, chunk)
                    tier.delete([chunk.record.key], timeout_s=TIMEOUT_S)

            with ThreadPoolExecutor(2) as pool:
                churning = pool.submit(churn)
                try:
                    assert all(_reads(tier, chunk) in {0, 1} for _ in range(100))
                finally:
                    stop.set()
                churning.result()
            assert tier.usage().damaged == 0

    def test_touch_takes_any_key(self) -> None:
        with self.open_tier() as tier:
            _write(tier, make_chunk(1))
            tier.touch([make_key(2), make_key(1)])
            assert _reads(tier, make_chunk(1)) == 1

    def test_a_closed_tier_says_so(self) -> None:
        tier = self.make_tier()
        _write(tier, make_chunk(1))
        tier.close()
        tier.close()
        calls = (
            lambda: tier.lookup([make_key(1)], timeout_s=TIMEOUT_S),
            lambda: tier.read_many([make_want(make_chunk(1))], timeout_s=TIMEOUT_S),
            lambda: _write(tier, make_chunk(2)),
            lambda: tier.delete([make_key(1)], timeout_s=TIMEOUT_S),
            lambda: tier.clear(b"", timeout_s=TIMEOUT_S),
        )
        for call in calls:
            try:
                call()
            except TierUnavailableError:
                continue
            raise AssertionError("a closed tier answered")
        tier.usage()
        tier.touch([make_key(1)])
        assert tier.capabilities.name

    def test_the_next_life_has_what_was_written(self) -> None:
        tier = self.make_tier()
        chunks = [make_chunk(number, tenant=f"t{number % 2}") for number in range(4)]
        _write(tier, *chunks)
        tier.delete([chunks[2].record.key], timeout_s=TIMEOUT_S)
        is_persistent = tier.capabilities.is_persistent
        reopened = self.reopen(tier)
        assert is_persistent == (reopened is not None), "say how to reopen a persistent tier"
        if reopened is None:
            return
        try:
            assert _reads(reopened, *chunks) == 2
            assert _reads(reopened, chunks[3]) == 1
            assert reopened.clear(NAMESPACE, timeout_s=TIMEOUT_S) == 3
            assert _reads(reopened, chunks[3]) == 0
        finally:
            reopened.close()


def _write(tier: Tier, *chunks: ChunkWrite) -> WriteReport:
    report = tier.write_many(chunks, timeout_s=TIMEOUT_S)
    assert len(report.outcomes) == len(chunks)
    return report


def _reads(tier: Tier, *chunks: ChunkWrite) -> int:
    """Return how many leading chunks can be read, having checked every byte of them."""
    wants = [make_want(chunk) for chunk in chunks]
    report = tier.read_many(wants, timeout_s=TIMEOUT_S)
    for want, chunk in list(zip(wants, chunks, strict=True))[: report.count]:
        assert bytes_of(want) == bytes_of(chunk)
    seals = tuple(chunk.record.seals for chunk in chunks[: report.count])
    assert report.seals == seals
    return report.count
