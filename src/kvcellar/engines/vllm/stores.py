"""Stores: chunks that a step completes are offered to the server, pinned, copied and let go.

A chunk is offered in the step that computes its last token. Its blocks are pinned in that very
call, so neither preemption nor the request's end can hand them to somebody else; then the server
says which chunks are new and fit, the workers copy those, and the pins go when every rank has
reported. What the server does not want is let go at once. A KV group that frees blocks as it goes
still has what is kept of a chunk in that step; later it may not, and then its part is not offered:
the ids that are remembered may be another request's. Used by the scheduler half on the engine's
thread.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvcellar.clock import Clock
from kvcellar.engines.vllm.binding import Binder, Bound
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.holdings import Holdings
from kvcellar.engines.vllm.metadata import JobResult, StoreJob, StorePart
from kvcellar.engines.vllm.pins import Pins
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, PeerClosedError, TimeoutExpiredError
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
    """Chunks by what became of them, one counted for each KV group that keeps some of it.

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
    """One KV group's part of one chunk: the chunk, the group's place, its key and its blocks."""

    chunk: int
    group: int
    key: bytes
    block_ids: list[int]


@dataclass(eq=False)
class _Offer:
    state: RequestState
    bound: Bound
    first: int
    pieces: list[_Piece]
    parent: bytes
    deadline_s: float
    turn: int = 0
    question: Question | None = None


@dataclass(eq=False)
class _Store:
    offer: _Offer
    reservation: int
    pieces: list[_Piece]


class Stores:
    """Offers that wait for the server, and stores that the workers run."""

    def __init__(
        self,
        binder: Binder,
        exchange: Exchange,
        holdings: Holdings,
        *,
        pins: Pins,
        new_job_id: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._binder = binder
        self._exchange = exchange
        self._holdings = holdings
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
            parts = self._parts(state, bound, chunk)
            wanted = sum(len(part.block_ids) for part in parts)
            if wanted > room:
                self.counts.crowded += (stop - chunk) * len(parts)
                stop = chunk
                break
            room -= wanted
            pieces += parts
        state.next_chunk = max(first, stop)
        if not pieces:
            return
        for piece in pieces:
            self._pins.pin(piece.block_ids)
        state.receipt.open_job()
        self._active_s = now_s
        self.counts.offered += len(pieces)
        parent = bound.parents(bytes(chain.key(first - 1))) if first else b""
        deadline_s = now_s + RESERVE_TIMEOUT_S
        self._offers.append(_Offer(state, bound, first, pieces, parent, deadline_s))

    def _parts(self, state: RequestState, bound: Bound, chunk: int) -> list[_Piece]:
        """Return the parts of a chunk whose blocks all are the request's own at this moment."""
        assert state.chain is not None
        key = bytes(state.chain.key(chunk))
        parts = []
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
                parts.append(_Piece(chunk, place, group.keys(key), block_ids))
        return parts

    def collect(self) -> list[StoreJob]:
        """Return a job for each offer that the server has answered and wants something of."""
        for offer in self._offers:
            if offer.question is None:
                self._send(offer)
        jobs, waiting = [], []
        for offer in self._offers:
            try:
                reply = self._reply(offer)
            except KVCellarError as error:
                self._binder.heed(offer.bound, error)
                self.counts.lost += len(offer.pieces)
                self._put_off(offer, offer.first)
                self._let_go(offer)
                continue
            if reply is None:
                waiting.append(offer)
                continue
            job = self._start(offer, reply)
            if job is not None:
                jobs.append(job)
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
        for piece in reversed(store.pieces):
            self._pins.let_go(piece.block_ids)
        bound, receipt = store.offer.bound, store.offer.state.receipt
        self._holdings.end_reservation(bound.session, store.reservation)
        if result.ranks_failed:
            self.counts.failed += len(store.pieces)
        else:
            self.counts.stored += len(store.pieces)
        chunks = len({piece.chunk for piece in store.pieces})
        receipt.stored.add(result, token_count=chunks * bound.chunk_tokens)
        receipt.close_job()
        return True

    def _send(self, offer: _Offer) -> None:
        """Send an offer; where that cannot be done now, the next step tries again."""
        keys = b"".join([piece.key for piece in offer.pieces])
        groups = (
            bytes(piece.group for piece in offer.pieces) if len(offer.bound.groups) > 1 else b""
        )
        parent, tenant = offer.parent, offer.state.tenant
        offer.turn = turn = next(self._turns)
        offer.question = self._exchange.ask(
            offer.bound.session,
            lambda id_: Reserve(id_, keys, parent, turn, tenant=tenant, groups=groups),
            timeout_s=RESERVE_TIMEOUT_S,
        )

    def _reply(self, offer: _Offer) -> ReserveReply | None:
        if offer.question is None:
            if not offer.bound.session.is_open:
                raise PeerClosedError("the connection is gone")
            if self._clock.monotonic_s() >= offer.deadline_s:
                raise TimeoutExpiredError("the offer could not be sent")
            return None
        reply = self._exchange.collect(offer.question)
        assert reply is None or isinstance(reply, ReserveReply), type(reply)
        return reply

    def _start(self, offer: _Offer, reply: ReserveReply) -> StoreJob | None:
        self._active_s = self._clock.monotonic_s()
        taken = self._sort(offer, reply.states)
        if not taken:
            offer.state.receipt.close_job()
            return None
        bound = offer.bound
        job = StoreJob(
            job_id=self._new_job_id(),
            request_id=offer.state.request_id,
            boot_id=bound.session.boot_id,
            reservation=reply.reservation,
            writers=bound.writers(offer.turn),
            parts=tuple(_store_parts(bound, taken, reply.offsets)),
            fidelity=bound.session.welcome.fidelity,
        )
        self._running[job.job_id] = _Store(offer, reply.reservation, taken)
        return job

    def _sort(self, offer: _Offer, states: bytes) -> list[_Piece]:
        """Count the chunks by the server's word and let go of those that it does not want."""
        taken, counts = [], self.counts
        for piece, state in zip(offer.pieces, states, strict=True):
            if state == ChunkState.RESERVED:
                taken.append(piece)
                continue
            self._pins.let_go(piece.block_ids)
            if state == ChunkState.PRESENT:
                counts.present += 1
            elif state == ChunkState.BUSY:
                counts.busy += 1
            else:
                counts.full += 1
                self._put_off(offer, piece.chunk)
        return taken

    def _put_off(self, offer: _Offer, chunk: int) -> None:
        until_s = self._clock.monotonic_s() + PUT_OFF_S
        offer.state.put_off(offer.bound, chunk=chunk, until_s=until_s)

    def _let_go(self, offer: _Offer) -> None:
        for piece in offer.pieces:
            self._pins.let_go(piece.block_ids)
        offer.state.receipt.close_job()


def _store_parts(bound: Bound, taken: list[_Piece], offsets: bytes) -> Iterator[StorePart]:
    """Yield what is to be written of each KV group; `offsets` has a chunk's shards together."""
    width = bound.shard_count * OFFSET_BYTES
    for group, kept in enumerate(bound.groups):
        places = [place for place, piece in enumerate(taken) if piece.group == group]
        if places:
            yield StorePart(
                group=kept.group.index,
                keys=b"".join([taken[place].key for place in places]),
                offsets=b"".join(
                    [offsets[place * width : (place + 1) * width] for place in places]
                ),
                block_ids=[id_ for place in places for id_ in taken[place].block_ids],
                places=places,
            )
