"""Learn of a client's end from the kernel, and from nothing else.

A pidfd becomes readable when its process ends, however it ends and whoever else holds its sockets
open. The death is acted on a moment later, so that what the process had sent before (its last
commit, its goodbye) is read first.
"""

import asyncio
import os
from collections.abc import Callable

from kvcellar.errors import MismatchError
from kvcellar.server.instances import Client
from kvcellar.transport.credentials import Credentials
from kvcellar.transport.pidfd import is_pidfd, open_pidfd

__all__ = ["DeathWatch", "pidfd_of_peer"]

GRACE_S = 0.02
"""What a dead process had sent is read within this time."""


class DeathWatch:
    """Watches the pidfds of clients on the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def watch(self, client: Client, on_death: Callable[[Client], None]) -> None:
        """Call `on_death` when the client's process ends; `unwatch` closes its pidfd."""
        if client.pidfd is not None:
            self._loop.add_reader(client.pidfd, self._ended, client, on_death)

    def unwatch(self, client: Client) -> None:
        """Stop watching, and close the pidfd; may be called twice."""
        if client.pidfd is not None:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = None

    def _ended(self, client: Client, on_death: Callable[[Client], None]) -> None:
        assert client.pidfd is not None
        self._loop.remove_reader(client.pidfd)
        self._loop.call_later(GRACE_S, self._act, client, on_death)

    def _act(self, client: Client, on_death: Callable[[Client], None]) -> None:
        # Without a pidfd it has been forgotten meanwhile, by its goodbye.
        if client.pidfd is not None:
            on_death(client)


def pidfd_of_peer(fds: list[int], credentials: Credentials) -> int:
    """Return a pidfd of the process at the other end.

    The descriptor that came with the hello is right in every PID namespace; where the client's
    kernel has none, one is opened from the pid that the socket knows.

    Args:
        fds: what came with the hello; all but the returned one stay the caller's to close.
        credentials: of the socket's peer.

    Raises:
        MismatchError: there is no way to learn of its end.
    """
    for fd in fds:
        if is_pidfd(fd):
            fds.remove(fd)
            return fd
    pidfd = open_pidfd(credentials.pid) if credentials.pid > 0 else None
    if pidfd is None:
        raise MismatchError(
            "the end of this process cannot be watched from the server: use Linux 5.3 or later on "
            "both sides, or share the PID namespace"
        )
    return pidfd
