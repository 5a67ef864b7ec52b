"""Questions to the servers that never hold up a step for longer than its budget.

All hooks of one scheduler step share a millisecond of waiting. Within it a question is answered
inside the hook; beyond it the answer is collected in a later step; past its deadline it is
forgotten, and what a late answer grants is handed back by whichever thread meets it. A question to
several servers is sent to all of them before any is waited for, and is answered by all or by none:
what the others granted is handed back. Used by the scheduler half for everything that it says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcellar.clock import Clock
from kvcellar.engines.vllm.parts import Line
from kvcellar.errors import KVCellarError, LimitError, PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.messages import (
    Cancel,
    LookupReply,
    Release,
    Reply,
    Request,
    ReserveReply,
)

__all__ = ["STEP_BUDGET_S", "Exchange", "Question"]

TELL_TIMEOUT_S = 0.0002
"""Seconds that a message which expects nothing may wait for a full socket or another thread."""
STEP_BUDGET_S = 0.001
"""Seconds that all waiting of one step may take, whatever the number of its requests."""


@dataclass(eq=False, slots=True)
class Question:
    """A request that was sent to one server or to several and whose replies are still wanted.

    Attributes:
        lines: where it was sent.
        deadline_s: until when the replies are worth something.
        request_ids: on each line.
        replies: of each line; None where it has not come.
    """

    lines: Sequence[Line]
    deadline_s: float
    request_ids: list[int] = field(default_factory=list)
    replies: list[Reply | None] = field(default_factory=list)


class Exchange:
    """The scheduler half's side of the conversations; used by the engine's thread alone."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._left_s = STEP_BUDGET_S
        self._is_idle = False

    def start_step(self, *, is_idle: bool) -> None:
        """Give the next step its budget.

        Args:
            is_idle: the step before computed nothing, so that waiting delays nobody.
        """
        self._left_s = STEP_BUDGET_S
        self._is_idle = is_idle

    def ask(
        self, lines: Sequence[Line], make: Callable[[int, int], Request], *, timeout_s: float
    ) -> Question | None:
        """Send a request whose replies will be collected; None when it cannot be sent now.

        Args:
            lines: sessions of the links.
            make: makes the request from the index of a line's part and the request's id.
            timeout_s: how long the replies are worth waiting for, over any number of steps.

        Blocks only while a socket is full, within the step's budget.
        """
        started_s = self._clock.monotonic_s()
        question = Question(lines, started_s + timeout_s)
        try:
            for line in lines:
                send = partial(make, line.part.index)
                question.request_ids.append(line.session.post(send, timeout_s=self._left_s))
                question.replies.append(None)
        except KVCellarError:
            self.drop(question)
            return None
        finally:
            self._spend(started_s)
        return question

    def collect(self, question: Question) -> tuple[Reply, ...] | None:
        """Return the reply of each line, or None while some may still come.

        Waits within the step's budget. What the replies grant is in the holdings before a
        heartbeat can miss it.

        Raises:
            TimeoutExpiredError: the deadline has passed; a late answer will be handed back.
            KVCellarError: a server refused, or a connection is gone; what the others answer is
                handed back.
        """
        return self._receive(question, may_wait=True)

    def look(self, question: Question) -> tuple[Reply, ...] | None:
        """Do as `collect`, but wait only where the engine has nothing else to do.

        For replies that may take as long as many steps.
        """
        return self._receive(question, may_wait=self._is_idle)

    def _receive(self, question: Question, *, may_wait: bool) -> tuple[Reply, ...] | None:
        replies = question.replies
        for place, line in enumerate(question.lines):
            if replies[place] is not None:
                continue
            started_s = self._clock.monotonic_s()
            try:
                reply = line.session.collect(
                    question.request_ids[place],
                    timeout_s=self._left_s if may_wait else 0.0,
                    record=partial(line.part.holdings.note, line.session),
                )
            except KVCellarError:
                self.drop(question)
                raise
            finally:
                self._spend(started_s)
            if reply is not None:
                replies[place] = reply
                line.part.link.note_answer()
        here = tuple(reply for reply in replies if reply is not None)
        if len(here) == len(replies):
            return here
        if self._clock.monotonic_s() >= question.deadline_s:
            for line, reply in zip(question.lines, replies, strict=True):
                if reply is None:
                    line.part.link.note_silence()
            self.drop(question)
            raise TimeoutExpiredError("the server did not answer in time")
        return None

    def insist(
        self, lines: Sequence[Line], make: Callable[[int, int], Request], *, timeout_s: float
    ) -> None:
        """Send a request and wait for all replies, however much the step's budget is.

        Raises:
            KVCellarError: a server refused or did not answer in time.

        Blocks for at most `timeout_s`, and leaves the step nothing.
        """
        self._left_s = timeout_s
        try:
            question = self.ask(lines, make, timeout_s=timeout_s)
            if question is None:
                raise PeerClosedError("it could not be sent")
            while self.collect(question) is None:
                pass
        finally:
            self._left_s = 0.0

    def drop(self, question: Question) -> None:
        """Stop waiting; whatever replies grant, now or when they come, is handed back."""
        asked = zip(question.lines, question.request_ids, question.replies, strict=False)
        for line, request_id, reply in asked:
            if reply is not None:
                self._hand_back(line, reply)
            else:
                line.session.forget(request_id, partial(self._hand_back, line))
                # An engine that falls idle reads no replies: with a heartbeat out the link does.
                line.part.link.poke()

    def release(self, line: Line, lease: int) -> None:
        """Give a lease back; 0 is none."""
        if lease:
            line.part.holdings.drop_lease(line.session, lease)
            self.tell(line, lambda id_: Release(id_, (lease,)))

    def cancel(self, line: Line, reservation: int) -> None:
        """Drop a reservation of which no rank was told; 0 is none."""
        if reservation:
            line.part.holdings.drop_reservation(line.session, reservation)
            self.tell(line, lambda id_: Cancel(id_, reservation))

    def tell(self, line: Line, make: Callable[[int], Request]) -> None:
        """Send what expects nothing, or drop it where that cannot be done at once."""
        try:
            line.session.forget(line.session.post(make, timeout_s=TELL_TIMEOUT_S))
        except (PeerClosedError, LimitError):
            return
        except TimeoutExpiredError:
            # Of a handle that is given back, a heartbeat that does not list it says the same.
            line.part.link.poke()

    def _spend(self, started_s: float) -> None:
        self._left_s = max(0.0, self._left_s - (self._clock.monotonic_s() - started_s))

    def _hand_back(self, line: Line, reply: Reply) -> None:
        # Runs on the link's thread as well: nothing here touches the budget.
        if isinstance(reply, LookupReply):
            self.release(line, reply.lease)
        elif isinstance(reply, ReserveReply):
            self.cancel(line, reply.reservation)
