"""What the commands that ask a server have in common: where it is, and how long to wait.

They go through the engines' port, so they need no HTTP, work while the HTTP process is away, and
are let in by the same rule as engines: the same user on the same host.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvcellar.client.session import Session
from kvcellar.client.tool import connect_tool
from kvcellar.config.flags import read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError, PeerClosedError, TimeoutExpiredError

__all__ = ["Asking", "connect", "read_asking"]

_FLAGS = (
    Setting(
        "host", "--host", "HOST", "Address of the server's engines' port.", "", False, "localhost"
    ),
    Setting("port", "--port", "PORT", "The server's --port.", "", False, "5555"),
    Setting("timeout", "--timeout", "SECONDS", "How long to wait for an answer.", "", False, "5"),
)
_JSON = Setting("json", "--json", "", "Print JSON, for other programs.", "", False, "")


class Asking(msgspec.Struct, frozen=True):
    """Whom to ask, and how.

    Attributes:
        host: of the server's TCP port.
        port: its text, checked when it is dialled.
        timeout_s: for connecting and for the answer.
        as_json: whether the answer is for a program.
        more: text by field, for the command's own flags that were given.
    """

    host: str
    port: str
    timeout_s: float
    as_json: bool
    more: Mapping[str, str]


def read_asking(arguments: Sequence[str], *, program: str, more: Sequence[Setting] = ()) -> Asking:
    """Return what a command line says.

    Args:
        arguments: what follows the command's name.
        program: the command, for its help.
        more: flags of its own.

    Raises:
        ConfigError: a flag is unknown or wrong.
    """
    given = read_flags(arguments, (*more, *_FLAGS, _JSON), program=program).given
    text = given.get("timeout", ("5",))[-1]
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s <= 3600.0:
        raise ConfigError(f"--timeout {text}: write seconds, more than 0 and at most 3600")
    return Asking(
        host=given.get("host", ("localhost",))[-1],
        port=given.get("port", ("5555",))[-1],
        timeout_s=timeout_s,
        as_json="json" in given,
        more={own.field: given[own.field][-1] for own in more if own.field in given},
    )


def connect(asking: Asking) -> Session:
    """Return a session with the server; the caller closes it.

    Raises:
        KVCellarError: it cannot be had; the message names the address and the fix.
    """
    try:
        return connect_tool(asking.host, asking.port, timeout_s=asking.timeout_s)
    except (PeerClosedError, TimeoutExpiredError) as error:
        address = f"{asking.host}:{asking.port}"
        if address in str(error):
            raise
        raise type(error)(f"{address}: {error}") from error
