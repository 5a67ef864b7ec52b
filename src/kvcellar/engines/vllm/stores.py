"""Stores: chunks that a step completes are offered to the servers, pinned, copied and let go.

A chunk is offered in the step that computes its last token. Its blocks are pinned in that very
call, so neither preemption nor the request's end can hand them to somebody else; then each server
says which chunks are new to it and fit, the workers copy those, and the pins go when every rank has
reported. What no server wants is let go at once. A KV group that frees blocks as it goes still has
what is kept of a chunk in that step; later it may not, and then that is not offered: the ids that
are remembered may be another request's. Used by the scheduler half on the engine's thread.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcellar.clock import Clock
from kvcellar.engines.vllm.binding import Binder, Bound, BoundPart
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.metadata import GroupStore, JobResult, StoreJob
from kvcellar.engines.vllm.pins import Pins
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, PeerClosedError, TimeoutExpiredError
from kvcellar.keys.chain import ChunkChain
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import OFFSET_BYTES, ChunkState, Reserve, ReserveReply

__all__ = ["StoreCounts", "Stores"]

RESERVE_TIMEOUT_S = 1.0
"""How long pinned blocks wait for the server's word before they are let go unsaved."""
PUT_OFF_S = 1.0
"""How long a request offers nothing after the server had no memory or gave no answer."""
QUIET_S = 30.0
"""How long an engine without requests is kept awake for copies of which nothing is heard."""


@dataclass
class StoreCounts:
    """Chunks by what became of them; of several servers the one in the way decides.

    Of a model with several KV groups a chunk counts for each that keeps some of it.

    Attributes:
        offered: named to the server.
        present: it had them.
        busy: another writer was storing them.
        full: it had no memory for them; offered again while the request runs.
        lost: no answer, a refusal, or a lost connection; offered again while the request runs.
        crowded: not offered in a step, because too many blocks were pinned.
        stored: copied by every rank.
        failed: not copied by some rank.
    """

    offered: int = 0
    present: int = 0
    busy: int = 0
    full: int = 0
    lost: int = 0
    crowded: int = 0
    stored: int = 0
    failed: int = 0


class _Piece(NamedTuple):
    """What one KV group keeps of one chunk: the chunk, the group's place, its blocks."""

    chunk: int
    group: int
    block_ids: list[int]


@dataclass(eq=False)
class _Offer:
    state: RequestState
    bound: Bound
    first: int
    chain: ChunkChain
    pieces: list[_Piece]
    deadline_s: float
    turn: int = 0
    question: Question | None = None


@dataclass(eq=False)
class _Store:
    """What the answers make of an offer.

    Attributes:
        offer: what was offered.
        parts: what each server reserved.
        pinned: what some server reserved.
        whole: what every server has once this is over.
        reservations: the handles.
    """

    offer: _Offer
    parts: list[list[_Piece]]
    pinned: list[_Piece] = field(default_factory=list)
    whole: list[_Piece] = field(default_factory=list)
    reservations: list[int] = field(default_factory=list)


