"""`lmcache ping`, `describe` and `kvcache clear`: one HTTP request each, as LMCache's own.

They take `--url`, because LMCache's do; `kvcellar ping`, `status` and `clear` go through the
engines' port instead. Called by `lmcache_cli`.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from kvcellar.config.flags import read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError, KVCellarError, PeerClosedError

__all__ = ["run_http_command"]

_TIMEOUT_S = 10.0
_URL = Setting("url", "--url", "URL", "Of the server's HTTP pages.", "", False, "")
_SUBJECTS = {"ping": ("kvcache", "engine"), "describe": ("kvcache",), "kvcache": ("clear",)}
_DEFAULT_URL = {"engine": "http://localhost:8000", "kvcache": "http://localhost:8080"}


def run_http_command(name: str, arguments: Sequence[str]) -> str:
    """Run one of the commands and return what it prints.

    Args:
        name: ping, describe or kvcache.
        arguments: what follows it.

    Raises:
        ConfigError: the command line is wrong.
        PeerClosedError: nobody answers at the URL.
        KVCellarError: the answer is an error.
    """
    subject = arguments[0] if arguments else ""
    if subject not in _SUBJECTS[name]:
        choices = " or ".join(_SUBJECTS[name])
        raise ConfigError(f"{subject!r} cannot be asked for; write lmcache {name} {choices}")
    given = read_flags(arguments[1:], (_URL,), program=f"lmcache {name} {subject}").given
    url = given.get("url", (_DEFAULT_URL.get(subject, ""),))[-1].rstrip("/")
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"--url {url or 'is missing'}: write http://localhost:8080")
    if name == "ping":
        _ask(url + ("/healthcheck" if subject == "kvcache" else "/health"))
        return f"{url} is healthy"
    if name == "describe":
        return json.dumps(json.loads(_ask(f"{url}/status")), indent=2)
    answer: dict[str, Any] = json.loads(_ask(f"{url}/cache/clear", body=b"{}"))
    return f"cleared {answer.get('chunks', 'all')} chunks at {url}"


def _ask(url: str, body: bytes | None = None) -> bytes:
    """Return the body of a successful answer.

    Raises:
        PeerClosedError: there is none.
        KVCellarError: the answer is an error; its text is the message.
    """
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310 - the scheme was checked.
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
