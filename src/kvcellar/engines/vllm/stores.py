"""Stores: chunks that a step completes are offered to the servers, pinned, copied and let go.

A chunk is offered in the step that computes its last token. Its blocks are pinned in that very
call, so neither preemption nor the request's end can hand them to somebody else; then each server
says which chunks are new to it and fit, the workers copy those, and the pins go when every rank has
reported. What no server wants is let go at once. Used by the scheduler half on the engine's thread.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcellar.clock import Clock
from kvcellar.engines.vllm.binding import Binder, Bound
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.metadata import JobResult, StoreJob
from kvcellar.engines.vllm.pins import Pins
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, PeerClosedError, TimeoutExpiredError
from kvcellar.keys.chain import ChunkChain
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import ChunkState, Reserve, ReserveReply

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


@dataclass(eq=False)
class _Offer:
    state: RequestState
    bound: Bound
    first: int
    chain: ChunkChain
    blocks: list[list[int]]
    deadline_s: float
    turn: int = 0
    question: Question | None = None


@dataclass(eq=False)
class _Store:
    """What the answers make of an offer.

    Attributes:
        offer: what was offered.
        parts: the keys and the blocks of the chunks that each server reserved.
        block_ids: of all chunks that some server reserved; they are pinned.
        chunk_count: chunks that every server has once this is over.
        reservations: the handles.
    """

    offer: _Offer
    parts: list[tuple[bytearray, list[int]]]
    block_ids: list[int] = field(default_factory=list)
    chunk_count: int = 0
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
        chain, first, width = state.chain, state.next_chunk, bound.blocks_per_chunk
        assert chain is not None
        now_s = self._clock.monotonic_s()
        if now_s < state.offer_after_s:
            return
        stop = min(chunk_count, first + KEYS_MAX)
        block_ids = state.block_ids[first * width : stop * width]
        usable = self._pins.usable(block_ids) // width
        fitting = min(usable, self._pins.room() // width)
        self.counts.crowded += usable - fitting
        if fitting <= 0:
            return
        stop, block_ids = first + fitting, block_ids[: fitting * width]
        self._pins.pin(block_ids)
        state.next_chunk = stop
        state.receipt.open_job()
        self._active_s = now_s
        self.counts.offered += fitting
        self._offers.append(
            _Offer(
                state,
                bound,
                first,
                chain,
                [block_ids[at : at + width] for at in range(0, len(block_ids), width)],
                deadline_s=now_s + RESERVE_TIMEOUT_S,
            )
        )

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
                self.counts.lost += len(offer.blocks)
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
            self.counts.lost += len(offer.blocks)
            self._let_go(offer)
        self._offers = []

    def end(self, job_id: int, result: JobResult) -> bool:
        """Note that every rank has reported a job; False when it is none of these."""
        store = self._running.pop(job_id, None)
        if store is None:
            return False
        self._active_s = self._clock.monotonic_s()
        self._pins.let_go(store.block_ids)
        bound, receipt = store.offer.bound, store.offer.state.receipt
        for line, reservation in zip(bound.lines, store.reservations, strict=True):
            line.part.holdings.end_reservation(line.session, reservation)
        if result.ranks_failed:
            self.counts.failed += store.chunk_count
        else:
            self.counts.stored += store.chunk_count
        receipt.stored.add(result, token_count=store.chunk_count * bound.chunk_tokens)
        receipt.close_job()
        return True

    def _send(self, offer: _Offer) -> None:
        """Send an offer; where that cannot be done now, the next step tries again."""
        chain, first, turn = offer.chain, offer.first, next(self._turns)
        stop, tenant, offer.turn = first + len(offer.blocks), offer.state.tenant, turn

        def reserve(part: int, id_: int) -> Reserve:
            keys = chain.joined(first, stop, part=part)
            parent = chain.joined(max(0, first - 1), first, part=part)
            return Reserve(id_, keys, parent, turn, tenant=tenant)

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
        if not store.block_ids:
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
                keys=bytes(keys),
                offsets=reply.offsets,
                writers=part.writers(offer.turn),
                block_ids=block_ids,
                fidelity=part.line.session.welcome.fidelity,
                part=part.line.part.index,
            )
            for part, reply, (keys, block_ids) in zip(
                offer.bound.parts, replies, store.parts, strict=True
            )
        ]

    def _sort(self, offer: _Offer, states: Sequence[bytes]) -> _Store:
        """Count the chunks by the servers' words and let go of those that none of them wants."""
        store, counts = _Store(offer, [(bytearray(), []) for _ in states]), self.counts
        for index, (block_ids, words) in enumerate(
            zip(offer.blocks, zip(*states, strict=True), strict=True)
        ):
            for part, word in enumerate(words):
                if word == ChunkState.RESERVED:
                    keys, blocks = store.parts[part]
                    keys += offer.chain.key(offer.first + index, part=part)
                    blocks += block_ids
            if ChunkState.RESERVED in words:
                store.block_ids += block_ids
            else:
                self._pins.let_go(block_ids)
            if ChunkState.FULL in words:
                # Where it was reserved nevertheless it is stored: then the next offer is smaller.
                counts.full += 1
                self._put_off(offer, offer.first + index)
            elif ChunkState.BUSY in words:
                counts.busy += 1
            elif ChunkState.RESERVED in words:
                store.chunk_count += 1
            else:
                counts.present += 1
        return store

    def _put_off(self, offer: _Offer, chunk: int) -> None:
        until_s = self._clock.monotonic_s() + PUT_OFF_S
        offer.state.put_off(offer.bound, chunk=chunk, until_s=until_s)

    def _let_go(self, offer: _Offer) -> None:
        for block_ids in offer.blocks:
            self._pins.let_go(block_ids)
        offer.state.receipt.close_job()
