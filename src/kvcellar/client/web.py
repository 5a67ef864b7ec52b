"""One HTTP request of a command: the answer's body, or an error that says what to check.

The standard library's client, so that the commands need nothing that a server does not have.
Used by the commands that take `--url`.
"""

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse

from kvcellar.config.admin_token import read_admin_token
from kvcellar.errors import ConfigError, KVCellarError, PeerClosedError

__all__ = ["ask", "checked_url", "stream"]

TIMEOUT_S = 10.0
_TEXT_MAX = 500


def checked_url(url: str, *, example: str) -> str:
    """Return a base URL without its last slash.

    Raises:
        ConfigError: it is none of HTTP.
    """
    url = url.rstrip("/")
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"--url {url or 'is missing'}: write {example}")
    return url


def ask(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    token_file: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> bytes:
    """Return the body of a successful answer; blocks for `timeout_s` between two of its bytes.

    Raises:
        PeerClosedError: there is none.
        KVCellarError: the answer is an error; its text is the message.
    """
    with _answer(url, method, body, token_file, timeout_s) as answer:
        try:
            content: bytes = answer.read()
        except (OSError, HTTPException) as error:
            raise PeerClosedError(f"{url} ended its answer half-way: {error}") from error
    return content


def stream(url: str, *, body: bytes, timeout_s: float) -> Iterator[dict[str, object]]:
    """Yield the events of a stream of JSON (`data: …` lines up to `[DONE]`), as they come.

    Raises:
        PeerClosedError: there is no answer, or it ends half-way.
        KVCellarError: the answer is an error; its text is the message.
    """
    with _answer(url, "POST", body, None, timeout_s) as answer:
        try:
            for line in answer:
                data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        except (OSError, HTTPException, ValueError) as error:
            raise PeerClosedError(f"{url} ended its answer half-way: {error}") from error


@contextlib.contextmanager
def _answer(
    url: str, method: str, body: bytes | None, token_file: str | None, timeout_s: float
) -> Iterator[HTTPResponse]:
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {read_admin_token(token_file).decode()}"
    request = urllib.request.Request(url, data=body, headers=headers, method=method)  # noqa: S310 - the scheme was checked.
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310 - as above.
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode("utf-8", "replace")[:_TEXT_MAX]
        raise KVCellarError(f"{url} answered {error.code}: {text}") from error
    except (urllib.error.URLError, OSError, HTTPException) as error:
        raise PeerClosedError(
            f"nobody answers at {url} ({error}): is that the server's --http-host and --http-port?"
        ) from error
    with answer:
        yield answer
