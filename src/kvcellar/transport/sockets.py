"""Dial and listen: Unix sockets (a path or an abstract address) and TCP.

The node's traffic runs over Unix sockets, because only they pass descriptors and name the peer;
TCP is the door that users know and leads there. The client library dials, the server listens; what
the operating system reports is turned into kvcellar's own errors here.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator

from kvcellar.errors import ConfigError, PeerClosedError
from kvcellar.transport.address import TcpAddress

__all__ = ["dial_tcp", "dial_unix", "listen_tcp", "listen_unix", "unix_socket_name"]

_BACKLOG = 512
_UNIX_NAME_MAX = 107
_LOCALHOST = (
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET6, "::1"),
)
_EVERYWHERE = (
    (socket.AF_INET6, "::"),
    (socket.AF_INET, "0.0.0.0"),  # noqa: S104 - the user wrote '::', which means this too.
)
_NO_SUCH_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


def unix_socket_name(address: str) -> str:
    """Return `address` as the kernel takes it: "@name" is abstract, anything else a path.

    Raises:
        ConfigError: it is empty or longer than the kernel allows.
    """
    size_bytes = len(os.fsencode(address))
    if address in {"", "@"} or "\0" in address or size_bytes > _UNIX_NAME_MAX:
        raise ConfigError(
            f"socket address {address!r} has {size_bytes} bytes; Unix sockets take 1 to "
            f"{_UNIX_NAME_MAX}: choose a shorter --socket-dir"
        )
    return "\0" + address[1:] if address.startswith("@") else address


def listen_unix(address: str) -> socket.socket:
    """Listen on a Unix socket and return it, non-blocking.

    A path whose owner died is taken over; one on which somebody answers is not. The caller owns
    the socket and, for a path, unlinks it at the end; its folder must exist.

    Raises:
        ConfigError: the address is taken, no socket, too long, or may not be made there.
    """
    name = unix_socket_name(address)
    if not name.startswith("\0"):
        _remove_stale(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on the Unix socket {address}: {reason}") from error
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode  # noqa: PTH116 - a path may be '@'-like.
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way and is no socket: remove it or choose another")
    try:
        dial_unix(path, timeout_s=1.0).close()
    except PeerClosedError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
            os.unlink(path)  # noqa: PTH108 - as above.
            return
    raise ConfigError(f"another server answers on {path}: stop it or choose another port")


def dial_unix(address: str, *, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket and return it, blocking without a timeout.

    Blocks for at most `timeout_s`; a listener whose queue is full counts as not there.

    Raises:
        PeerClosedError: nobody listens there, or not for us.
        ConfigError: `address` is no socket address.
    """
    name = unix_socket_name(address)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(name)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise PeerClosedError(f"cannot reach the Unix socket {address}: {error}") from error
    return connection


def listen_tcp(address: TcpAddress) -> list[socket.socket]:
    """Listen on TCP and return the sockets, non-blocking: one for each local address.

    'localhost' means both loopback addresses and '::' every address of both families; a family
    that the machine lacks is left out. With port 0 only the first address is used, since the
    port is the kernel's choice. The caller owns the sockets.

    Raises:
        ConfigError: the port is taken, or the host is not one of this machine.
    """
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, host in _resolved(address, passive=True):
            try:
                listeners.append(_listen_on(family, (host, address.port)))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    raise
                missing = error
            if listeners and address.port == 0:
                break
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {address.port} on {address.host} is taken by another program: "
                "stop it or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    if not listeners:
        raise ConfigError(
            f"cannot listen on {address}: {missing}; choose a --host of this machine"
        ) from missing
    return listeners


def _listen_on(family: socket.AddressFamily, name: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def dial_tcp(address: TcpAddress, *, timeout_s: float) -> socket.socket:
    """Connect to a server's TCP door and return the socket, blocking without a timeout.

    Blocks for at most `timeout_s` over all of the host's addresses, and for as long as the
    system's resolver takes when the host is a name other than 'localhost'.

    Raises:
        PeerClosedError: nobody answers there; the message names the address and the reason.
    """
    try:
        candidates = list(_resolved(address, passive=False))
    except OSError as error:
        raise PeerClosedError(f"cannot resolve the host of {address}: {error}") from error
    reason: OSError | None = None
    for family, host in candidates:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(timeout_s / len(candidates))
            connection.connect((host, address.port))
            connection.settimeout(None)
        except OSError as error:
            if connection is not None:
                connection.close()
            # The first refusal is the one to report: later ones say that a family is missing.
            reason = reason or error
        else:
            return connection
    raise PeerClosedError(f"cannot reach {address}: {reason}") from reason


def _resolved(address: TcpAddress, *, passive: bool) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Yield the families and numeric addresses of a host, each once."""
    if address.host == "localhost":
        yield from _LOCALHOST
        return
    if address.host == "::" and passive:
        yield from _EVERYWHERE
        return
    flags = socket.AI_PASSIVE if passive else 0
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    seen: set[tuple[socket.AddressFamily, str]] = set()
    for family, _, _, _, name in found:
        candidate = (family, str(name[0]))
        if candidate not in seen:
            seen.add(candidate)
            yield candidate
