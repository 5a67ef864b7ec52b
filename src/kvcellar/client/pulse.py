"""The regular exchanges on one session: heartbeats, and pings while the breaker is open.

A heartbeat tells the server what the client still uses and brings back what changed there. At most
one is without a reply at any time, and none of this ever holds up a caller: sending and reading
take no time, whatever the server does. While the server's arena grows, a client that has mapped it
beats more often: what it does not know to hold memory it does not prepare for copies. Driven by the
link's keeper thread alone.
"""

from collections.abc import Callable, Collection, Mapping

from kvcellar.client.breaker import Breaker
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.errors import MalformedError, TimeoutExpiredError
from kvcellar.protocol.messages import Heartbeat, HeartbeatReply, Ping, Pong, Reply

__all__ = ["Counts", "Held", "Pulse"]

Held = Callable[[], tuple[Collection[int], Collection[int]]]
"""Returns the leases and the reservations that are in use."""
Counts = Callable[[], Mapping[str, int]]
"""Returns what the client counts, by name."""

_PING_PAUSE_S = 0.25
_RETRY_S = 0.05
_GROWTH_S = 0.1
"""A growth step of a GiB takes some tenths of a second."""


class Pulse:
    """When to say what on one session, and what came back."""

    def __init__(
        self, session: Session, *, clock: Clock, heartbeat_s: float, held: Held | None,
        breaker: Breaker, counts: Counts | None = None,
    ) -> None:  # fmt: skip
        self._session = session
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._held = held
        self._counts = counts
        self._breaker = breaker
        self._beat_id: int | None = None
        self._next_beat_s = clock.monotonic_s()
        self._ping_id: int | None = None
        self._next_ping_s: float | None = None
        self._steps_ready = -1
        self._pause_s = heartbeat_s

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is due; then call `collect` when the socket can be read."""
        return self._beat_id is not None or self._ping_id is not None

    def hurry(self) -> None:
        """Make the next heartbeat due now."""
        self._next_beat_s = self._clock.monotonic_s()

    def send_due(self) -> float:
        """Send what is due and return the seconds until this should be called again.

        Raises:
            PeerClosedError: the session is lost.
        """
        now_s = self._clock.monotonic_s()
        waits_s = [self._heartbeat_s]
        if self._beat_id is None:
            if now_s >= self._next_beat_s:
                self._beat_id = self._post(self._heartbeat())
                wait_s = self._pause_s if self._beat_id is not None else self._retry_s()
                self._next_beat_s = now_s + wait_s
            waits_s.append(self._next_beat_s - now_s)
        if not self._breaker.is_open:
            self._next_ping_s = None
        elif self._ping_id is None:
            if self._next_ping_s is None:
                self._next_ping_s = now_s + min(_PING_PAUSE_S, self._heartbeat_s)
            if now_s >= self._next_ping_s:
                self._ping_id = self._post(Ping)
                self._next_ping_s = now_s + self._retry_s()
            waits_s.append(self._next_ping_s - now_s)
        return max(0.0, min(waits_s))

    def collect(self) -> list[HeartbeatReply | Pong]:
        """Take what has come, without waiting.

        Raises:
            MalformedError: the server answered with something else.
            KVCellarError: it refused, or the session is lost.
        """
        beat, self._beat_id = self._take(self._beat_id)
        pong, self._ping_id = self._take(self._ping_id)
        replies: list[HeartbeatReply | Pong] = []
        for reply, kind in ((beat, HeartbeatReply), (pong, Pong)):
            if reply is None:
                continue
            if not isinstance(reply, kind) or reply.boot_id != self._session.boot_id:
                raise MalformedError(f"the server answered a heartbeat or ping with {reply}")
            replies.append(reply)
            if isinstance(reply, HeartbeatReply):
                self._note_growth(reply.steps_ready)
        return replies

    def _note_growth(self, steps_ready: int) -> None:
        """Have the next heartbeat sent soon while the arena grows, and later if it stands still."""
        arena, step_bytes = self._session.arena, self._session.welcome.step_bytes
        if arena is None or steps_ready * step_bytes >= arena.size_bytes:
            self._pause_s = self._heartbeat_s
            return
        pause_s = _GROWTH_S if steps_ready > self._steps_ready else 2 * self._pause_s
        self._steps_ready, self._pause_s = steps_ready, min(pause_s, self._heartbeat_s)
        self._next_beat_s = min(self._next_beat_s, self._clock.monotonic_s() + self._pause_s)

    def _take(self, request_id: int | None) -> tuple[Reply | None, int | None]:
        """Return the reply to a request and the id that is still due, at most one of them."""
        if request_id is None:
            return None, None
        reply = self._session.collect(request_id, timeout_s=0.0)
        return reply, request_id if reply is None else None

    def _heartbeat(self) -> Callable[[int], Heartbeat]:
        # What was seen comes first: whatever is granted and noted after this line has a higher id
        # and is spared, and whatever has a lower one is noted already.
        seen = self._session.seen()
        leases, reservations = self._held() if self._held is not None else ((), ())
        counts = dict(self._counts()) if self._counts is not None else {}
        return lambda request_id: Heartbeat(
            request_id, tuple(leases), tuple(reservations), seen, counts
        )

    def _post(self, make: Callable[[int], Heartbeat | Ping]) -> int | None:
        """Send if that takes no time; None when a caller or a full socket is in the way."""
        try:
            return self._session.post(make, timeout_s=0.0)
        except TimeoutExpiredError:
            return None

    def _retry_s(self) -> float:
        return min(_RETRY_S, self._heartbeat_s)
