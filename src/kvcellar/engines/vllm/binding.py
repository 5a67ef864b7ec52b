"""The namespace of this engine on the server that is there now.

Keys mean something only in a namespace, and the namespace takes in what only others know: the
layouts of all ranks (each worker half tells the server its own) and the server's wished chunk
size. So it is made anew for each session, in the background of a few steps, and until then the
engine computes. Used by the scheduler half, which asks for it in every hook.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvcellar.client.link import Link
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.groups import ChunkGroup, KVGroup, choose_chunk_tokens, cut_chunks
from kvcellar.errors import (
    KVCellarError,
    MismatchError,
    NotRegisteredError,
    RetryableError,
)
from kvcellar.keys.digest import (
    FieldValue,
    NamespaceId,
    engine_digest,
    field_digests,
    namespace_fields,
    namespace_id,
)
from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.messages import Bind
from kvcellar.telemetry.logs import EventLog

__all__ = ["Binder", "Bound", "holders_of"]

log = EventLog("vllm.kvcellar.binding")

BIND_TIMEOUT_S = 1.0
SETTLE_S = 1.0
"""How long requests may wait for a namespace after a server appeared; ranks say hello at once."""
POKE_INTERVAL_S = 0.02


@dataclass(frozen=True, eq=False)
class Bound:
    """A namespace that the server knows.

    Attributes:
        session: where it is bound; of no use once that is closed.
        namespace: see `keys.digest.namespace_id`.
        chunk_tokens: tokens a chunk.
        groups: the KV groups of which something is kept in a chunk.
        kinds: all KV groups, in vLLM's order.
        holders: the ranks that hold each shard of a chunk, lowest first; more than one where
            ranks hold the same bytes.
    """

    session: Session
    namespace: NamespaceId
    chunk_tokens: int
    groups: tuple[ChunkGroup, ...]
    kinds: tuple[KVGroup, ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def shard_count(self) -> int:
        """Return the shards of a chunk."""
        return len(self.holders)

    @property
    def is_divisible(self) -> bool:
        """Return whether a hit can be shortened: every part of it ends where a hit may end."""
        return all(not group.span for group in self.groups)

    def keys(self, chain_keys: bytes) -> bytes:
        """Return the keys of chunks in each KV group, group after group, as a lookup wants them."""
        return b"".join([group.keys(chain_keys) for group in self.groups])

    def parents(self, chain_key: bytes) -> bytes:
        """Return the keys under which what follows a chunk hangs, as a reserve wants them."""
        return b"".join([group.keys(chain_key) for group in self.groups if not group.span])

    def writers(self, turn: int) -> tuple[int, ...]:
        """Return the rank that writes each shard, when it is the turn of a reservation's number."""
        return tuple(ranks[turn % len(ranks)] for ranks in self.holders)


@dataclass(eq=False)
class _Attempt:
    session: Session
    began_s: float
    bound: Bound | None = None
    question: Question | None = None
    is_refused: bool = False


