"""One short connection for a command: connect, ask, leave.

`kvcellar ping`, `status` and `clear` need no heartbeats and no second try: what fails is shown to
the user at once.
"""

import os

from kvcellar import __version__
from kvcellar.client.handshake import open_session
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.client.session import Session
from kvcellar.clock import Clock, SystemClock
from kvcellar.protocol.messages import Role

__all__ = ["connect_tool"]


def connect_tool(
    host: str, port: int | str, *, timeout_s: float = 5.0, clock: Clock | None = None
) -> Session:
    """Return a session of role tool; use it in a `with` statement, or close it.

    Blocks for at most three times `timeout_s`.

    Raises:
        ConfigError: `host` or `port` is none.
        KVCellarError: see `handshake.open_session`.
    """
    options = ClientOptions(host=host, port=port, connect_timeout_s=timeout_s)
    identity = Identity(Role.TOOL, instance_id="", software=f"kvcellar {__version__}")
    return open_session(options, identity, client_id=os.urandom(16), clock=clock or SystemClock())
