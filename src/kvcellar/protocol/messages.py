"""Every message of the node's protocol, in one file.

A client (an engine's scheduler half or worker half, a tool) speaks first; each request has an id
of the client's choice, rising, and gets exactly one reply with that id: the reply named in its
docstring or an `ErrorReply`. Bulk bytes never travel here: they go through the arena. Lists that
grow with a prompt (keys, offsets, seals) are packed little-endian binary, so that neither side
builds an object for each. The semantics are in docs/protocol.md. Encoded by `frames`, spoken by
`client` and `server`.
"""

from typing import Annotated, Any

import msgspec

from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.gate import GateReport
from kvcellar.protocol.limits import (
    COUNTS_MAX,
    FIELDS_MAX,
    GROUPS_MAX,
    HANDLES_MAX,
    WORLD_SIZE_MAX,
)
from kvcellar.protocol.prompts import (
    AskPrefetch,
    Explain,
    Explained,
    ExplainPrompt,
    NamespaceList,
    Namespaces,
    Prefetch,
    PrefetchNews,
)
from kvcellar.protocol.quotas import QuotaList, Quotas, SetQuota
from kvcellar.protocol.states import ChunkState, CommitOutcome, Role

__all__ = [
    "OFFSET_BYTES", "PROTOCOL_VERSION", "REF_BYTES", "Abort", "AskPrefetch", "AwaitFetch", "Bind",
    "Cancel", "ChunkState", "Clear", "Cleared", "Commit", "CommitOutcome", "CommitReply", "Damaged",
    "Delete", "Deleted", "ErrorReply", "Explain", "ExplainPrompt", "Explained", "GateReport",
    "Goodbye", "Heartbeat", "HeartbeatReply", "Hello", "Loaded", "Locate", "Located", "Lookup",
    "LookupNote", "LookupReply", "NamespaceList", "Namespaces", "ObjectList", "Objects", "Ok",
    "Ping", "Pong", "Prefetch", "PrefetchNews", "QuotaList", "Quotas", "Release", "Reply",
    "Request", "Reserve", "ReserveReply", "Role", "SetQuota", "Status", "StatusReply", "Welcome",
]  # fmt: skip

PROTOCOL_VERSION = 1
REF_BYTES = 16
"""A slot reference: byte offset in the arena (uint64), seal (uint64), both little-endian."""
OFFSET_BYTES = 8
"""A slot to write: byte offset in the arena (uint64), little-endian."""

