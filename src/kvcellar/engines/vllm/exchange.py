"""Questions to the server that never hold up a step for longer than its budget.

All hooks of one scheduler step share a millisecond of waiting. Within it a question is answered
inside the hook; beyond it the answer is collected in a later step; past its deadline it is
forgotten, and what a late answer grants is handed back by whichever thread meets it. Used by the
scheduler half for everything that it says to the server.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.client.link import Link
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.engines.vllm.holdings import Holdings
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


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """A request that was sent and whose reply is still wanted."""

    session: Session
    request_id: int
    deadline_s: float


class Exchange:
    """The scheduler half's side of the conversation; used by the engine's thread alone."""

    def __init__(self, link: Link, holdings: Holdings, *, clock: Clock) -> None:
        self._link = link
        self._holdings = holdings
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
        self, session: Session, make: Callable[[int], Request], *, timeout_s: float
    ) -> Question | None:
        """Send a request whose reply will be collected; None when it cannot be sent now.

        Args:
            session: a session of the link.
            make: makes the request from its id.
            timeout_s: how long the reply is worth waiting for, over any number of steps.

        Blocks only while the socket is full, within the step's budget.
        """
        started_s = self._clock.monotonic_s()
        try:
            request_id = session.post(make, timeout_s=self._left_s)
        except KVCellarError:
            return None
        finally:
            self._spend(started_s)
        return Question(session, request_id, started_s + timeout_s)

    def collect(self, question: Question) -> Reply | None:
        """Return the reply, or None while it may still come; waits within the step's budget.

        What the reply grants is in the holdings before a heartbeat can miss it.

        Raises:
            TimeoutExpiredError: the deadline has passed; a late answer will be handed back.
            KVCellarError: the server refused, or the connection is gone.
        """
        return self._receive(question, self._left_s)

    def look(self, question: Question) -> Reply | None:
        """Do as `collect`, but wait only where the engine has nothing else to do.

        For replies that may take as long as many steps.
        """
        return self._receive(question, self._left_s if self._is_idle else 0.0)

    def _receive(self, question: Question, timeout_s: float) -> Reply | None:
        session = question.session
        started_s = self._clock.monotonic_s()
        try:
            reply = session.collect(
                question.request_id,
                timeout_s=timeout_s,
                record=lambda reply: self._holdings.note(session, reply),
            )
        finally:
            self._spend(started_s)
        if reply is not None:
            self._link.note_answer()
            return reply
        if self._clock.monotonic_s() >= question.deadline_s:
            self._link.note_silence()
            self.drop(question)
            raise TimeoutExpiredError("the server did not answer in time")
        return None

    def drop(self, question: Question) -> None:
        """Stop waiting; whatever the reply grants when it comes is handed back."""
        session = question.session
        session.forget(question.request_id, lambda reply: self._hand_back(session, reply))
        # An engine that falls idle reads no replies: with a heartbeat out the link does.
        self._link.poke()

    def release(self, session: Session, lease: int) -> None:
        """Give a lease back; 0 is none."""
        if lease:
            self._holdings.drop_lease(session, lease)
            self.tell(session, lambda id_: Release(id_, (lease,)))

    def cancel(self, session: Session, reservation: int) -> None:
        """Drop a reservation of which no rank was told; 0 is none."""
        if reservation:
            self._holdings.drop_reservation(session, reservation)
            self.tell(session, lambda id_: Cancel(id_, reservation))

    def tell(self, session: Session, make: Callable[[int], Request]) -> None:
        """Send what expects nothing, or drop it where that cannot be done at once."""
        try:
            session.forget(session.post(make, timeout_s=TELL_TIMEOUT_S))
        except (PeerClosedError, LimitError):
            return
        except TimeoutExpiredError:
            # Of a handle that is given back, a heartbeat that does not list it says the same.
            self._link.poke()

    def _spend(self, started_s: float) -> None:
        self._left_s = max(0.0, self._left_s - (self._clock.monotonic_s() - started_s))

    def _hand_back(self, session: Session, reply: Reply) -> None:
        # Runs on the link's thread as well: nothing here touches the budget.
        if isinstance(reply, LookupReply):
            self.release(session, reply.lease)
        elif isinstance(reply, ReserveReply):
            self.cancel(session, reply.reservation)
