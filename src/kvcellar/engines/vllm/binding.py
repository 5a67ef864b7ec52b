"""The namespace of this engine on the servers that are there now.

Keys mean something only in a namespace, and the namespace takes in what only others know: the
layouts of the ranks (each worker half tells its server its own) and the server's wished chunk
size. So it is made anew for each session, in the background of a few steps, and until then the
engine computes. Where the engine uses several servers each has a namespace of its own, and the
engine computes until all are bound. Used by the scheduler half, which asks for it in every hook.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.groups import ChunkGroup, KVGroup, choose_chunk_tokens, cut_chunks
from kvcellar.engines.vllm.parts import Line, Part
from kvcellar.errors import (
    KVCellarError,
    MismatchError,
    NotRegisteredError,
    RetryableError,
)
from kvcellar.keys.digest import (
    EngineDigest,
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

__all__ = ["Binder", "Bound", "BoundPart", "holders_of"]

log = EventLog("vllm.kvcellar.binding")

BIND_TIMEOUT_S = 1.0
SETTLE_S = 1.0
"""How long requests may wait for a namespace after a server appeared; ranks say hello at once."""
POKE_INTERVAL_S = 0.02


@dataclass(frozen=True, eq=False)
class BoundPart:
    """A namespace that a server knows: of the ranks that use it.

    Attributes:
        line: where it is bound.
        namespace: see `keys.digest.namespace_id`.
        chunk_tokens: tokens a chunk.
        holders: the ranks that hold each shard of a chunk, lowest first; more than one where
            ranks hold the same bytes.
    """

    line: Line
    namespace: NamespaceId
    chunk_tokens: int
    holders: tuple[tuple[int, ...], ...]

    @property
    def shard_count(self) -> int:
        """Return the shards of a chunk."""
        return len(self.holders)

    def writers(self, turn: int) -> tuple[int, ...]:
        """Return the rank that writes each shard, when it is the turn of a reservation's number."""
        return tuple(ranks[turn % len(ranks)] for ranks in self.holders)


@dataclass(frozen=True, eq=False)
class Bound:
    """The namespaces of the engine at all of its servers.

    Attributes:
        parts: one for each server.
        lines: of the parts; of no use once one of their sessions is closed.
        chunk_tokens: tokens a chunk.
        groups: the KV groups of which something is kept in a chunk.
        kinds: all KV groups, in vLLM's order.
    """

    parts: tuple[BoundPart, ...]
    lines: tuple[Line, ...]
    chunk_tokens: int
    groups: tuple[ChunkGroup, ...]
    kinds: tuple[KVGroup, ...]

    @property
    def is_open(self) -> bool:
        """Return whether no session is known to be closed."""
        return all(line.session.is_open for line in self.lines)

    @property
    def is_divisible(self) -> bool:
        """Return whether a hit can be shortened: every chunk of it is where a hit may end."""
        return all(not group.span for group in self.groups)

    def keys(self, chain_keys: bytes) -> bytes:
        """Return the keys of chunks in each KV group, group after group, as a lookup wants them."""
        return b"".join([group.keys(chain_keys) for group in self.groups])

    def parents(self, chain_key: bytes) -> bytes:
        """Return the keys under which what follows a chunk hangs, as a reserve wants them."""
        return b"".join([group.keys(chain_key) for group in self.groups if not group.span])


class Binder:
    """Keeps the engine's namespaces bound, whatever servers come and go."""

    def __init__(
        self,
        parts: Sequence[Part],
        exchange: Exchange,
        *,
        engine: Mapping[str, FieldValue],
        groups: Sequence[KVGroup],
        ranks: int,
        clock: Clock,
    ) -> None:
        """Bind nothing yet.

        Args:
            parts: one for each server.
            exchange: with their servers.
            engine: the fields of its digest, see `identity`.
            groups: the model's KV groups.
            ranks: worker halves of each part, each with a shard of every chunk.
            clock: for deadlines.
        """
        self._names = _Names(engine_digest(engine), field_digests(engine), len(parts))
        self._groups = groups = tuple(groups)
        self._binders = [
            _PartBinder(part, exchange, self._names, groups=groups, ranks=ranks, clock=clock)
            for part in parts
        ]
        self._found: list[BoundPart | None] = []
        self._bound: Bound | None = None
        self._told_tokens = 0

    def current(self) -> Bound | None:
        """Return the namespaces to use now, or None: compute. Waits within the step's budget."""
        found = [binder.current() for binder in self._binders]
        if found != self._found:
            self._found = found
            self._bound = self._join([part for part in found if part is not None])
        return self._bound

    def is_settling(self) -> bool:
        """Return whether all namespaces may be there within the next steps."""
        return any(binder.is_settling() for binder in self._binders) and all(
            binder.is_settling() or binder.bound is not None for binder in self._binders
        )

    def heed(self, bound: Bound, error: KVCellarError) -> None:
        """Bind again when a refusal says that a server knows the namespace no longer."""
        if isinstance(error, NotRegisteredError) and self._bound is bound:
            for binder in self._binders:
                binder.bound = None

    def renew(self, epoch: bytes) -> list[BoundPart]:
        """Leave the namespaces for ones that nobody has used, and return those that were left."""
        known = [binder.bound for binder in self._binders if binder.bound is not None]
        left = [bound for bound in known if bound.line.session.is_open]
        for binder in self._binders:
            binder.leave()
        self._names.epoch, self._found, self._bound = epoch, [], None
        return left

    def _join(self, parts: Sequence[BoundPart]) -> Bound | None:
        """Return what the parts make together once all are there."""
        if len(parts) < len(self._binders):
            return None
        chunk_tokens = parts[0].chunk_tokens
        for part in parts:
            if part.chunk_tokens != chunk_tokens:
                log.warning(
                    "the servers differ in --chunk-size; nothing is cached",
                    chunk_tokens=[part.chunk_tokens for part in parts],
                )
                return None
        bound = Bound(
            tuple(parts),
            tuple(part.line for part in parts),
            chunk_tokens,
            cut_chunks(self._groups, chunk_tokens),
            self._groups,
        )
        if chunk_tokens != self._told_tokens:
            self._told_tokens = chunk_tokens
            log.info(
                "chunk size chosen",
                chunk_tokens=chunk_tokens,
                wished_tokens=parts[0].line.session.welcome.chunk_tokens,
                blocks_per_chunk=",".join(str(group.blocks) for group in bound.groups),
            )
        return bound


