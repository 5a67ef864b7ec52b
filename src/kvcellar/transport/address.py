"""The address that users write, taken apart.

The guide's configuration says `tcp://HOST` in one key and the port in another, sometimes as text;
people also write `HOST:PORT`, IPv6 literals with and without brackets, and mistakes. All of them
come through here, on the client's and on the server's side, so that a mistake is named before
anything is dialled.
"""

import ipaddress
import re
from dataclasses import dataclass

from kvcellar.errors import ConfigError

__all__ = ["TcpAddress", "parse_server_address"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST_NAME = re.compile(r"^(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?$")
_EXAMPLE = "write a host name or address, as in 'localhost', 'tcp://10.0.0.7' or '[::1]'"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where a server listens: a host name or an IP address without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_server_address(host: str, port: int | str, *, port_min: int = 1) -> TcpAddress:
    """Return the address that `host` and `port` name.

    Args:
        host: name or IP address; `tcp://` before it and the same port after it are accepted.
        port: number, or its decimal text.
        port_min: 0 where "any free port" makes sense, which is only where one listens.

    Raises:
        ConfigError: one of them is no such thing; the message names the field and the fix.

    Does not block: nothing is resolved.
    """
    number = _port_from(port, f"port={port!r}", port_min=port_min)
    if not isinstance(host, str):
        raise ConfigError(f"host={host!r} is not text: {_EXAMPLE}")
    name, port_in_host = _split(host)
    if port_in_host is not None:
        inner = _port_from(port_in_host, f"host={host!r}", port_min=port_min)
        if inner != number:
            raise ConfigError(
                f"host={host!r} says port {inner} but port={number}: "
                "leave the port out of the host, or set both to the same"
            )
    return TcpAddress(_checked_host(name, host), number)


def _split(host: str) -> tuple[str, str | None]:
    """Return the name without scheme and brackets, and the text of a port after it."""
    rest = host.strip()
    scheme = _SCHEME.match(rest)
    if scheme is not None:
        if scheme.group(1).lower() != "tcp":
            raise ConfigError(
                f"host={host!r} has the scheme {scheme.group(1)!r}: only tcp:// is dialled here"
            )
        rest = rest[scheme.end() :]
    rest = rest.removesuffix("/")
    if rest.startswith("["):
        name, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")) or ":" not in name:
            raise ConfigError(f"host={host!r} has odd brackets: write '[::1]' or '[::1]:5555'")
        return name, tail[1:] if tail else None
    if rest.count(":") == 1:
        name, _, tail = rest.partition(":")
        return name, tail
    return rest, None


def _checked_host(name: str, host: str) -> str:
    if name == "*":
        raise ConfigError(f"host={host!r}: write '0.0.0.0' or '::' for every interface")
    last_label = name.rstrip(".").rpartition(".")[2]
    if ":" in name or last_label.isdigit():
        try:
            return str(ipaddress.ip_address(name))
        except ValueError as error:
            raise ConfigError(f"host={host!r} is not an IP address: {_EXAMPLE}") from error
    if len(name) > 253 or _HOST_NAME.match(name) is None:
        raise ConfigError(f"host={host!r} is not a host: {_EXAMPLE}")
    return name


def _port_from(port: int | str, written: str, *, port_min: int) -> int:
    text = port.strip() if isinstance(port, str) else port
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 5:
        text = int(text)
    if isinstance(text, bool) or not isinstance(text, int) or not port_min <= text <= 65_535:
        raise ConfigError(
            f"{written} has no port: write a number from {port_min} to 65535, as in 5555"
        )
    return text