# Checked before the list is built: a frame has room for millions.
Handles = Annotated[tuple[int, ...], msgspec.Meta(max_length=HANDLES_MAX)]
ShardSizes = Annotated[tuple[int, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX * GROUPS_MAX)]
Spans = Annotated[tuple[int, ...], msgspec.Meta(max_length=GROUPS_MAX)]
Counts = Annotated[dict[str, int], msgspec.Meta(max_length=COUNTS_MAX)]
Fields = Annotated[dict[str, str], msgspec.Meta(max_length=FIELDS_MAX)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    id: int


class Locate(_Message, tag="locate", frozen=True, array_like=True):
    """Ask over TCP where the Unix socket is. Reply: `Located`, then the server closes."""

    protocol_version: int


class Hello(_Message, tag="hello", frozen=True, array_like=True):
    """The first message on the Unix socket; the client's pidfd travels with it. Reply: `Welcome`.

    Attributes:
        protocol_version: `PROTOCOL_VERSION` of the client.
        role: see `Role`.
        client_id: 16 random bytes, made once a process; what the client holds belongs to it, also
            over several connections.
        instance_id: the engine process group; equal in its scheduler half and worker halves.
        pid: the client's process id as it sees it.
        software: "kvcellar 0.1.0, vllm 0.32.0": for status pages.
        model: the model's name, for status pages.
        rank: a worker's rank in its instance.
        world_size: ranks of the instance.
        layouts: a worker's shard layout of each KV group; empty for the others.
    """

    protocol_version: int
    role: str
    client_id: bytes
    instance_id: str
    pid: int
    software: str
    model: str = ""
    rank: int = 0
    world_size: int = 1
    layouts: tuple[ShardLayout, ...] = ()


class Bind(_Message, tag="bind", frozen=True, array_like=True):
    """A scheduler half names its namespace once all ranks' layouts are known. Reply: `Ok`.

    Attributes:
        namespace: 32 bytes.
        chunk_tokens: tokens a chunk in this namespace.
        shard_bytes: bytes of each shard of a chunk, one KV group after the other.
        fields: by name, the first hex digits of the digest of each thing that the namespace is
            made of: what makes two namespaces differ.
        held: the shard that each rank holds, equal for equal bytes; empty: each one of its own.
        spans: for each KV group which chunks before an end must be there for a hit to end there:
            0 for all of them, n for the last n, -n for those since the last multiple of n.
    """

    namespace: bytes
    chunk_tokens: int
    shard_bytes: ShardSizes
    fields: Fields = msgspec.field(default_factory=dict)
    held: ShardSizes = ()
    spans: Spans = (0,)


class Heartbeat(_Message, tag="heartbeat", frozen=True, array_like=True):
    """What the client still uses; whatever it holds and does not list is released.

    A lease or reservation is spared if the request that granted it has an id above `seen`: its
    reply may still be on the way. Reply: `HeartbeatReply`.

    Attributes:
        leases: handles of read leases in use.
        reservations: handles of reservations that are not done.
        seen: the highest request id up to which all replies were processed.
        counts: what a scheduler half counts, by name, since its start.
    """

    leases: Handles
    reservations: Handles
    seen: int
    counts: Counts = msgspec.field(default_factory=dict)


class Lookup(_Message, tag="lookup", frozen=True, array_like=True):
    """Find the longest stored prefix and lease what it needs. Reply: `LookupReply`.

    Attributes:
        keys: 32 bytes a chunk, in prefix order, KV group after KV group, at most `limits.KEYS_MAX`.
        fetch: whether chunks that are not in the arena may be fetched from the tiers.
        tenant: on whose account fetched chunks go, see `kvcellar.tenancy.names`.
    """

    keys: bytes
    fetch: bool = True
    tenant: str = ""


class AwaitFetch(_Message, tag="await_fetch", frozen=True, array_like=True):
    """Wait for a fetch that a lookup began. Reply: `LookupReply`, when it is over or late.

    The reply leases the whole prefix that is there by then, and stands in no order with those to
    other requests. It is empty where there is no such fetch: then the lookup's answer stands.

    Attributes:
        fetch: the handle.
        wait_s: how long to wait at most.
    """

    fetch: int
    wait_s: float


class Release(_Message, tag="release", frozen=True, array_like=True):
    """Give read leases back by handle; unknown ones are ignored. Reply: `Ok`."""

    leases: Handles


class Reserve(_Message, tag="reserve", frozen=True, array_like=True):
    """Ask for slots for all shards of consecutive chunks. Reply: `ReserveReply`.

    Attributes:
        keys: 32 bytes a chunk, in prefix order, at most `limits.KEYS_MAX`.
        parent: key of the chunk before the first for each KV group that needs all; or empty.
        turn: counted round from 0, of the ranks that hold a shard the one that writes it.
        tenant: on whose account they go, see `kvcellar.tenancy.names`.
        groups: the KV group of each key, a byte each; empty where all are of the first.
    """

    keys: bytes
    parent: bytes
    turn: int = 0
    tenant: str = ""
    groups: bytes = b""


class Commit(_Message, tag="commit", frozen=True, array_like=True):
    """A rank has copied its shard of every reserved chunk. Reply: `CommitReply`.

    Attributes:
        reservation: its handle.
        shard: that this rank was to write.
        seals: uint64 little-endian for each reserved chunk, in order.
        copy_s: seconds that the copy took, for the store histogram.
    """

    reservation: int
    shard: int
    seals: bytes
    copy_s: float


class Abort(_Message, tag="abort", frozen=True, array_like=True):
    """A rank will not copy, or failed to; it no longer touches the slots. Reply: `CommitReply`."""

    reservation: int
    shard: int


class Cancel(_Message, tag="cancel", frozen=True, array_like=True):
    """The scheduler half drops a reservation that it never handed to a rank. Reply: `Ok`."""

    reservation: int


class Loaded(_Message, tag="loaded", frozen=True, array_like=True):
    """A rank reports a load, for counters and the load histogram. Reply: `Ok`.

    Attributes:
        chunks: chunks that it read.
        size_bytes: bytes that it copied.
        copy_s: seconds of copying.
        ok: False when a seal did not match or the copy failed.
    """

    chunks: int
    size_bytes: int
    copy_s: float
    ok: bool


class Damaged(_Message, tag="damaged", frozen=True, array_like=True):
    """A rank found a seal that does not match: remove that chunk. Reply: `Ok`.

    The chunk is removed only while `offset` is still where its shard lies, so that a late report
    never removes a newer, good copy.
    """

    key: bytes
    shard: int
    offset: int


class LookupNote(_Message, tag="lookup_note", frozen=True, array_like=True):
    """What a lookup was about, sent after its answer, so that a miss can be explained. Reply: `Ok`.

    Attributes:
        request: the engine's id of the request.
        outcome: "answered", or why it was not asked or its answer not used.
        tokens: of the prompt.
        keys: how many chunks were asked for.
        found: how many leading ones the server had.
        missing: key of the first chunk that it had not; empty where it had all.
        salt: 8 bytes of a digest of the tenant's salt; empty without one.
        adapter: 8 bytes of a digest of the adapter; empty without one.
        items: 8 bytes of a digest of images, embeddings and where they lie; empty without any.
        item_start: index of the first token that such an item covers; -1 without any.
        unit_tokens: tokens that one value of `sketch` stands for.
        sketch: uint32 little-endian for each full unit of leading tokens, a hash of them.
    """

    request: str
    outcome: str
    tokens: int
    keys: int
    found: int
    missing: bytes = b""
    salt: bytes = b""
    adapter: bytes = b""
    items: bytes = b""
    item_start: int = -1
    unit_tokens: int = 16
    sketch: bytes = b""


class Objects(_Message, tag="objects", frozen=True, array_like=True):
    """Ask for a page of the complete chunks. Reply: `ObjectList`.

    Attributes:
        at: 0, or `next_at` of the page before.
        count: places to look at, at most `limits.PAGE_MAX`.
        model: only chunks of instances of this model; empty for all.
    """

    at: int
    count: int
    model: str = ""


class Delete(_Message, tag="delete", frozen=True, array_like=True):
    """Remove chunks by their keys. Reply: `Deleted`.

    Attributes:
        keys: 32 bytes a chunk, at most `limits.KEYS_MAX`.
        force: also those that are being read, or written to a tier.
        tier: "l1" for the arena, "l2" for what is behind it, "all".
    """

    keys: bytes
    force: bool = False
    tier: str = "all"


class Clear(_Message, tag="clear", frozen=True, array_like=True):
    """Forget chunks and make older reservations void. Reply: `Cleared`.

    Attributes:
        namespace: 32 bytes, or empty for everything.
        tiers: also what the tiers hold; without it they keep theirs.
    """

    namespace: bytes = b""
    tiers: bool = False


class Ping(_Message, tag="ping", frozen=True, array_like=True):
    """Ask whether the control loop runs. Reply: `Pong`."""


class Status(_Message, tag="status", frozen=True, array_like=True):
    """Ask for everything that status and metrics pages show. Reply: `StatusReply`."""


class Goodbye(_Message, tag="goodbye", frozen=True, array_like=True):
    """The client ends in order and touches no slot any more: free what it held. Reply: `Ok`."""


class ErrorReply(_Message, tag="error", frozen=True, array_like=True):
    """The request did not succeed; `code` is a class of `kvcellar.errors`."""

    code: str
    message: str


class Located(_Message, tag="located", frozen=True, array_like=True):
    """Where the Unix socket is.

    Attributes:
        address: a path, or "@name" for an abstract address of this network namespace.
        boot_id: 16 bytes.
        protocol_version: of the server.
        fix: what to do when `address` cannot be reached from where the client runs.
    """

    address: str
    boot_id: bytes
    protocol_version: int
    fix: str


class Welcome(_Message, tag="welcome", frozen=True, array_like=True):
    """The server's side of the handshake; a worker gets the arena's descriptor with it.

    Attributes:
        protocol_version: of the server.
        boot_id: 16 bytes: this life of the server.
        node: the server's `--instance-id`.
        chunk_tokens: the wished tokens a chunk (`--chunk-size`).
        fidelity: the lossiest form that the server's tiers may give back.
        arena_bytes: size of the arena's file.
        step_bytes: growth step; no slot straddles one.
        features: names of optional abilities.
    """

    protocol_version: int
    boot_id: bytes
    node: str
    chunk_tokens: int
    fidelity: str
    arena_bytes: int
    step_bytes: int
    features: tuple[str, ...] = ()


class Ok(_Message, tag="ok", frozen=True, array_like=True):
    """Done; nothing to say."""


class HeartbeatReply(_Message, tag="heartbeat_reply", frozen=True, array_like=True):
    """What a client must know of the server's state.

    Attributes:
        boot_id: 16 bytes.
        epoch: rises with every clear.
        steps_ready: growth steps of the arena that hold memory, from the first on.
        layouts: all ranks' layouts in rank order, of each rank one for each KV group; empty until
            all are registered.
    """

    boot_id: bytes
    epoch: int
    steps_ready: int
    layouts: tuple[ShardLayout, ...] = ()


class LookupReply(_Message, tag="lookup_reply", frozen=True, array_like=True):
    """The longest stored prefix.

    Attributes:
        count: leading chunks of the longest prefix of which each KV group has what it needs.
        lease: handle that holds just that, 0 when `count` is 0.
        refs: `REF_BYTES` for each shard of each chunk that a group needs, group after group.
        fetch: above 0: the handle of a search in the tiers for more; see `AwaitFetch`.
    """

    count: int
    lease: int
    refs: bytes
    fetch: int = 0


class ReserveReply(_Message, tag="reserve_reply", frozen=True, array_like=True):
    """What may be stored.

    Attributes:
        reservation: handle, 0 for none.
        states: a `ChunkState` byte for each key.
        offsets: `OFFSET_BYTES` for each shard of each RESERVED chunk, chunk after chunk.
    """

    reservation: int
    states: bytes
    offsets: bytes


class CommitReply(_Message, tag="commit_reply", frozen=True, array_like=True):
    """What became of the shard; see `CommitOutcome`."""

    outcome: int


class Cleared(_Message, tag="cleared", frozen=True, array_like=True):
    """What a clear removed (leased slots are freed at their release).

    Attributes:
        chunks: that left the arena.
        size_bytes: of their slots.
        tier_chunks: that left the tiers; -1 where they could not be reached and may keep some.
    """

    chunks: int
    size_bytes: int
    tier_chunks: int = 0


class ObjectList(_Message, tag="object_list", frozen=True, array_like=True):
    """A page of the complete chunks.

    Attributes:
        objects: for each chunk `key` (32 bytes), `model`, `tenant` and `shard_bytes`.
        next_at: where the next page begins; 0 after the last one.
    """

    # Any: as above.
    objects: tuple[dict[str, Any], ...]
    next_at: int


class Deleted(_Message, tag="deleted", frozen=True, array_like=True):
    """What became of the keys, a byte for each.

    0 not there, 1 deleted, 2 in use and left, 3 a tier could not be reached and may keep it.
    """

    states: bytes


class Pong(_Message, tag="pong", frozen=True, array_like=True):
    """The control loop runs."""

    boot_id: bytes


class StatusReply(_Message, tag="status_reply", frozen=True, array_like=True):
    """Plain data for status and metrics pages; the shape is in `telemetry.status`."""

    # Any: the page's shape is documented where it is made; the wire only carries it.
    status: dict[str, Any]


Request = (
    Locate | Hello | Bind | Heartbeat | Lookup | AwaitFetch | Release | Reserve | Commit | Abort |
    Cancel | Loaded | Damaged | LookupNote | GateReport | Explain | Objects | Delete | Clear |
    SetQuota | Quotas | ExplainPrompt | Namespaces | Prefetch | AskPrefetch | Ping | Status |
    Goodbye
)  # fmt: skip
Reply = (
    ErrorReply | Located | Welcome | Ok | HeartbeatReply | LookupReply | ReserveReply |
    CommitReply | Cleared | Explained | ObjectList | Deleted | QuotaList | NamespaceList |
    PrefetchNews | Pong | StatusReply
)  # fmt: skip
