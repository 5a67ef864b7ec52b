"""Keeps a client connected: finds the server, beats, notices its end, finds the next one.

An engine must come up, run and stop whatever the server does, so all that waits happens on one
daemon thread, the keeper; the engine's threads look at `Link.session` and go on without the cache
when there is none. Used by both halves of the connector.
"""

import atexit
import os
import select
import threading
from collections.abc import Callable

from kvcellar.client.breaker import Breaker
from kvcellar.client.handshake import open_session
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.client.pulse import Counts, Held, Pulse
from kvcellar.client.session import Session
from kvcellar.clock import Clock
from kvcellar.errors import FatalError, KVCellarError, PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.messages import Goodbye, HeartbeatReply
from kvcellar.telemetry.logs import EventLog, OncePer

__all__ = ["Link"]

_LOG = EventLog("kvcellar.client")
_DELAY_FIRST_S = 0.05
_DELAY_MAX_S = 1.0
_GOODBYE_TIMEOUT_S = 0.2
_JOIN_TIMEOUT_S = 0.6
_COMPLAINT_INTERVAL_S = 300.0
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link:
    """A client of whatever server is at an address now.

    Every method may be called from any thread. A forked child has no session and needs a link of
    its own.

    Attributes:
        last_heartbeat: the newest reply of the present session, None before the first.
    """

    def __init__(
        self,
        options: ClientOptions,
        identity: Identity,
        *,
        clock: Clock,
        on_session: Callable[[Session], None] | None = None,
        held: Held | None = None,
    ) -> None:
        """Prepare; nothing is dialled before `start`.

        Args:
            options: where the server is and how patient to be.
            identity: who says hello.
            clock: for deadlines.
            on_session: is given each new session on the keeper's thread before anybody else sees
                it, and owns its arena. A new session has no leases, even if the server is the same
                one (same `boot_id`); reservations of the same server live on. It may call the
                session; while it runs nobody beats. If it raises, the session is dropped and the
                link tries again. Without it the link itself unmaps arenas.
            held: returns the leases and reservations in use; asked on the keeper's thread at each
                heartbeat. What it does not list is given back, except what was granted by a reply
                that no caller has recorded yet (see `Session.call`).
        """
        self.last_heartbeat: HeartbeatReply | None = None
        self._options = options
        self._identity = identity
        self._clock = clock
        self._on_session = on_session
        self._held = held
        self._counts: Counts | None = None
        self._client_id = os.urandom(16)
        self._breaker = Breaker()
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._wake_fd = -1
        self._is_poked = False
        self._failure = ""
        self._is_hopeless = False
        self._delay_s = _DELAY_FIRST_S
        self._complaints = OncePer(clock, _COMPLAINT_INTERVAL_S)

    @property
    def session(self) -> Session | None:
        """The live session; None while there is none or the server does not answer."""
        session = self._session
        if session is None or self._breaker.is_open or not session.is_open:
            return None
        return session

    def show_counts(self, counts: Counts) -> None:
        """Have heartbeats say what the client counts; asked on the keeper's thread."""
        self._counts = counts

    def start(self) -> None:
        """Begin to connect in the background; call it once. Returns at once."""
        assert self._thread is None, "the link was started already"
        self._pid = os.getpid()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvcellar-keeper", daemon=True)
        # The thread is a daemon, so that it can never keep a process alive; the goodbye is said
        # before the interpreter takes its threads away.
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye and disconnect, within a second; may be called twice.

        What the client held is free for others from now on: its copies must have ended before.
        """
        atexit.unregister(self.close)
        self._closing.set()
        thread, session = self._thread, self._session
        if thread is None:
            return
        if self._is_in_fork():
            # The connection and the thread are the parent's.
            if session is not None:
                session.close()
            return
        self._wake()
        with self._changed:
            self._changed.notify_all()
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive() and session is not None:
                session.close()

    def wait_ready(self, timeout_s: float) -> Session:
        """Return the session once it is connected and its first heartbeat is answered.

        For tools and tests: an engine never waits. Blocks for at most `timeout_s`.

        Raises:
            TimeoutExpiredError: it is not; the message has the last reason.
            PeerClosedError: the link is closed.
        """
        if self._is_in_fork():
            raise PeerClosedError("the link belongs to the process that this one was forked from")
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing.is_set() or self._ready_session() is not None, timeout_s
            )
            session = self._ready_session()
            if self._closing.is_set():
                raise PeerClosedError("the link is closed")
            if session is None:
                raise TimeoutExpiredError(
                    f"no server at {self._options.address} within {timeout_s:g} s"
                    + (f": {self._failure}" if self._failure else "")
                )
            return session

    def poke(self) -> None:
        """Have a heartbeat sent now, to learn sooner what changed at the server."""
        self._is_poked = True
        self._wake()

    def note_silence(self) -> None:
        """Note that the server let a deadline pass; the third in a row hides the session."""
        if self._breaker.note_silence():
            _LOG.warning("server does not answer, going on without it", address=self._address)
            self._wake()

    def note_answer(self) -> None:
        """Note that the server answered, on time or late."""
        if self._breaker.note_answer():
            _LOG.info("server answers again", address=self._address)

    @property
    def _address(self) -> str:
        return str(self._options.address)

    def _ready_session(self) -> Session | None:
        session = self._session
        is_ready = session is not None and session.is_open and self.last_heartbeat is not None
        return session if is_ready else None

    def _is_in_fork(self) -> bool:
        """Return whether another process started the link; its locks may be held for ever here."""
        return self._pid not in {0, os.getpid()}

    def _wake(self) -> None:
        """Wake the keeper from its wait on the sockets."""
        if self._is_in_fork():
            return
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # The rest runs on the keeper's thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._live_once()
            except KVCellarError as error:
                self._note_failure(error)
            except Exception as error:  # noqa: BLE001 - the keeper outlives what it was handed.
                if self._complaints.admit(type(error).__name__) is not None:
                    _LOG.error("keeper failed, trying on", exception=error, address=self._address)
                self._failure, self._is_hopeless = f"{type(error).__name__}: {error}", True
            self._closing.wait(self._next_delay_s())
        with self._changed:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _live_once(self) -> None:
        """Connect and stay connected until that ends; how it ended is the error."""
        session = open_session(
            self._options, self._identity, client_id=self._client_id, clock=self._clock
        )
        try:
            if self._on_session is not None and not self._closing.is_set():
                self._on_session(session)
            self._session = session
            self._beat(session)
        finally:
            with self._changed:
                self._session = None
                self.last_heartbeat = None
            session.close()
            if self._on_session is None and session.arena is not None:
                session.arena.close()

    def _beat(self, session: Session) -> None:
        """Exchange heartbeats until the link closes; a lost session is an error."""
        pulse = Pulse(
            session,
            clock=self._clock,
            heartbeat_s=self._options.heartbeat_s,
            held=self._held,
            breaker=self._breaker,
            counts=self._counts,
        )
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        session_fd = session.fileno()
        while not self._closing.is_set():
            if self._is_poked:
                self._is_poked = False
                pulse.hurry()
            wait_s = pulse.send_due()
            # Callers read their own replies; the keeper looks only when one of its own is due.
            poller.register(session_fd, _ENDED | (select.POLLIN if pulse.is_waiting else 0))
            events = dict(poller.poll(wait_s * 1000.0))
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
            if events.get(session_fd, 0) & _ENDED:
                session.drain()
            for reply in pulse.collect():
                self.note_answer()
                if isinstance(reply, HeartbeatReply):
                    self._note_heartbeat(session, reply)
            session.check_open()
        self._say_goodbye(session)

    def _note_heartbeat(self, session: Session, reply: HeartbeatReply) -> None:
        if self.last_heartbeat is None:
            welcome = session.welcome
            _LOG.info(
                "connected to server",
                address=self._address,
                node=welcome.node,
                boot_id=session.boot_id.hex(),
                chunk_tokens=welcome.chunk_tokens,
            )
            # Only a server that does its work ends the outage; one that hangs up after each
            # welcome must not be dialled in a storm or fill the log.
            self._delay_s = _DELAY_FIRST_S
            self._complaints = OncePer(self._clock, _COMPLAINT_INTERVAL_S)
            self._failure, self._is_hopeless = "", False
        with self._changed:
            self.last_heartbeat = reply
            self._changed.notify_all()

    def _say_goodbye(self, session: Session) -> None:
        try:
            session.call(Goodbye, timeout_s=_GOODBYE_TIMEOUT_S)
        except KVCellarError as error:
            _LOG.debug("goodbye was not answered", address=self._address, reason=error)

    def _note_failure(self, error: KVCellarError) -> None:
        self._failure, self._is_hopeless = str(error), isinstance(error, FatalError)
        if self._complaints.admit(error.code) is not None and not self._closing.is_set():
            _LOG.warning("no connection to server, trying on", address=self._address, reason=error)

    def _next_delay_s(self) -> float:
        """Return how long to wait before the next try, and double it for the one after."""
        delay_max_s = self._options.heartbeat_s
        if not self._is_hopeless:
            delay_max_s = min(delay_max_s, _DELAY_MAX_S)
        delay_s = min(self._delay_s, delay_max_s)
        self._delay_s = 2 * delay_s
        # Clients of one server lose it in the same moment and should not all dial in the same one.
        return delay_s * (0.75 + self._client_id[0] / 1024)