class Stores:
    """Offers that wait for the server, and stores that the workers run."""

    def __init__(
        self,
        binder: Binder,
        exchange: Exchange,
        *,
        pins: Pins,
        new_job_id: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._binder = binder
        self._exchange = exchange
        self._pins = pins
        self._new_job_id = new_job_id
        self._clock = clock
        self._turns = itertools.count()
        self._offers: list[_Offer] = []
        self._running: dict[int, _Store] = {}
        self._active_s = 0.0
        self.counts = StoreCounts()

    def __len__(self) -> int:
        return len(self._offers) + len(self._running)

    def is_awaited(self) -> bool:
        """Return whether the engine should go on stepping for stores that may still end."""
        if not self._offers and not self._running:
            return False
        return self._clock.monotonic_s() - self._active_s < QUIET_S

    def offer(self, state: RequestState, bound: Bound, *, chunk_count: int) -> None:
        """Pin a request's chunks up to `chunk_count` that were not offered; `collect` sends them.

        Args:
            state: the request; its block table covers those chunks, computed by this step or
                earlier ones.
            bound: the namespace of its keys.
            chunk_count: chunks from the prompt's start that are complete after this step.
        """
        chain, first = state.chain, state.next_chunk
        assert chain is not None
        now_s = self._clock.monotonic_s()
        if now_s < state.offer_after_s:
            return
        stop = min(chunk_count, first + KEYS_MAX // len(bound.groups))
        room = self._pins.room()
        pieces: list[_Piece] = []
        for chunk in range(first, stop):
            found = self._pieces(state, bound, chunk)
            wanted = sum(len(piece.block_ids) for piece in found)
            if wanted > room:
                self.counts.crowded += (stop - chunk) * len(found)
                stop = chunk
                break
            room -= wanted
            pieces += found
        state.next_chunk = max(first, stop)
        if not pieces:
            return
        for piece in pieces:
            self._pins.pin(piece.block_ids)
        state.receipt.open_job()
        self._active_s = now_s
        self.counts.offered += len(pieces)
        deadline_s = now_s + RESERVE_TIMEOUT_S
        self._offers.append(_Offer(state, bound, first, chain, pieces, deadline_s))

    def _pieces(self, state: RequestState, bound: Bound, chunk: int) -> list[_Piece]:
        """Return what groups keep of a chunk in blocks that all are the request's own now."""
        pieces = []
        for place, group in enumerate(bound.groups):
            kind = group.group
            is_there = (
                group.first_block(chunk) >= kind.kept_from(state.computed) // kind.block_tokens
            )
            block_ids = group.table_part(state.tables[kind.index], chunk)
            # Fewer were computed where the table ends, and the null block stands for none.
            if (
                (is_there or kind.is_whole)
                and len(block_ids) == group.blocks
                and self._pins.usable(block_ids) == group.blocks
            ):
                pieces.append(_Piece(chunk, place, block_ids))
        return pieces

    def collect(self) -> list[StoreJob]:
        """Return the jobs of each offer that is answered and of which something is wanted."""
        for offer in self._offers:
            if offer.question is None:
                self._send(offer)
        jobs: list[StoreJob] = []
        waiting = []
        for offer in self._offers:
            try:
                replies = self._replies(offer)
            except KVCellarError as error:
                self._binder.heed(offer.bound, error)
                self.counts.lost += len(offer.pieces)
                self._put_off(offer, offer.first)
                self._let_go(offer)
                continue
            if replies is None:
                waiting.append(offer)
            else:
                jobs += self._start(offer, replies)
        self._offers = waiting
        return jobs

    def drop_offers(self) -> None:
        """Let go of every offer that the server has not answered."""
        for offer in self._offers:
            if offer.question is not None:
                self._exchange.drop(offer.question)
            self.counts.lost += len(offer.pieces)
            self._let_go(offer)
        self._offers = []

    def end(self, job_id: int, result: JobResult) -> bool:
        """Note that every rank has reported a job; False when it is none of these."""
        store = self._running.pop(job_id, None)
        if store is None:
            return False
        self._active_s = self._clock.monotonic_s()
        for piece in reversed(store.pinned):
            self._pins.let_go(piece.block_ids)
        bound, receipt = store.offer.bound, store.offer.state.receipt
        for line, reservation in zip(bound.lines, store.reservations, strict=True):
            line.part.holdings.end_reservation(line.session, reservation)
        if result.ranks_failed:
            self.counts.failed += len(store.whole)
        else:
            self.counts.stored += len(store.whole)
        chunks = len({piece.chunk for piece in store.whole})
        receipt.stored.add(result, token_count=chunks * bound.chunk_tokens)
        receipt.close_job()
        return True

    def _send(self, offer: _Offer) -> None:
        """Send an offer; where that cannot be done now, the next step tries again."""
        bound, chain, first, turn = offer.bound, offer.chain, offer.first, next(self._turns)
        tenant, offer.turn = offer.state.tenant, turn
        has_groups = len(bound.groups) > 1
        groups = bytes([piece.group for piece in offer.pieces]) if has_groups else b""

        def reserve(part: int, id_: int) -> Reserve:
            keys = b"".join([_key(offer, piece, part) for piece in offer.pieces])
            parent = bound.parents(chain.joined(max(0, first - 1), first, part=part))
            return Reserve(id_, keys, parent, turn, tenant=tenant, groups=groups)

        offer.question = self._exchange.ask(offer.bound.lines, reserve, timeout_s=RESERVE_TIMEOUT_S)

    def _replies(self, offer: _Offer) -> list[ReserveReply] | None:
        if offer.question is None:
            if not offer.bound.is_open:
                raise PeerClosedError("the connection is gone")
            if self._clock.monotonic_s() >= offer.deadline_s:
                raise TimeoutExpiredError("the offer could not be sent")
            return None
        replies = self._exchange.collect(offer.question)
        if replies is None:
            return None
        found = [reply for reply in replies if isinstance(reply, ReserveReply)]
        assert len(found) == len(replies), replies
        return found

    def _start(self, offer: _Offer, replies: Sequence[ReserveReply]) -> list[StoreJob]:
        """Return the job of each part, or none; a part may have nothing to do in it."""
        self._active_s = self._clock.monotonic_s()
        store = self._sort(offer, [reply.states for reply in replies])
        if not store.pinned:
            offer.state.receipt.close_job()
            return []
        store.reservations = [reply.reservation for reply in replies]
        job_id = self._new_job_id()
        self._running[job_id] = store
        return [
            StoreJob(
                job_id=job_id,
                request_id=offer.state.request_id,
                boot_id=part.line.session.boot_id,
                reservation=reply.reservation,
                writers=part.writers(offer.turn),
                groups=tuple(_group_stores(offer, part, pieces, reply.offsets)),
                fidelity=part.line.session.welcome.fidelity,
                part=part.line.part.index,
            )
            for part, reply, pieces in zip(offer.bound.parts, replies, store.parts, strict=True)
        ]

    def _sort(self, offer: _Offer, states: Sequence[bytes]) -> _Store:
        """Count the chunks by the servers' words and let go of those that none of them wants."""
        store, counts = _Store(offer, [[] for _ in states]), self.counts
        for piece, words in zip(offer.pieces, zip(*states, strict=True), strict=True):
            for pieces, word in zip(store.parts, words, strict=True):
                if word == ChunkState.RESERVED:
                    pieces.append(piece)
            if ChunkState.RESERVED in words:
                store.pinned.append(piece)
            else:
                self._pins.let_go(piece.block_ids)
            if ChunkState.FULL in words:
                # Where it was reserved nevertheless it is stored: then the next offer is smaller.
                counts.full += 1
                self._put_off(offer, piece.chunk)
            elif ChunkState.BUSY in words:
                counts.busy += 1
            elif ChunkState.RESERVED in words:
                store.whole.append(piece)
            else:
                counts.present += 1
        return store

    def _put_off(self, offer: _Offer, chunk: int) -> None:
        until_s = self._clock.monotonic_s() + PUT_OFF_S
        offer.state.put_off(offer.bound, chunk=chunk, until_s=until_s)

    def _let_go(self, offer: _Offer) -> None:
        for piece in offer.pieces:
            self._pins.let_go(piece.block_ids)
        offer.state.receipt.close_job()


def _key(offer: _Offer, piece: _Piece, part: int) -> bytes:
    return offer.bound.groups[piece.group].keys(offer.chain.key(piece.chunk, part=part))


def _group_stores(
    offer: _Offer, part: BoundPart, pieces: Sequence[_Piece], offsets: bytes
) -> Iterator[GroupStore]:
    """Yield what a part's ranks write of each KV group; `offsets` has a chunk's shards together."""
    width = part.shard_count * OFFSET_BYTES
    for group, kept in enumerate(offer.bound.groups):
        places = [place for place, piece in enumerate(pieces) if piece.group == group]
        if places:
            keys = [_key(offer, pieces[place], part.line.part.index) for place in places]
            yield GroupStore(
                group=kept.group.index,
                keys=b"".join(keys),
                offsets=b"".join(
                    [offsets[place * width : (place + 1) * width] for place in places]
                ),
                block_ids=[id_ for place in places for id_ in pieces[place].block_ids],
                places=places,
            )
