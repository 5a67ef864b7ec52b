"""What the scheduler half holds at the server: leases and reservations, as heartbeats list them.

The link's own thread asks for the list while the engine's thread adds to it, so this is the one
place of the scheduler half with a lock. A handle means something only on the session that granted
it (a new boot of the server gives the same numbers to others), so each is kept with its session.
"""

import threading

from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.protocol.messages import LookupReply, Reply, ReserveReply

__all__ = ["Holdings"]

ENDED_LISTED_S = 30.0
"""How long a reservation is listed after every rank reported it: a rank reports when its copy is
out of the engine, and its commit may still lie unread in the socket of a server that stands."""


class Holdings:
    """Leases and reservations by session and handle; thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: set[tuple[Session, int]] = set()
        self._reservations: dict[tuple[Session, int], float | None] = {}

    def listed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the handles of leases and reservations in use on sessions that are open."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._leases = {held for held in self._leases if held[0].is_open}
            self._reservations = {
                held: ended_s
                for held, ended_s in self._reservations.items()
                if held[0].is_open and (ended_s is None or now_s - ended_s < ENDED_LISTED_S)
            }
            leases = tuple(handle for _, handle in self._leases)
            reservations = tuple(handle for _, handle in self._reservations)
        return leases, reservations

    def note(self, session: Session, reply: Reply) -> None:
        """Add what a reply grants, if it grants anything."""
        with self._lock:
            if isinstance(reply, LookupReply) and reply.lease:
                self._leases.add((session, reply.lease))
            elif isinstance(reply, ReserveReply) and reply.reservation:
                self._reservations[session, reply.reservation] = None

    def drop_lease(self, session: Session, handle: int) -> None:
        """Forget a lease that is being given back."""
        with self._lock:
            self._leases.discard((session, handle))

    def drop_reservation(self, session: Session, handle: int) -> None:
        """Forget a reservation that is being cancelled."""
        with self._lock:
            self._reservations.pop((session, handle), None)

    def end_reservation(self, session: Session, handle: int) -> None:
        """Note that every rank has reported a reservation; it is listed for a while longer."""
        with self._lock:
            if (session, handle) in self._reservations:
                self._reservations[session, handle] = self._clock.monotonic_s()

    def count(self) -> tuple[int, int]:
        """Return how many leases and how many unfinished reservations there are."""
        with self._lock:
            open_leases = sum(1 for session, _ in self._leases if session.is_open)
            open_reservations = sum(
                1
                for (session, _), ended_s in self._reservations.items()
                if session.is_open and ended_s is None
            )
        return open_leases, open_reservations