class Binder:
    """Keeps the engine's namespace bound, whatever servers come and go."""

    def __init__(
        self,
        link: Link,
        exchange: Exchange,
        *,
        engine: Mapping[str, FieldValue],
        groups: Sequence[KVGroup],
        ranks: int,
        clock: Clock,
    ) -> None:
        """Bind nothing yet.

        Args:
            link: of the scheduler half.
            exchange: over the same link.
            engine: the fields of its digest, see `identity`.
            groups: the model's KV groups.
            ranks: worker halves of this instance, each with a shard of every chunk.
            clock: for deadlines.
        """
        self._link = link
        self._exchange = exchange
        self._clock = clock
        self._engine = engine_digest(engine)
        self._fields = field_digests(engine)
        self._groups = groups
        self._ranks = ranks
        self._epoch = b""
        self._bound: Bound | None = None
        self._attempt: _Attempt | None = None
        self._poked_s = 0.0
        self._told_tokens = 0

    def current(self) -> Bound | None:
        """Return the namespace to use now, or None: compute. Waits within the step's budget."""
        session = self._link.session
        if session is None or not session.is_open:
            self._bound = self._attempt = None
            return None
        if self._bound is None or self._bound.session is not session:
            self._bound = self._try_bind(session)
        return self._bound

    def is_settling(self) -> bool:
        """Return whether a namespace may be there within the next steps."""
        attempt = self._attempt
        return (
            self._bound is None
            and attempt is not None
            and not attempt.is_refused
            and self._clock.monotonic_s() - attempt.began_s < SETTLE_S
        )

    def heed(self, bound: Bound, error: KVCellarError) -> None:
        """Bind again when a refusal says that the server knows the namespace no longer."""
        if isinstance(error, NotRegisteredError) and self._bound is bound:
            self._bound = None

    def renew(self, epoch: bytes) -> Bound | None:
        """Leave the namespace for one that nobody has used, and return the one that was left."""
        left, self._bound, self._attempt = self._bound, None, None
        self._epoch = epoch
        return left

    def _try_bind(self, session: Session) -> Bound | None:
        attempt = self._attempt
        if attempt is None or attempt.session is not session:
            attempt = self._attempt = _Attempt(session, self._clock.monotonic_s())
        if attempt.is_refused:
            return None
        try:
            if attempt.question is None:
                self._ask(attempt)
            if attempt.question is None or self._exchange.collect(attempt.question) is None:
                return None
        except RetryableError:
            attempt.question = None
            return None
        except KVCellarError as error:
            attempt.is_refused = True
            log.warning("the server refused the namespace; nothing is cached", reason=str(error))
            return None
        self._attempt = None
        self._tell(attempt.bound)
        return attempt.bound

    def _ask(self, attempt: _Attempt) -> None:
        session = attempt.session
        layouts = self._layouts(session)
        if not layouts:
            now_s = self._clock.monotonic_s()
            if now_s - self._poked_s >= POKE_INTERVAL_S:
                self._poked_s = now_s
                self._link.poke()
            return
        self._check_blocks(layouts)
        fidelity = session.welcome.fidelity
        if not all(layout.can_keep(fidelity) for layout in layouts):
            raise MismatchError(
                f"the server keeps chunks as {fidelity} (--l1-codec), which needs pages that "
                "divide into vectors of one token and head, of bfloat16 or float16, on an "
                "accelerator; this engine's do not: start the server with --l1-codec raw"
            )
        count = len(self._groups)
        chunk_tokens = choose_chunk_tokens(self._groups, session.welcome.chunk_tokens)
        groups = cut_chunks(self._groups, chunk_tokens)
        # A rank holds the same shard in every group: what the first says holds for all.
        holders = holders_of(layouts[::count])
        shards = [
            (group, layouts[ranks[0] * count + group.group.index])
            for group in groups
            for ranks in holders
        ]
        prints = [layout.fingerprint() for _, layout in shards]
        namespace = namespace_id(
            self._engine,
            layouts=prints,
            chunk_tokens=chunk_tokens,
            fidelity=fidelity,
            epoch=self._epoch,
        )
        shard_bytes = tuple(
            layout.shard_bytes(group.blocks, fidelity=fidelity) for group, layout in shards
        )
        held = tuple(layout.shard() for layout in layouts[::count])
        spans = tuple(group.span for group in groups)
        attempt.bound = Bound(
            session, namespace, chunk_tokens, groups, tuple(self._groups), holders
        )
        parts = namespace_fields(
            layouts=prints, chunk_tokens=chunk_tokens, fidelity=fidelity, epoch=self._epoch
        )
        fields = {**self._fields, **field_digests(parts)}
        attempt.question = self._exchange.ask(
            session,
            lambda id_: Bind(id_, bytes(namespace), chunk_tokens, shard_bytes, fields, held, spans),
            timeout_s=BIND_TIMEOUT_S,
        )

    def _layouts(self, session: Session) -> tuple[ShardLayout, ...]:
        heartbeat = self._link.last_heartbeat
        if heartbeat is None or heartbeat.boot_id != session.boot_id:
            return ()
        expected = self._ranks * len(self._groups)
        return heartbeat.layouts if len(heartbeat.layouts) == expected else ()

    def _check_blocks(self, layouts: tuple[ShardLayout, ...]) -> None:
        for group in self._groups:
            for layout in layouts[group.index :: len(self._groups)]:
                if layout.block_tokens != group.block_tokens:
                    raise MismatchError(
                        f"rank {layout.rank} has blocks of {layout.block_tokens} tokens in KV "
                        f"group {group.index}, the scheduler blocks of {group.block_tokens}"
                    )

    def _tell(self, bound: Bound | None) -> None:
        assert bound is not None
        wished = bound.session.welcome.chunk_tokens
        if bound.chunk_tokens != self._told_tokens:
            self._told_tokens = bound.chunk_tokens
            log.info(
                "chunk size chosen",
                chunk_tokens=bound.chunk_tokens,
                wished_tokens=wished,
                blocks_per_chunk=",".join(str(group.blocks) for group in bound.groups),
            )


def holders_of(layouts: tuple[ShardLayout, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold each shard.

    Raises:
        MismatchError: ranks that should hold the same bytes lay them out otherwise.
    """
    count = 1 + max(layout.shard() for layout in layouts)
    holders = tuple(
        tuple(layout.rank for layout in layouts if layout.shard() == shard)
        for shard in range(count)
    )
    for ranks in holders:
        first, *others = (msgspec.structs.replace(layouts[rank], rank=0) for rank in ranks)
        if any(other != first for other in others):
            raise MismatchError(
                f"ranks {ranks} should hold the same KV and lay it out differently: they must run "
                "the same software on the same kind of device"
            )
    return holders