@dataclass(eq=False)
class _Names:
    """Makes namespaces.

    Attributes:
        engine: the engine's digest.
        engine_fields: what that is made of.
        part_count: how many servers the engine uses.
        epoch: of the last reset.
    """

    engine: EngineDigest
    engine_fields: Mapping[str, str]
    part_count: int
    epoch: bytes = b""

    def give(
        self, shards: Sequence[ShardLayout], *, chunk_tokens: int, fidelity: str, part: int
    ) -> tuple[NamespaceId, dict[str, str]]:
        """Return the namespace of a part's shards, and the digests of all its fields."""
        prints, place = [layout.fingerprint() for layout in shards], (part, self.part_count)
        namespace = namespace_id(
            self.engine,
            layouts=prints,
            chunk_tokens=chunk_tokens,
            fidelity=fidelity,
            epoch=self.epoch,
            part=place,
        )
        fields = namespace_fields(
            layouts=prints,
            chunk_tokens=chunk_tokens,
            fidelity=fidelity,
            epoch=self.epoch,
            part=place,
        )
        return namespace, {**self.engine_fields, **field_digests(fields)}


@dataclass(eq=False)
class _Attempt:
    line: Line
    began_s: float
    bound: BoundPart | None = None
    question: Question | None = None
    is_refused: bool = False


class _PartBinder:
    """Keeps the namespace of one part bound.

    Attributes:
        bound: what was bound last; None where it must be bound (again).
    """

    def __init__(
        self,
        part: Part,
        exchange: Exchange,
        names: _Names,
        *,
        groups: tuple[KVGroup, ...],
        ranks: int,
        clock: Clock,
    ) -> None:
        self.bound: BoundPart | None = None
        self._part = part
        self._exchange = exchange
        self._names = names
        self._groups = groups
        self._ranks = ranks
        self._clock = clock
        self._attempt: _Attempt | None = None
        self._poked_s = 0.0

    def current(self) -> BoundPart | None:
        """Return the namespace to use now; None where there is none yet."""
        session = self._part.link.session
        if session is None or not session.is_open:
            self.bound = self._attempt = None
            return None
        if self.bound is None or self.bound.line.session is not session:
            self.bound = self._try_bind(session)
        return self.bound

    def is_settling(self) -> bool:
        """Return whether the namespace may be there within the next steps."""
        attempt = self._attempt
        return (
            self.bound is None
            and attempt is not None
            and not attempt.is_refused
            and self._clock.monotonic_s() - attempt.began_s < SETTLE_S
        )

    def leave(self) -> None:
        """Forget the namespace."""
        self.bound = self._attempt = None

    def _try_bind(self, session: Session) -> BoundPart | None:
        attempt = self._attempt
        if attempt is None or attempt.line.session is not session:
            line = Line(self._part, session)
            attempt = self._attempt = _Attempt(line, self._clock.monotonic_s())
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
        return attempt.bound

    def _ask(self, attempt: _Attempt) -> None:
        session = attempt.line.session
        layouts = self._layouts(session)
        if not layouts:
            now_s = self._clock.monotonic_s()
            if now_s - self._poked_s >= POKE_INTERVAL_S:
                self._poked_s = now_s
                self._part.link.poke()
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
        namespace, fields = self._names.give(
            [layout for _, layout in shards],
            chunk_tokens=chunk_tokens,
            fidelity=fidelity,
            part=self._part.index,
        )
        shard_bytes = tuple(
            layout.shard_bytes(group.blocks, fidelity=fidelity) for group, layout in shards
        )
        held = tuple(layout.shard() for layout in layouts[::count])
        spans = tuple(group.span for group in groups)
        attempt.bound = BoundPart(attempt.line, namespace, chunk_tokens, holders)
        attempt.question = self._exchange.ask(
            [attempt.line],
            lambda _, id_: Bind(
                id_, bytes(namespace), chunk_tokens, shard_bytes, fields, held, spans
            ),
            timeout_s=BIND_TIMEOUT_S,
        )

    def _layouts(self, session: Session) -> tuple[ShardLayout, ...]:
        heartbeat = self._part.link.last_heartbeat
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
