"""What a tier is: a place for whole chunks outside the arena, and what it promises its caller.

The tier process calls these methods on its executor threads; the server never does. A tier reads
and writes straight between its medium and slots of the arena. Whatever it gives back was checked:
the whole key, the namespace, the sizes, the codec and each shard's seal. So a tier can lose
chunks, be slow or be gone, and the price is a miss; it cannot give a wrong answer. Whoever writes
a tier subclasses `Tier` and runs `kvcellar.testing.tier_tests.TierTests` over it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import msgspec

__all__ = [
    "RAW",
    "TENANTS_MAX",
    "VIEW_ALIGNMENT",
    "ChunkRecord",
    "ChunkWrite",
    "ReadReport",
    "ReadWant",
    "Tier",
    "TierCapabilities",
    "TierUsage",
    "WriteOutcome",
    "WriteReport",
]

RAW = "raw"
"""The codec of bytes that are stored as they lie in the slot."""
VIEW_ALIGNMENT = 4096
"""Every view begins at an address that this divides, as slots do."""
TENANTS_MAX = 1_000
"""Tenants that a usage names; the others are summed under the empty name."""


class ChunkRecord(msgspec.Struct, frozen=True):
    """What a chunk is called and what proves its bytes.

    Attributes:
        key: 32 bytes.
        namespace: 32 bytes.
        shard_bytes: the length of each shard, in rank order; at least one, each above 0.
        seals: the seal of each shard (`kvcellar.memory.seal`), in the same order.
        tenant: the request's `cache_salt`, at most 256 bytes of UTF-8; "" for none.
        codec: the form of the stored bytes, at most 64 bytes of UTF-8.
    """

    key: bytes
    namespace: bytes
    shard_bytes: tuple[int, ...]
    seals: tuple[int, ...]
    tenant: str = ""
    codec: str = RAW


class ChunkWrite(msgspec.Struct, frozen=True):
    """A chunk to store.

    Attributes:
        record: its name and proof.
        views: one for each shard, contiguous, exactly `shard_bytes` long, aligned to
            `VIEW_ALIGNMENT`. Only read; the bytes must not change until `write_many` returns.
    """

    record: ChunkRecord
    views: tuple[memoryview, ...]


class ReadWant(msgspec.Struct, frozen=True):
    """A chunk to fetch, and where to.

    Attributes:
        key: 32 bytes.
        namespace: 32 bytes; the record's must be equal.
        shard_bytes: the record's must be equal.
        views: one for each shard, writable, contiguous, exactly `shard_bytes` long, aligned to
            `VIEW_ALIGNMENT`. The tier's until `read_many` returns.
        codec: the record's must be equal.
    """

    key: bytes
    namespace: bytes
    shard_bytes: tuple[int, ...]
    views: tuple[memoryview, ...]
    codec: str = RAW


class ReadReport(msgspec.Struct, frozen=True):
    """What a read gave.

    Attributes:
        count: how many leading wants are filled and verified; of the others the bytes are
            undefined.
        seals: of each filled want, one seal a shard, verified over the bytes in the views.
        damaged: keys whose records did not pass and were removed (cut, flipped, swapped, of
            another shape, unreadable). Chunks behind the first miss may be among them.
        failure: why the medium failed, for the log and the breaker; "" when it did not. A miss
            and a damaged record are no failure; leading wants count all the same.
    """

    count: int
    seals: tuple[tuple[int, ...], ...] = ()
    damaged: tuple[bytes, ...] = ()
    failure: str = ""


class WriteOutcome(IntEnum):
    """What became of one chunk of a `write_many`."""

    WRITTEN = 0
    """It can be read from now on, also by the tier's next life where the tier is persistent."""
    PRESENT = 1
    """A record of this key is there already, or being written or removed by another call."""
    FULL = 2
    """No room: the cap, a full medium, or how much is used is not known yet after a start."""
    FAILED = 3
    """The medium failed, or the time was up; nothing can be read under this key."""


class WriteReport(msgspec.Struct, frozen=True):
    """What a write did.

    Attributes:
        outcomes: one for each chunk, in order.
        failure: why the medium failed, for the log and the breaker; "" when it did not. FULL is
            no failure.
    """

    outcomes: tuple[WriteOutcome, ...]
    failure: str = ""


class TierUsage(msgspec.Struct, frozen=True):
    """What a tier holds now; cheap to ask for.

    Attributes:
        used_bytes: everything that counts towards the cap, really occupied.
        cap_bytes: the most that `used_bytes` may become; 0 when only the medium bounds it.
        chunks: complete chunks that are known.
        tenant_bytes: occupied bytes by tenant, the largest `TENANTS_MAX`; the rest under "",
            together with the chunks of no tenant.
        evicted: chunks that left to make room, since the start.
        damaged: records that did not pass and were removed, since the start.
        is_complete: False while a start is still finding out what is there: unknown keys are
            looked for one by one, and nothing is stored.
    """

    used_bytes: int
    cap_bytes: int = 0
    chunks: int = 0
    tenant_bytes: Mapping[str, int] = MappingProxyType({})
    evicted: int = 0
    damaged: int = 0
    is_complete: bool = True


