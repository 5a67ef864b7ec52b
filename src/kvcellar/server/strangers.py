"""Peers that never get a welcome: told why if they can be, logged now and then, counted always.

Whoever knocks on the wrong door (LMCache's own connector, a browser, another user) should be
found in the log with what to set; whoever knocks a thousand times a second should not fill it.
Used by the TCP door and by the Unix socket's handshakes.
"""

import msgspec

from kvcellar.clock import Clock
from kvcellar.errors import KVCellarError, MismatchError
from kvcellar.protocol.frames import explain_foreign
from kvcellar.protocol.messages import PROTOCOL_VERSION
from kvcellar.server.meters import Meters
from kvcellar.telemetry.logs import EventLog, OncePer

__all__ = ["FOREIGN_BYTES", "Strangers", "raise_if_other_version", "request_id_of"]

FOREIGN_BYTES = 8
"""So many first bytes tell what a peer speaks."""

_INTERVAL_S = 60.0
_EXPLAINED_MAX_BYTES = 65_536

_log = EventLog("kvcellar.server")


class Strangers:
    """Counts and logs refused peers."""

    def __init__(self, meters: Meters, clock: Clock) -> None:
        self._meters = meters
        self._once = OncePer(clock, _INTERVAL_S)

    def foreign(self, first_bytes: bytes, *, peer: str) -> None:
        """Note a peer of another protocol."""
        self._note("foreign", explain_foreign(first_bytes.ljust(FOREIGN_BYTES)), peer=peer)

    def refused(self, error: KVCellarError, *, peer: str) -> None:
        """Note a peer that was answered with an error."""
        self._note(error.code, str(error), peer=peer)

    def silent(self, *, peer: str) -> None:
        """Note a peer that did not say hello in time."""
        self._note("silent", "no hello in time", peer=peer)

    def crowded_out(self, *, peer: str) -> None:
        """Note a peer that waited with its hello while others came."""
        self._note("crowded_out", "too many connections without a hello", peer=peer)

    def left(self) -> None:
        """Note a peer that went before it had said hello: a port scan, a probe."""
        self._meters.peers_refused["left"] += 1

    def _note(self, reason: str, text: str, *, peer: str) -> None:
        self._meters.peers_refused[reason] += 1
        held_back = self._once.admit(f"{reason} {text[:64]}")
        if held_back is not None:
            _log.warning("peer refused", reason=text, peer=peer, like_it_in_last_minute=held_back)


def raise_if_other_version(body: bytes) -> None:
    """Say so when a message that cannot be read comes from another protocol version.

    Every version begins `locate` and `hello` with its name, the id and the version.

    Raises:
        MismatchError: it does; both versions are named.
    """
    parts = _parts_of(body)
    if len(parts) < 3 or parts[0] not in ("hello", "locate"):
        return
    version = parts[2]
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        raise MismatchError(
            f"the client speaks protocol version {version}, this server speaks "
            f"{PROTOCOL_VERSION}: install the same kvcellar on both sides"
        )


def request_id_of(body: bytes) -> int:
    """Return the id of a message that cannot be read as a whole, 0 where it has none."""
    parts = _parts_of(body)
    found = parts[1] if len(parts) > 1 else 0
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _parts_of(body: bytes) -> list[object]:
    """Return the places of any version's message, none if it is not even msgpack."""
    if len(body) > _EXPLAINED_MAX_BYTES:
        return []
    try:
        return msgspec.msgpack.decode(body, type=list[object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
