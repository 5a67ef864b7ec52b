"""Commits and aborts that the server must learn of, until it has answered.

A reserved slot is the server's again only when each rank has said what became of it, so a commit
or an abort that a broken connection or a frozen server swallowed is said again. It counts once
there, whoever hears it twice. A new life of the server knows none of the old reservations. Filled
by the step's thread and the store lane, sent by the store lane.
"""

import threading
from collections.abc import Callable

from kvcellar.client.link import Link
from kvcellar.client.session import Session
from kvcellar.errors import (
    KVCellarError,
    NotRegisteredError,
    PeerClosedError,
    TimeoutExpiredError,
)
from kvcellar.protocol.messages import Abort, Commit, Request
from kvcellar.telemetry.logs import EventLog

__all__ = ["ANSWER_TIMEOUT_S", "Settlements"]

ANSWER_TIMEOUT_S = 2.0
"""How long the store lane waits for one answer."""
_PENDING_MAX = 4096
_LOG = EventLog("vllm.kvcellar.settlements")

_Make = Callable[[int], Request]


class Settlements:
    """What one rank has to say about its reservations; thread-safe."""

    def __init__(self, link: Link, *, shard: int) -> None:
        self._link = link
        self._shard = shard
        self._lock = threading.Lock()
        self._pending: dict[tuple[bytes, int], _Make] = {}

    @property
    def count(self) -> int:
        """How many are not settled."""
        return len(self._pending)

    def commit(self, boot_id: bytes, reservation: int, *, seals: bytes, copy_s: float) -> None:
        """Note that this rank's shards are in their slots."""
        self._note(
            boot_id, reservation, lambda id_: Commit(id_, reservation, self._shard, seals, copy_s)
        )

    def abort(self, boot_id: bytes, reservation: int) -> None:
        """Note that this rank does not write its slots, or not any more."""
        self._note(boot_id, reservation, lambda id_: Abort(id_, reservation, self._shard))

    def send(self) -> None:
        """Say what is pending to the server of that life; called on one thread.

        Blocks for at most `ANSWER_TIMEOUT_S` an answer, and stops at the first that does not come.
        """
        session = self._link.session
        if session is None:
            return
        with self._lock:
            pending = list(self._pending.items())
        for (boot_id, reservation), make in pending:
            if boot_id == session.boot_id and not self._say(session, make):
                return
            with self._lock:
                self._pending.pop((boot_id, reservation), None)

    def _note(self, boot_id: bytes, reservation: int, make: _Make) -> None:
        with self._lock:
            if len(self._pending) >= _PENDING_MAX:
                # The server bounds reservations far below this: these are of lives long gone.
                del self._pending[next(iter(self._pending))]
            self._pending[boot_id, reservation] = make

    def _say(self, session: Session, make: _Make) -> bool:
        """Return whether the server answered, whatever it said."""
        try:
            session.call(make, timeout_s=ANSWER_TIMEOUT_S)
        except TimeoutExpiredError:
            self._link.note_silence()
            return False
        except PeerClosedError:
            return False
        except NotRegisteredError:
            # The reservation is over already: cleared, or this is heard for the second time.
            pass
        except KVCellarError as error:
            _LOG.warning("store was refused", reason=str(error))
        self._link.note_answer()
        return True
