"""`lmcache quota`: one HTTP request, as LMCache's own, with the server's token where it has one.

`kvcellar quota` goes through the engines' port instead. Called by `lmcache_cli`.
"""

import json
import math
import urllib.parse
from collections.abc import Sequence

from kvcellar.client.web import ask, checked_url
from kvcellar.config.flags import read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError

__all__ = ["run_quota"]

_URL = Setting("url", "--url", "URL", "Of the server's HTTP pages.", "", False, "")
_TOKEN = Setting("token", "--admin-token-file", "FILE", "The server's.", "", False, "")
_LIMIT = Setting("limit", "--limit-gb", "GB", "What the tenant may hold.", "", True, "")
_SERVER_URL = "http://localhost:8080"
_ACTIONS = ("set", "get", "list", "delete")


def run_quota(arguments: Sequence[str]) -> str:
    """Run `lmcache quota` and return what it prints.

    Args:
        arguments: what follows it.

    Raises:
        ConfigError: the command line is wrong.
        PeerClosedError: nobody answers at the URL.
        KVCellarError: the answer is an error.
    """
    action = arguments[0] if arguments else ""
    if action not in _ACTIONS:
        raise ConfigError(
            f"{action!r} cannot be asked for; write lmcache quota set, get, list or delete"
        )
    return _quota(f"quota {action}", arguments[1:])


def _quota(command: str, arguments: Sequence[str]) -> str:
    action = command.partition(" ")[2]
    path = "/quota"
    if action != "list":
        if not arguments or arguments[0].startswith("--"):
            raise ConfigError(f"{action} of which salt? write lmcache {command} SALT")
        path += "/" + urllib.parse.quote(arguments[0], safe="")
        arguments = arguments[1:]
    more = (_TOKEN, _LIMIT) if action == "set" else (_TOKEN,)
    url, given = _target(command, arguments, more=more)
    body = None
    if action == "set":
        if "limit" not in given:
            raise ConfigError(f"--limit-gb is missing: write lmcache {command} SALT --limit-gb 10")
        body = json.dumps({"limit_gb": _number(given["limit"])}).encode()
    method = {"set": "PUT", "delete": "DELETE"}.get(action, "GET")
    answer = ask(url + path, method=method, body=body, token_file=given.get("token"))
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
    command: str, arguments: Sequence[str], *, more: Sequence[Setting]
) -> tuple[str, dict[str, str]]:
    """Return the URL, and the values of the other flags that were given."""
    flags = read_flags(arguments, (_URL, *more), program=f"lmcache {command}").given
    given = {field: texts[-1] for field, texts in flags.items()}
    return checked_url(given.pop("url", _SERVER_URL), example=_SERVER_URL), given