class TierCapabilities(msgspec.Struct, frozen=True):
    """What a caller may expect of a tier; constant for its life.

    Attributes:
        name: for logs and the metrics' label; unique on a node.
        batch_max: chunks that one call may carry.
        calls_max: calls at once that make it faster; more only wait.
        is_persistent: what was written survives the process.
        is_shared: other nodes write to it, so a key that was missing may be there later.
    """

    name: str
    batch_max: int = 256
    calls_max: int = 4
    is_persistent: bool = False
    is_shared: bool = False


class Tier(ABC):
    """A place for chunks.

    All methods are called on executor threads, several at once, and may block. Expected outcomes
    are values; a method raises only `TierUnavailableError`, with the views untouched.

    About time: `timeout_s` bounds the waiting and is looked at between system calls, and a call
    returns once no thread of the tier touches its views any more. A system call that the kernel
    keeps (a dead network mount) is therefore not given up: the views stay the tier's. The caller
    keeps a deadline of its own, answers a miss, and uses those slots again only when the call has
    returned or the kernel has reported the process dead.
    """

    @property
    @abstractmethod
    def capabilities(self) -> TierCapabilities:
        """Return what this tier is; never blocks."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Return how many of the leading keys are there.

        No bulk bytes are read, so a record may still turn out damaged. The keys found count as
        used now, as in `touch`.

        Args:
            keys: 32 bytes each, in prefix order, at most `capabilities.batch_max`.
            timeout_s: what is not found in time counts as missing.

        Raises:
            TierUnavailableError: the medium cannot be asked.
        """

    @abstractmethod
    def read_many(self, wants: Sequence[ReadWant], *, timeout_s: float) -> ReadReport:
        """Fill the views of leading wants and verify them, until the first that cannot be.

        Args:
            wants: in prefix order, at most `capabilities.batch_max`; no two share a view.
            timeout_s: see the class; what is not begun in time counts as missing.

        Raises:
            TierUnavailableError: nothing was written to any view.

        The views are the caller's again on return; no reference to them is kept.
        """

    @abstractmethod
    def write_many(self, writes: Sequence[ChunkWrite], *, timeout_s: float) -> WriteReport:
        """Store chunks, each on its own, whole or not at all. Yields to reads.

        Args:
            writes: in prefix order, at most `capabilities.batch_max`, no key twice.
            timeout_s: see the class; what is not begun in time is FAILED.

        Raises:
            TierUnavailableError: nothing was stored.

        The seals are the caller's word and are not checked here. The views are the caller's again
        on return; no reference to them is kept.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Remove chunks and return how many were there; a missing one is no error.

        A chunk that a call is reading meanwhile may still be given to that call.

        Args:
            keys: 32 bytes each, in any order, at most `capabilities.batch_max`.
            timeout_s: what is not removed in time stays.

        Raises:
            TierUnavailableError: the medium cannot be asked, or some of them may be there yet.
        """

    @abstractmethod
    def clear(self, namespace: bytes, *, timeout_s: float) -> int:
        """Remove every chunk of a namespace and return how many there were.

        Chunks that are being written meanwhile may stay: ask when the writes have returned.

        Args:
            namespace: 32 bytes, or empty for all chunks.
            timeout_s: what is not removed in time stays; asking again goes on.

        Raises:
            TierUnavailableError: the medium cannot be asked, is still being counted, or some
                chunks may be there yet.
        """

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return what is held now, from memory; never raises."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls that run, and let go of the medium; may be called twice.

        Later calls raise `TierUnavailableError`, but for `capabilities`, `usage` and `touch`.
        """

    @property
    def trouble(self) -> str:
        """Return why it cannot be used now, "" while it can; from memory, never raises."""
        return ""

    def set_quotas(self, limits: Mapping[str, int | None]) -> None:  # noqa: B027 - see `touch`.
        """Bound what these tenants may hold here; a tier that knows no tenants ignores it.

        Blocks while what is too much is removed. Never raises.

        Args:
            limits: bytes by tenant; None takes a quota away. Tenants not named keep theirs.
        """

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - forgetting is a fair answer.
        """Count the keys as used now, the last first, so that a prefix leaves from its tail.

        For keys that a faster place answered: without it the heads of busy prefixes, which are
        always found in the arena, would be the oldest here and leave first. Never blocks on the
        medium, never raises; unknown keys are ignored, and a tier without an order ignores all.

        Args:
            keys: 32 bytes each, in prefix order.
        """
