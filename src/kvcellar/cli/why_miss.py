"""`kvcellar why-miss [REQUEST]`: why the last prompts, or one of them, did not hit.

The server remembers the last thousand lookups; this shows its conclusions and what they rest on.
Digests are cut to eight bytes; no token and no salt is shown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcellar.cli.asking import connect, read_asking
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError
from kvcellar.protocol.messages import Explain, Explained

__all__ = ["run"]

_LAST_MAX = 50
_NOTHING = (
    "no request like {!r} is remembered: it is too long ago, or its engine never asked (no server, "
    "a kv_role that does not load, a request that reads no cache): see the engine's log"
)
_LAST = Setting("last", "--last", "N", "How many requests, the newest first.", "", False, "10")


def run(arguments: Sequence[str]) -> int:
    """Print why requests missed; return 0, or 1 if the one that was named is not remembered.

    Raises:
        KVCellarError: the command line is wrong, or nobody answers.
    """
    named = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    flags = arguments[1:] if named else arguments
    asking = read_asking(flags, program="kvcellar why-miss [REQUEST]", more=(_LAST,))
    text = asking.more.get("last", "10")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LAST_MAX):
        raise ConfigError(f"--last {text}: write a number from 1 to {_LAST_MAX}")
    with connect(asking) as session:
        reply = session.call(lambda id_: Explain(id_, named, int(text)), timeout_s=asking.timeout_s)
    assert isinstance(reply, Explained), reply
    if asking.as_json:
        print(json.dumps(reply.misses, indent=2))
    elif not reply.misses:
        print(_NOTHING.format(named) if named else "no lookup missed lately")
    else:
        print(
            "\n".join(line for miss in reply.misses for line in _lines(miss, is_long=bool(named)))
        )
    return 1 if named and not reply.misses else 0


# Any: plain data of `server.misses.Miss`.
def _lines(miss: Mapping[str, Any], *, is_long: bool) -> Iterator[str]:
    yield (
        f"{miss['request']}  {miss['age_s']:.0f} s ago, {miss['hit_tokens']} of "
        f"{miss['tokens']} tokens found: {miss['reason']}"
    )
    yield f"  {miss['text']}"
    if is_long:
        yield f"  instance {miss['instance']}, model {miss['model'] or 'unknown'}"
        for name, value in miss["evidence"].items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name.replace('_', ' ')}: {shown}"
