"""Stores: chunks that a step completes are offered to the server, pinned, copied and let go.

A chunk is offered in the step that computes its last token. Its blocks are pinned in that very
call, so neither preemption nor the request's end can hand them to somebody else; then the server
says which chunks are new and fit, the workers copy those, and the pins go when every rank has
reported. What the server does not want is let go at once. Used by the scheduler half on the
engine's thread.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcellar.clock import Clock
from kvcellar.engines.vllm.binding import Binder, Bound
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.holdings import Holdings
from kvcellar.engines.vllm.metadata import JobResult, StoreJob
from kvcellar.engines.vllm.pins import Pins
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, PeerClosedError, TimeoutExpiredError
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
    """Chunks by what became of them.

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
    keys: list[bytes]
    blocks: list[list[int]]
    parent: bytes
    deadline_s: float
    turn: int = 0
    question: Question | None = None


@dataclass(eq=False)
class _Store:
    offer: _Offer
    reservation: int
    block_ids: list[int]
    chunk_count: int


@dataclass(eq=False)
class _Taken:
    """What an answer makes of an offer."""

    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


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
                [bytes(chain.key(index)) for index in range(first, stop)],
                [block_ids[at : at + width] for at in range(0, len(block_ids), width)],
                parent=bytes(chain.key(first - 1)) if first else b"",
                deadline_s=now_s + RESERVE_TIMEOUT_S,
            )
        )

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
                self.counts.lost += len(offer.keys)
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
            self.counts.lost += len(offer.keys)
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
        self._holdings.end_reservation(bound.session, store.reservation)
        if result.ranks_failed:
            self.counts.failed += store.chunk_count
        else:
            self.counts.stored += store.chunk_count
        receipt.stored.add(result, token_count=store.chunk_count * bound.chunk_tokens)
        receipt.close_job()
        return True

    def _send(self, offer: _Offer) -> None:
        """Send an offer; where that cannot be done now, the next step tries again."""
        keys, parent, tenant = b"".join(offer.keys), offer.parent, offer.state.tenant
        offer.turn = turn = next(self._turns)
        offer.question = self._exchange.ask(
            offer.bound.session,
            lambda id_: Reserve(id_, keys, parent, turn, tenant=tenant),
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
        if not taken.keys:
            offer.state.receipt.close_job()
            return None
        job = StoreJob(
            job_id=self._new_job_id(),
            request_id=offer.state.request_id,
            boot_id=offer.bound.session.boot_id,
            reservation=reply.reservation,
            keys=b"".join(taken.keys),
            offsets=reply.offsets,
            writers=offer.bound.writers(offer.turn),
            block_ids=taken.block_ids,
            fidelity=offer.bound.session.welcome.fidelity,
        )
        self._running[job.job_id] = _Store(
            offer, reply.reservation, taken.block_ids, len(taken.keys)
        )
        return job

    def _sort(self, offer: _Offer, states: bytes) -> _Taken:
        """Count the chunks by the server's word and let go of those that it does not want."""
        taken, counts = _Taken(), self.counts
        for index, (key, block_ids, state) in enumerate(
            zip(offer.keys, offer.blocks, states, strict=True)
        ):
            if state == ChunkState.RESERVED:
                taken.keys.append(key)
                taken.block_ids += block_ids
                continue
            self._pins.let_go(block_ids)
            if state == ChunkState.PRESENT:
                counts.present += 1
            elif state == ChunkState.BUSY:
                counts.busy += 1
            else:
                counts.full += 1
                self._put_off(offer, offer.first + index)
        return taken

    def _put_off(self, offer: _Offer, chunk: int) -> None:
        until_s = self._clock.monotonic_s() + PUT_OFF_S
        offer.state.put_off(offer.bound, chunk=chunk, until_s=until_s)

    def _let_go(self, offer: _Offer) -> None:
        for block_ids in offer.blocks:
            self._pins.let_go(block_ids)
        offer.state.receipt.close_job()
