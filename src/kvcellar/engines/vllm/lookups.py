"""Lookups: how much of a prompt the servers have, answered inside vLLM's own call where possible.

vLLM asks in every step in which a request waits, and may ask again at any time after it got an
answer (no memory for the request, preemption), so an answer is kept with its lease and checked
before it is given again. No answer is 'ask me again' only until a deadline; then the request is
computed. Where a server fetches more from its tiers, the answer is the prefix that is there when
the fetch is over or its own deadline has passed. Of several servers all are asked at once, and the
one that has the least decides. Used by the scheduler half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcellar.clock import Clock
from kvcellar.engines.vllm.adapters import Adapters
from kvcellar.engines.vllm.binding import Binder, Bound
from kvcellar.engines.vllm.exchange import Exchange, Question
from kvcellar.engines.vllm.notes import Notes, Outcome
from kvcellar.engines.vllm.parts import Line
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.errors import KVCellarError, TimeoutExpiredError
from kvcellar.protocol.messages import AwaitFetch, Lookup, LookupReply, Reply

__all__ = ["Answer", "Lookups"]


@dataclass(eq=False)
class Answer:
    """What the servers said about one request.

    Attributes:
        bound: where it was asked; the answer is worth something only as long as that is current.
        found: what each server has. Its lease holds all of that, also what goes beyond `count`.
        count: leading chunks that every server has. Where a hit is not divisible, what one has for
            a later end is of no use at an earlier one: 0 unless all agree.
        is_held: whether the leases were not given back.
    """

    bound: Bound
    found: list[LookupReply]
    count: int = 0
    is_held: bool = True

    def __post_init__(self) -> None:
        self.count = self._agreed()

    def improve(
        self, lines: Sequence[Line], replies: Sequence[LookupReply], exchange: Exchange
    ) -> None:
        """Take what lines have found besides, and give back what that replaces, or the reverse."""
        for line, reply in zip(lines, replies, strict=True):
            had = self.found[line.part.index]
            is_more = reply.count > had.count
            exchange.release(line, had.lease if is_more else reply.lease)
            if is_more:
                self.found[line.part.index] = reply
        self.count = self._agreed()

    def give_back(self, exchange: Exchange) -> None:
        """Release what it holds; the count stays."""
        if self.is_held:
            self.is_held = False
            for line, reply in zip(self.bound.lines, self.found, strict=True):
                exchange.release(line, reply.lease)

    def _agreed(self) -> int:
        counts = {reply.count for reply in self.found}
        return min(counts) if self.bound.is_divisible or len(counts) == 1 else 0


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
            # Kept without its leases: the count still says where the servers' chunks end.
            answer.give_back(self._exchange)
            return 0
        if not answer.is_held:
            # vLLM held more than now when the leases were given back.
            self.drop(state)
            return self.matched_tokens(state, computed_tokens)
        return loadable

    def start(self, state: RequestState) -> None:
        """Send a request's lookup without waiting for the answer."""
        bound = self._binder.current()
        if bound is not None and state.request_id not in self._inquiries:
            self._ask(self._open(state), bound, computed_tokens=0)

    def take(self, state: RequestState) -> Answer:
        """Hand over the answer that was given last, with its leases."""
        answer = self._inquiries.pop(state.request_id).answer
        assert answer is not None, state.request_id
        assert answer.is_held, state.request_id
        return answer

    def note_refusal(self, state: RequestState) -> None:
        """Note that what was found is computed nevertheless."""
        inquiry = self._inquiries.get(state.request_id)
        if inquiry is not None and inquiry.answer is not None:
            answer = inquiry.answer
            self._tell(state, answer, Outcome.GATE)

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
        inquiry.bound, inquiry.chunks, tenant = bound, chunks, state.tenant
        fetch = self._is_worth_fetching(inquiry, bound, computed_tokens)
        inquiry.question = self._exchange.ask(
            bound.lines,
            lambda part, id_: Lookup(
                id_, bound.keys(chain.joined(0, chunks, part=part)), fetch, tenant
            ),
            timeout_s=self._timeout_s,
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
            replies = self._exchange.collect(inquiry.question)
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
        if replies is None:
            return None
        inquiry.question = None
        inquiry.answer = answer = Answer(inquiry.bound, _found(replies))
        if self._begin_to_wait(inquiry, answer, computed_tokens):
            return None
        self._settle(inquiry)
        return answer

    def _begin_to_wait(self, inquiry: _Inquiry, answer: Answer, computed_tokens: int) -> bool:
        """Ask to be told what fetches come to; False where that is known, or cannot be asked."""
        found, wait_s = answer.found, self._fetch_timeout_s
        # No fetch adds to what the servers have that fetch nothing.
        limit = min((reply.count for reply in found if not reply.fetch), default=inquiry.chunks)
        lines = [
            line
            for line, reply in zip(answer.bound.lines, found, strict=True)
            if reply.fetch and reply.count < limit
        ]
        if not lines or not self._is_worth_fetching(inquiry, answer.bound, computed_tokens):
            return False
        inquiry.fetch = self._exchange.ask(
            lines,
            lambda part, id_: AwaitFetch(id_, found[part].fetch, wait_s),
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

    def _take_fetched(
        self, inquiry: _Inquiry, receive: Callable[[Question], Sequence[Reply] | None]
    ) -> None:
        """Take what fetches came to if they are over; without them the first answer stands."""
        answer, fetch = inquiry.answer, inquiry.fetch
        assert answer is not None
        assert fetch is not None
        try:
            replies = receive(fetch)
        except KVCellarError as error:
            if inquiry.bound is not None:
                self._binder.heed(inquiry.bound, error)
            inquiry.fetch = None
            return
        if replies is not None:
            inquiry.fetch = None
            answer.improve(fetch.lines, _found(replies), self._exchange)

    def _settle(self, inquiry: _Inquiry) -> None:
        """Note where the servers' chunks end, now that it is known."""
        answer = inquiry.answer
        assert answer is not None
        inquiry.state.next_chunk = answer.count
        self._tell(inquiry.state, answer, Outcome.ANSWERED)

    def _tell(self, state: RequestState, answer: Answer, outcome: str) -> None:
        found = [reply.count for reply in answer.found]
        self._notes.tell(state, answer.bound, outcome, found=found)

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
            inquiry.answer.give_back(self._exchange)
        inquiry.question = inquiry.fetch = inquiry.answer = inquiry.bound = None


def _found(replies: Sequence[Reply]) -> list[LookupReply]:
    found = [reply for reply in replies if isinstance(reply, LookupReply)]
    assert len(found) == len(replies), replies
    return found
