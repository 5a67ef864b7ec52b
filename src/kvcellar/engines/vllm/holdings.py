"""What the scheduler half holds at the server: leases and reservations, as heartbeats list them.

The link's own thread asks for the list while the engine's thread adds to it, so this is the one
place of the scheduler half with a lock. A lease ends with the session that granted it and is kept
with it. A reservation outlives its session, because ranks may be copying into its slots: it is kept
with the boot of the server and listed again after a reconnect, or the slots would be given away
under the copy.
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
        self._reservations: dict[tuple[bytes, int], float | None] = {}
        self._boot_id = b""

    def listed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the handles of leases on open sessions, and of reservations in use.

        Until a new boot has granted something, those of the boot before are listed to it: it has
        granted none of them and so ignores them.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._leases = {held for held in self._leases if held[0].is_open}
            self._reservations = {
                held: ended_s
                for held, ended_s in self._reservations.items()
                if ended_s is None or now_s - ended_s < ENDED_LISTED_S
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
                if session.boot_id != self._boot_id:
                    # A new boot counts from one again; what the last one granted is gone with it.
                    self._boot_id, self._reservations = session.boot_id, {}
                self._reservations[session.boot_id, reply.reservation] = None

    def drop_lease(self, session: Session, handle: int) -> None:
        """Forget a lease that is being given back."""
        with self._lock:
            self._leases.discard((session, handle))

    def drop_reservation(self, session: Session, handle: int) -> None:
        """Forget a reservation that is being cancelled."""
        with self._lock:
            self._reservations.pop((session.boot_id, handle), None)

    def end_reservation(self, session: Session, handle: int) -> None:
        """Note that every rank has reported a reservation; it is listed for a while longer."""
        with self._lock:
            if (session.boot_id, handle) in self._reservations:
                self._reservations[session.boot_id, handle] = self._clock.monotonic_s()

    def count(self) -> tuple[int, int]:
        """Return how many leases and how many unfinished reservations there are."""
        with self._lock:
            open_leases = sum(1 for session, _ in self._leases if session.is_open)
            open_reservations = sum(ended_s is None for ended_s in self._reservations.values())
        return open_leases, open_reservations
