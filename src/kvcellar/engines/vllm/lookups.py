"""Lookups: how much of a prompt the server has, answered inside vLLM's own call where possible.

vLLM asks in every step in which a request waits, and may ask again at any time after it got an
answer (no memory for the request, preemption), so an answer is kept with its lease and checked
before it is given again. No answer is 'ask me again' only until a deadline; then the request is
computed. Where the server fetches more from its tiers, the answer is the prefix that is there when
the fetch is over or its own deadline has passed. Used by the scheduler half.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.clock import Clock
from kvcellar.engines.vllm.adapters import Adapters
from kvcellar.engines.vllm.binding import Binder, Bound
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.notes import Notes, Outcome
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, TimeoutExpiredError
from kvcellar.protocol.messages import AwaitFetch, Lookup, LookupReply, Reply

__all__ = ["Answer", "Lookups"]


@dataclass(eq=False)
class Answer:
    """What the server said about one request.

    Attributes:
        bound: where it was asked; the answer is worth something only as long as that is current.
        count: leading chunks of the longest hit.
        lease: holds all that it needs; 0 for none (any more).
        refs: `REF_BYTES` for each shard of each chunk that a KV group needs, group after group.
    """

    bound: Bound
    count: int
    lease: int
    refs: bytes


@dataclass(eq=False)
class _Inquiry:
    """What is going on for one request.

    Attributes:
        state: the request.
        since_s: since when it waits for an answer.
        question: the lookup, while its answer is awaited.
        answer: of the lookup, or of the fetch where that found more.
        bound: where it was asked.
        chunks: how many were asked for.
        fetch: the wait for a fetch, while it goes on.
    """

    state: RequestState
    since_s: float
    question: Question | None = None
    answer: Answer | None = None
    bound: Bound | None = None
    chunks: int = 0
    fetch: Question | None = None


class Lookups:
    """All lookups of the scheduler half, one at most for each request."""

    def __init__(
        self,
        binder: Binder,
        exchange: Exchange,
        *,
        adapters: Adapters,
        timeout_s: float,
        fetch_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._binder = binder
        self._exchange = exchange
        self._notes = Notes(exchange)
        self._adapters = adapters
        self._timeout_s = timeout_s
        self._fetch_timeout_s = fetch_timeout_s
        self._clock = clock
        self._inquiries: dict[str, _Inquiry] = {}
        self.overdue_count = 0

    def __len__(self) -> int:
        return len(self._inquiries)

    def matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        """Return how many tokens beyond the computed ones can be loaded; None: not known yet.

        Never waits beyond the step's budget, and is None for `timeout_s` at most, or for
        `fetch_timeout_s` more while the server fetches. A positive answer holds its lease until
        `take` or `drop`.

        Args:
            state: the request.
            computed_tokens: tokens that vLLM has itself, whole blocks.
        """
        answer = self._answer(state, computed_tokens)
        if answer is None:
            return None if state.may_load and state.request_id in self._inquiries else 0
        loadable = answer.count * answer.bound.chunk_tokens - computed_tokens
        if loadable <= 0:
            # Kept without its lease: the count still says where the server's chunks end.
            self._exchange.release(answer.bound.session, answer.lease)
            answer.lease, answer.refs = 0, b""
            return 0
        if not answer.lease:
            # vLLM held more than now when the lease was given back.
            self.drop(state)
            return self.matched_tokens(state, computed_tokens)
        return loadable

    def start(self, state: RequestState) -> None:
        """Send a request's lookup without waiting for the answer."""
        bound = self._binder.current()
        if bound is not None and state.request_id not in self._inquiries:
            self._ask(self._open(state), bound, computed_tokens=0)

    def take(self, state: RequestState) -> Answer:
        """Hand over the answer that was given last, with its lease."""
        answer = self._inquiries.pop(state.request_id).answer
        assert answer is not None, state.request_id
        assert answer.lease, state.request_id
        return answer

    def note_refusal(self, state: RequestState) -> None:
        """Note that what was found is computed nevertheless."""
        inquiry = self._inquiries.get(state.request_id)
        if inquiry is not None and inquiry.answer is not None:
            answer = inquiry.answer
            self._notes.tell(state, answer.bound, Outcome.GATE, found=answer.count)

    def drop(self, state: RequestState) -> None:
        """Forget a request's lookup, whatever it has come to."""
        inquiry = self._inquiries.pop(state.request_id, None)
        if inquiry is not None:
            self._void(inquiry)

    def drop_all(self) -> None:
        """Forget every lookup."""
        for inquiry in list(self._inquiries.values()):
            self.drop(inquiry.state)

    def _answer(self, state: RequestState, computed_tokens: int) -> Answer | None:
        """Return the answer if there is one that is good now, asking and collecting as needed."""
        bound = self._binder.current()
        inquiry = self._inquiries.get(state.request_id)
        if bound is None:
            self._await_namespace(state, inquiry)
            return None
        if inquiry is None:
            inquiry = self._open(state)
        if inquiry.bound is not bound or state.has_shrunk():
            # Another session: the old one's leases ended with it. Other tokens: other chunks.
            self._void(inquiry)
        if inquiry.answer is not None:
            if inquiry.fetch is not None:
                self._await_fetch(inquiry, inquiry.fetch, computed_tokens)
            return inquiry.answer if inquiry.fetch is None else None
        if inquiry.question is None and not self._ask(
            inquiry, bound, computed_tokens=computed_tokens
        ):
            return None
        return self._collect(inquiry, computed_tokens)

    def _await_namespace(self, state: RequestState, inquiry: _Inquiry | None) -> None:
        if not self._binder.is_settling():
            self.drop(state)
        elif inquiry is None:
            self._open(state)
        else:
            self._void(inquiry)
            self._give_up_if_overdue(inquiry)

    def _open(self, state: RequestState) -> _Inquiry:
        inquiry = _Inquiry(state, self._clock.monotonic_s())
        self._inquiries[state.request_id] = inquiry
        return inquiry

    def _ask(self, inquiry: _Inquiry, bound: Bound, *, computed_tokens: int) -> bool:
        """Send the lookup; False when there is nothing to ask or it cannot be sent now."""
        state = inquiry.state
        chain = state.keys(bound, self._adapters, token_count=state.request.num_tokens)
        chunks = 0 if chain is None else min(chain.count, state.lookup_end(bound))
        if chain is None or not chunks:
            self._notes.tell(state, bound, Outcome.UNNAMED if chain is None else Outcome.SHORT)
            self.drop(state)
            return False
        inquiry.bound, inquiry.chunks = bound, chunks
        keys, tenant = bound.keys(chain.joined(0, chunks)), state.tenant
        fetch = self._is_worth_fetching(inquiry, bound, computed_tokens)
        inquiry.question = self._exchange.ask(
            bound.session, lambda id_: Lookup(id_, keys, fetch, tenant), timeout_s=self._timeout_s
        )
        if inquiry.question is None:
            self._give_up_if_overdue(inquiry)
        return inquiry.question is not None

    def _is_worth_fetching(self, inquiry: _Inquiry, bound: Bound, computed_tokens: int) -> bool:
        # What vLLM has itself need not come from a disk.
        return self._fetch_timeout_s > 0 and inquiry.chunks * bound.chunk_tokens > computed_tokens

    def _collect(self, inquiry: _Inquiry, computed_tokens: int) -> Answer | None:
        assert inquiry.question is not None
        assert inquiry.bound is not None
        try:
            reply = self._exchange.collect(inquiry.question)
        except TimeoutExpiredError:
            inquiry.question = None
            self._give_up(inquiry)
            return None
        except KVCellarError as error:
            # Asked anew on the next session or once the namespace is bound again, or not at all.
            self._binder.heed(inquiry.bound, error)
            inquiry.question = inquiry.bound = None
            self._give_up_if_overdue(inquiry)
            return None
        if reply is None:
            return None
        assert isinstance(reply, LookupReply), type(reply)
        inquiry.question = None
        inquiry.answer = Answer(inquiry.bound, reply.count, reply.lease, reply.refs)
        if reply.fetch and self._begin_to_wait(inquiry, reply.fetch, computed_tokens):
            return None
        self._settle(inquiry)
        return inquiry.answer

    def _begin_to_wait(self, inquiry: _Inquiry, handle: int, computed_tokens: int) -> bool:
        """Ask to be told what a fetch comes to; False where that is known, or cannot be asked."""
        assert inquiry.bound is not None
        wait_s = self._fetch_timeout_s
        if not self._is_worth_fetching(inquiry, inquiry.bound, computed_tokens):
            return False
        inquiry.fetch = self._exchange.ask(
            inquiry.bound.session,
            lambda id_: AwaitFetch(id_, handle, wait_s),
            timeout_s=wait_s + self._timeout_s,
        )
        # Most fetches find nothing, and say so before the step's budget is spent.
        if inquiry.fetch is not None:
            self._take_fetched(inquiry, self._exchange.collect)
        return inquiry.fetch is not None

    def _await_fetch(self, inquiry: _Inquiry, fetch: Question, computed_tokens: int) -> None:
        assert inquiry.bound is not None
        if self._is_worth_fetching(inquiry, inquiry.bound, computed_tokens):
            self._take_fetched(inquiry, self._exchange.look)
        else:
            self._exchange.drop(fetch)
            inquiry.fetch = None
        if inquiry.fetch is None:
            self._settle(inquiry)

    def _take_fetched(self, inquiry: _Inquiry, receive: Callable[[Question], Reply | None]) -> None:
        """Take what a fetch came to if it is over; without it the first answer stands."""
        answer, fetch = inquiry.answer, inquiry.fetch
        assert answer is not None
        assert fetch is not None
        try:
            reply = receive(fetch)
        except KVCellarError as error:
            if inquiry.bound is not None:
                self._binder.heed(inquiry.bound, error)
            inquiry.fetch = None
            return
        if reply is None:
            return
        assert isinstance(reply, LookupReply), type(reply)
        inquiry.fetch = None
        if reply.count <= answer.count:
            self._exchange.release(fetch.session, reply.lease)
            return
        self._exchange.release(fetch.session, answer.lease)
        answer.count, answer.lease, answer.refs = reply.count, reply.lease, reply.refs

    def _settle(self, inquiry: _Inquiry) -> None:
        """Note where the server's chunks end, now that it is known."""
        answer = inquiry.answer
        assert answer is not None
        inquiry.state.next_chunk = answer.count
        self._notes.tell(inquiry.state, answer.bound, Outcome.ANSWERED, found=answer.count)

    def _give_up_if_overdue(self, inquiry: _Inquiry) -> None:
        if self._clock.monotonic_s() - inquiry.since_s >= self._timeout_s:
            self._give_up(inquiry)

    def _give_up(self, inquiry: _Inquiry) -> None:
        self.overdue_count += 1
        if inquiry.bound is not None:
            self._notes.tell(inquiry.state, inquiry.bound, Outcome.LATE)
        inquiry.state.may_load = False
        self.drop(inquiry.state)

    def _void(self, inquiry: _Inquiry) -> None:
        if inquiry.bound is not None:
            # It had been answered or was about to be: what it waited for then does not count.
            inquiry.since_s = self._clock.monotonic_s()
        for question in (inquiry.question, inquiry.fetch):
            if question is not None:
                self._exchange.drop(question)
        if inquiry.answer is not None:
            self._exchange.release(inquiry.answer.bound.session, inquiry.answer.lease)
        inquiry.question = inquiry.fetch = inquiry.answer = inquiry.bound = None
