"""`lmcache ping`, `describe`, `kvcache clear` and `quota`: one HTTP request each, as LMCache's own.

They take `--url`, because LMCache's do; `kvcellar ping`, `status`, `clear` and `quota` go through
the engines' port instead. Called by `lmcache_cli`.
"""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from kvcellar.config.admin_token import read_admin_token
from kvcellar.config.flags import read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError, KVCellarError, PeerClosedError

__all__ = ["run_http_command"]

_TIMEOUT_S = 10.0
_URL = Setting("url", "--url", "URL", "Of the server's HTTP pages.", "", False, "")
_TOKEN = Setting("token", "--admin-token-file", "FILE", "The server's.", "", False, "")
_LIMIT = Setting("limit", "--limit-gb", "GB", "What the tenant may hold.", "", True, "")
_SUBJECTS = {
    "ping": ("kvcache", "engine"),
    "describe": ("kvcache",),
    "kvcache": ("clear",),
    "quota": ("set", "get", "list", "delete"),
}
_SERVER_URL = "http://localhost:8080"


def run_http_command(name: str, arguments: Sequence[str]) -> str:
    """Run one of the commands and return what it prints.

    Args:
        name: ping, describe, kvcache or quota.
        arguments: what follows it.

    Raises:
        ConfigError: the command line is wrong.
        PeerClosedError: nobody answers at the URL.
        KVCellarError: the answer is an error.
    """
    subject = arguments[0] if arguments else ""
    if subject not in _SUBJECTS[name]:
        *most, last = _SUBJECTS[name]
        choices = " or ".join([*([", ".join(most)] if most else []), last])
        raise ConfigError(f"{subject!r} cannot be asked for; write lmcache {name} {choices}")
    command = f"{name} {subject}"
    rest = arguments[1:]
    if name == "quota":
        return _quota(command, rest)
    if name == "ping":
        default, page = {
            "kvcache": (_SERVER_URL, "/healthcheck"),
            "engine": ("http://localhost:8000", "/health"),
        }[subject]
        url, _ = _target(command, rest, default=default)
        _ask(url + page)
        return f"{url} is healthy"
    if name == "describe":
        url, _ = _target(command, rest, default=_SERVER_URL)
        return json.dumps(json.loads(_ask(f"{url}/status")), indent=2)
    url, given = _target(command, rest, more=(_TOKEN,))
    answer: dict[str, Any] = json.loads(
        _ask(f"{url}/cache/clear", method="POST", body=b"{}", token_file=given.get("token"))
    )
    return f"cleared {answer.get('chunks', 'all')} chunks at {url}"


def _quota(command: str, arguments: Sequence[str]) -> str:
    action = command.partition(" ")[2]
    path = "/quota"
    if action != "list":
        if not arguments or arguments[0].startswith("--"):
            raise ConfigError(f"{action} of which salt? write lmcache {command} SALT")
        path += "/" + urllib.parse.quote(arguments[0], safe="")
        arguments = arguments[1:]
    more = (_TOKEN, _LIMIT) if action == "set" else (_TOKEN,)
    url, given = _target(command, arguments, default=_SERVER_URL, more=more)
    body = None
    if action == "set":
        if "limit" not in given:
            raise ConfigError(f"--limit-gb is missing: write lmcache {command} SALT --limit-gb 10")
        body = json.dumps({"limit_gb": _number(given["limit"])}).encode()
    method = {"set": "PUT", "delete": "DELETE"}.get(action, "GET")
    answer = _ask(url + path, method=method, body=body, token_file=given.get("token"))
    return json.dumps(json.loads(answer), indent=2)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--limit-gb {text}: write a number of GB, as in --limit-gb 10")
    return number


def _target(
    command: str, arguments: Sequence[str], *, default: str = "", more: Sequence[Setting] = ()
) -> tuple[str, dict[str, str]]:
    """Return the URL, and the values of the other flags that were given."""
    flags = read_flags(arguments, (_URL, *more), program=f"lmcache {command}").given
    given = {field: texts[-1] for field, texts in flags.items()}
    url = given.pop("url", default).rstrip("/")
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"--url {url or 'is missing'}: write {_SERVER_URL}")
    return url, given


def _ask(
    url: str, *, method: str = "GET", body: bytes | None = None, token_file: str | None = None
) -> bytes:
    """Return the body of a successful answer.

    Raises:
        PeerClosedError: there is none.
        KVCellarError: the answer is an error; its text is the message.
    """
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {read_admin_token(token_file).decode()}"
    request = urllib.request.Request(url, data=body, headers=headers, method=method)  # noqa: S310 - the scheme was checked.
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise KVCellarError(f"{url} answered {error.code}: {text}") from error
    except (urllib.error.URLError, OSError) as error:
        raise PeerClosedError(
            f"nobody answers at {url} ({error}): is that the server's --http-host and --http-port?"
        ) from error
