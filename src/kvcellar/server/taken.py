"""Who has the port that a server wanted: asked once, when it cannot start.

Two servers on one port is the commonest mistake on a host, so the message names the other one by
its process, node and release, or whatever else listens there.
"""

import contextlib

from kvcellar.client.tool import connect_tool
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.protocol.messages import Status, StatusReply
from kvcellar.transport.address import TcpAddress
from kvcellar.transport.holders import Holder, port_holder

__all__ = ["named"]

_TIMEOUT_S = 0.5
_ANYBODY = "another program"


def named(error: ConfigError, address: TcpAddress) -> ConfigError:
    """Return the error with the name of who has the port, where it can be had.

    Blocks for up to two seconds; nothing else is running yet.
    """
    text = str(error)
    if _ANYBODY not in text:
        return error
    holder = port_holder(address.port)
    name = _server(address, holder)
    if not name and holder is not None:
        name = f"pid {holder.pid} ({holder.command})"
    return ConfigError(text.replace(_ANYBODY, name)) if name else error


def _server(address: TcpAddress, holder: Holder | None) -> str:
    """Return the name of a kvcellar server that answers there."""
    with (
        contextlib.suppress(KVCellarError),
        connect_tool(address.host, address.port, timeout_s=_TIMEOUT_S) as session,
    ):
        reply = session.call(Status, timeout_s=_TIMEOUT_S)
        assert isinstance(reply, StatusReply), reply
        own = reply.status["kvcellar"]
        pid = f"pid {holder.pid}, " if holder is not None else ""
        return f"kvcellar {own['version']} ({pid}node {own['node']})"
    return ""
