"""Who may change anything over HTTP, or see tenants' salts.

Without an admin token only programs of this host may, and no page in a browser of this host that
came from elsewhere. With one, whoever has it and nobody else, wherever they are: then a proxy or a
container that makes everybody look local gives nothing away. Used by the pages.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from kvcellar.config.admin_token import read_admin_token
from kvcellar.errors import ConfigError
from kvcellar.server.http.bodies import RefusedError

__all__ = ["Admission"]

_SCHEME = "bearer"


class Admission:
    """Decides by each request."""

    def __init__(self, token_file: str | None = None) -> None:
        """Prepare.

        Args:
            token_file: `--admin-token-file`; None for loopback only.
        """
        self._token_file = token_file

    def check(self, request: HttpRequest) -> None:
        """Return if the request may change things.

        Raises:
            RefusedError: it may not (401, 403), or the token cannot be read now (503).
        """
        if self._token_file is not None:
            _require_token(request, self._token_file)
        else:
            _require_loopback(request)
            _require_no_foreign_page(request)


def _require_token(request: HttpRequest, token_file: str) -> None:
    try:
        token = read_admin_token(token_file)
    except ConfigError as error:
        raise RefusedError(503, f"nobody can be let in: {error}") from error
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Compared in a time that does not depend on where the two differ.
    if scheme.lower() != _SCHEME or not hmac.compare_digest(given.strip().encode(), token):
        raise RefusedError(
            401,
            "this needs the server's admin token: send the header 'Authorization: Bearer TOKEN'",
            {"WWW-Authenticate": "Bearer"},
        )


def _require_loopback(request: HttpRequest) -> None:
    host = request.client.host if request.client is not None else ""
    if not _is_loopback(host):
        raise RefusedError(
            403,
            f"only this host may change anything; {host} is another. Start the server with "
            "--admin-token-file to allow it from elsewhere",
        )


def _require_no_foreign_page(request: HttpRequest) -> None:
    """Refuse what a browser on this host sends for a page that came from elsewhere."""
    origin = request.headers.get("origin")
    if origin is not None and not _is_loopback(urlsplit(origin).hostname or ""):
        raise RefusedError(403, f"a page of {origin} may not change anything here")
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    # A name that a page had pointed at this host; a number cannot be pointed elsewhere.
    if not _is_loopback(host) and _address(host) is None:
        raise RefusedError(403, f"Host {host}: call localhost or an address of this host")


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
