"""The messages between a server's control process and its tier process.

They cross a socket pair that nobody else can reach, in the frames of the node's protocol. The
control process asks, by an id; each question gets one answer with that id, in any order, when no
thread of the tier process touches the slots that it named any more. Besides, the tier process
reports on its own, which also says that it lives. Bulk bytes go between the arena and the tiers;
keys, offsets and seals are packed as in `messages`. Encoded by `frames`, decoded here, spoken by
`server.tier_line` and `tiers.process`.
"""

from typing import Annotated

import msgspec

from kvcellar.errors import MalformedError
from kvcellar.protocol.frames import UNREADABLE
from kvcellar.protocol.limits import KEYS_MAX, WORLD_SIZE_MAX

__all__ = [
    "Configure",
    "Delete",
    "Deleted",
    "Find",
    "Found",
    "Gone",
    "QuotasSet",
    "Read",
    "ReadDone",
    "Ready",
    "Refused",
    "Report",
    "Run",
    "SetQuotas",
    "TierAnswer",
    "TierFacts",
    "TierNews",
    "TierQuestion",
    "Touch",
    "Touched",
    "Wipe",
    "Write",
    "WriteDone",
    "decode_news",
    "decode_question",
]

_Sizes = Annotated[tuple[int, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    id: int


class Configure(_Message, tag="configure", frozen=True, array_like=True):
    """The first question: what to build. Answer: `Ready` or `Refused`.

    Attributes:
        arena_bytes: size of the arena's file.
        adapters: one JSON object for each tier, in order. They may hold secrets, so they come
            this way and not by the command line.
    """

    arena_bytes: int
    adapters: tuple[str, ...]


class Find(_Message, tag="find", frozen=True, array_like=True):
    """Ask how far the tiers' chunks reach. Answer: `Found`.

    Attributes:
        keys: 32 bytes a chunk, in prefix order.
        start: so many leading chunks are in the arena and only count as used.
    """

    keys: bytes
    start: int


class Read(_Message, tag="read", frozen=True, array_like=True):
    """Fill slots. Answer: `ReadDone`.

    Attributes:
        tier: its index.
        namespace: 32 bytes.
        shard_bytes: length of each shard.
        codec: the form in which the arena keeps chunks.
        keys: 32 bytes a chunk, in prefix order.
        offsets: `OFFSET_BYTES` for each shard of each chunk, chunk after chunk.
    """

    tier: int
    namespace: bytes
    shard_bytes: _Sizes
    codec: str
    keys: bytes
    offsets: bytes


class Write(_Message, tag="write", frozen=True, array_like=True):
    """Keep chunks in every tier. Answer: `WriteDone`.

    Attributes:
        namespace: 32 bytes.
        shard_bytes: length of each shard.
        codec: the form in which the arena keeps chunks.
        tenant: the chunks' tenant.
        keys: 32 bytes a chunk, in prefix order.
        refs: `REF_BYTES` for each shard of each chunk, chunk after chunk.
    """

    namespace: bytes
    shard_bytes: _Sizes
    codec: str
    tenant: str
    keys: bytes
    refs: bytes


class Delete(_Message, tag="delete", frozen=True, array_like=True):
    """Remove chunks from every tier, after the writes asked for before. Answer: `Gone`."""

    keys: bytes


class Wipe(_Message, tag="wipe", frozen=True, array_like=True):
    """Remove every chunk, after the writes that were asked for before. Answer: `Deleted`.

    Attributes:
        namespace: 32 bytes, or empty for all of them.
    """

    namespace: bytes


class SetQuotas(_Message, tag="set_quotas", frozen=True, array_like=True):
    """Bound what tenants may hold in each tier. Answer: `QuotasSet`, once they hold no more.

    Attributes:
        limits: bytes by tenant; None takes a quota away. Tenants not named keep theirs.
    """

    limits: dict[str, int | None]


class Touch(_Message, tag="touch", frozen=True, array_like=True):
    """Count chunks as used, since the arena answered for them. Answer: `Touched`.

    Attributes:
        prefixes: of each prompt the keys that were used, 32 bytes a chunk, in prefix order.
    """

    prefixes: tuple[bytes, ...]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks that one tier has."""

    tier: int
    count: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]


class TierFacts(msgspec.Struct, frozen=True, array_like=True):
    """One tier now; counters count since the tier process started.

    Attributes:
        name: for people and for the metrics' label.
        kind: the adapter's type.
        is_persistent: whether it outlives the process.
        trouble: why it cannot be used now; empty while it can.
        is_complete: False while it still finds out what it holds.
        batch_max: chunks of one question.
        used_bytes: what counts towards its cap.
        cap_bytes: the cap; 0 where only the medium bounds it.
        chunks: complete chunks.
        evicted: chunks that left to make room.
        damaged: records that did not pass and were removed.
        lookups: calls.
        asked_chunks: chunks that they asked for.
        found_chunks: chunks that they found.
        read_chunks: chunks that came into the arena.
        read_bytes: their bytes.
        read_s: seconds of all calls that read, added up.
        written_chunks: chunks that were written.
        written_bytes: their bytes.
        write_s: seconds of all calls that wrote, added up.
        full_chunks: chunks for which it had no room.
        failures: calls that failed.
        tenant_bytes: what tenants with a quota hold, as far as they are among the largest.
    """

    name: str
    kind: str
    is_persistent: bool = False
    trouble: str = ""
    is_complete: bool = True
    batch_max: int = 256
    used_bytes: int = 0
    cap_bytes: int = 0
    chunks: int = 0
    evicted: int = 0
    damaged: int = 0
    lookups: int = 0
    asked_chunks: int = 0
    found_chunks: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_chunks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    full_chunks: int = 0
    failures: int = 0
    tenant_bytes: dict[str, int] = msgspec.field(default_factory=dict)


class Ready(_Message, tag="ready", frozen=True, array_like=True):
    """The tiers are there."""

    tiers: tuple[TierFacts, ...]


class Refused(_Message, tag="refused", frozen=True, array_like=True):
    """The tiers cannot be built; `code` is a class of `kvcellar.errors`."""

    code: str
    message: str


class Found(_Message, tag="found", frozen=True, array_like=True):
    """Which tier has which of the chunks from `start` on, as far as there is no gap."""

    runs: tuple[Run, ...]


class ReadDone(_Message, tag="read_done", frozen=True, array_like=True):
    """So many leading chunks are in their slots and verified.

    Attributes:
        count: leading chunks.
        seals: for each shard the seals of these chunks, uint64 little-endian, as `Commit` has them.
    """

    count: int
    seals: tuple[bytes, ...]


class WriteDone(_Message, tag="write_done", frozen=True, array_like=True):
    """One byte a chunk: 1 where some tier has it now, else 0."""

    kept: bytes


class Deleted(_Message, tag="deleted", frozen=True, array_like=True):
    """So many chunks were there."""

    count: int


class Gone(_Message, tag="gone", frozen=True, array_like=True):
    """One byte a chunk: 1 where it was in a tier, 2 where one may keep it, else 0."""

    states: bytes


class QuotasSet(_Message, tag="quotas_set", frozen=True, array_like=True):
    """The quotas are kept from now on."""


class Touched(_Message, tag="touched", frozen=True, array_like=True):
    """They are counted."""


class Report(_Message, tag="report", frozen=True, array_like=True):
    """Sent unasked, about twice a second, with id 0: the tier process lives."""

    tiers: tuple[TierFacts, ...]


TierQuestion = Configure | Find | Read | Write | Delete | Wipe | SetQuotas | Touch
TierAnswer = Ready | Refused | Found | ReadDone | WriteDone | Deleted | Gone | QuotasSet | Touched
TierNews = TierAnswer | Report

_QUESTIONS = msgspec.msgpack.Decoder(TierQuestion)
_NEWS = msgspec.msgpack.Decoder(TierNews)


def decode_question(body: bytes) -> TierQuestion:
    """Return the question in a frame's body.

    Raises:
        MalformedError: it is none.
    """
    try:
        return _QUESTIONS.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"not a question to the tier process: {error}") from error


def decode_news(body: bytes) -> TierNews:
    """Return the answer or report in a frame's body.

    Raises:
        MalformedError: it is none.
    """
    try:
        return _NEWS.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"not an answer of the tier process: {error}") from error
