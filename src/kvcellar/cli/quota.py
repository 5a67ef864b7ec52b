"""`kvcellar quota`: set, show, list and remove what a tenant may hold.

A tenant is a `cache_salt`, `_default` the one without. The server's own user needs no token: it
goes through the engines' port, which knows who asks.
"""

import json
import math
from collections.abc import Sequence

from kvcellar.cli.asking import connect, read_asking
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError
from kvcellar.protocol.messages import QuotaList, Quotas, SetQuota
from kvcellar.protocol.quotas import QuotaFacts
from kvcellar.tenancy.names import label_of, shown_name, tenant_of
from kvcellar.units import GIB, format_bytes

__all__ = ["run"]

_USAGE = "write quota set SALT --limit-gb GB, quota get SALT, quota list or quota delete SALT"
_LIMITS = (
    Setting("limit", "--limit-gb", "GB", "What it may hold in memory.", "", True, ""),
    Setting(
        "disk_limit", "--disk-limit-gb", "GB", "And on each disk; else as much.", "", False, ""
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Run one of the four and return 0.

    Raises:
        KVCellarError: the command line is wrong, nobody answers, or the server keeps no quotas.
    """
    action = arguments[0] if arguments else ""
    rest = arguments[1:]
    if action in {"-h", "--help"}:
        read_asking(["--help"], program="kvcellar quota set|get|list|delete", more=_LIMITS)
    if action == "list":
        return _print_list(rest)
    if action not in {"set", "get", "delete"}:
        raise ConfigError(f"{action or 'nothing'!r} cannot be done: {_USAGE}")
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{action} of which salt? {_USAGE}")
    tenant = tenant_of(rest[0])
    act = {"set": _set, "get": _get, "delete": _delete}[action]
    return act(tenant, rest[1:])


def _set(tenant: str, flags: Sequence[str]) -> int:
    asking = read_asking(flags, program="kvcellar quota set SALT", more=_LIMITS)
    limit_bytes = _bytes("--limit-gb", asking.more.get("limit"))
    disk_limit = asking.more.get("disk_limit")
    disk_limit_bytes = None if disk_limit is None else _bytes("--disk-limit-gb", disk_limit)
    with connect(asking) as session:
        session.call(
            lambda id_: SetQuota(id_, tenant, limit_bytes, disk_limit_bytes),
            timeout_s=asking.timeout_s,
        )
        reply = session.call(lambda id_: Quotas(id_, tenant), timeout_s=asking.timeout_s)
    return _print_one(reply, as_json=asking.as_json)


def _get(tenant: str, flags: Sequence[str]) -> int:
    asking = read_asking(flags, program="kvcellar quota get SALT")
    with connect(asking) as session:
        reply = session.call(lambda id_: Quotas(id_, tenant), timeout_s=asking.timeout_s)
    return _print_one(reply, as_json=asking.as_json)


def _delete(tenant: str, flags: Sequence[str]) -> int:
    asking = read_asking(flags, program="kvcellar quota delete SALT")
    with connect(asking) as session:
        reply = session.call(lambda id_: SetQuota(id_, tenant, None), timeout_s=asking.timeout_s)
    assert isinstance(reply, QuotaList), reply
    had_one = reply.quotas[0].limit_bytes is not None
    name = shown_name(tenant)
    if asking.as_json:
        print(json.dumps({"cache_salt": name, "status": "removed" if had_one else "not_found"}))
    else:
        print(f"{name}: quota removed" if had_one else f"{name} had no quota")
    return 0


def _print_list(flags: Sequence[str]) -> int:
    asking = read_asking(flags, program="kvcellar quota list")
    with connect(asking) as session:
        reply = session.call(Quotas, timeout_s=asking.timeout_s)
    assert isinstance(reply, QuotaList), reply
    if asking.as_json:
        print(json.dumps([_page(facts) for facts in reply.quotas]))
    elif not reply.quotas:
        print("no tenant has a quota")
    else:
        print("\n".join(_line(facts) for facts in reply.quotas))
    return 0


def _print_one(reply: object, *, as_json: bool) -> int:
    assert isinstance(reply, QuotaList), reply
    (facts,) = reply.quotas
    print(json.dumps(_page(facts)) if as_json else _line(facts))
    return 0


def _line(facts: QuotaFacts) -> str:
    limit = "no quota" if facts.limit_bytes is None else f"of {format_bytes(facts.limit_bytes)}"
    text = f"{shown_name(facts.tenant)} ({label_of(facts.tenant)}): "
    text += f"{format_bytes(facts.used_bytes)} {limit} in memory"
    if facts.disk_limit_bytes is not None or facts.disk_used_bytes:
        text += f", {format_bytes(facts.disk_used_bytes)} on disk"
    if facts.disk_limit_bytes is not None:
        text += f" of {format_bytes(facts.disk_limit_bytes)} on each"
    return text


def _page(facts: QuotaFacts) -> dict[str, object]:
    return {
        "cache_salt": shown_name(facts.tenant),
        "label": label_of(facts.tenant),
        "limit_bytes": facts.limit_bytes,
        "used_bytes": facts.used_bytes,
        "disk_limit_bytes": facts.disk_limit_bytes,
        "disk_used_bytes": facts.disk_used_bytes,
    }


def _bytes(flag: str, text: str | None) -> int:
    if text is None:
        raise ConfigError(f"{flag} is missing: {_USAGE}")
    try:
        size_gb = float(text)
    except ValueError:
        size_gb = math.nan
    if not 0 <= size_gb <= 1e9:
        raise ConfigError(f"{flag} {text}: write GB of 1024³ bytes, from 0 on, as in {flag} 2.5")
    return int(size_gb * GIB)
