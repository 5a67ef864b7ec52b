"""Who is at the other end of a Unix socket, by the kernel's word.

The server serves its own user, root, and those that `--client-uid` names; the client need not be
asked, because the kernel noted who connected.
"""

import socket
import struct
from dataclasses import dataclass

__all__ = ["Credentials", "peer_credentials"]

_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The peer when it connected; `pid` is 0 when it cannot be seen from this PID namespace."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the credentials of the process that connected a Unix socket.

    Raises:
        OSError: `sock` is no connected Unix socket.
    """
    return Credentials(
        *_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    )
