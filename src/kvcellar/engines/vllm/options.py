"""The connector's own options: the keys `kvcellar.*` of `kv_connector_extra_config`.

Read once by each half; a key that does not exist, a value of the wrong type or out of range is
refused before anything starts, with the key, the value and the fix. LMCache's names for the same
options live in `compat.vllm_options`, which ends in `options_from` as well.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvcellar.errors import ConfigError
from kvcellar.transport.address import TcpAddress, parse_server_address

__all__ = ["OPTION_KEYS", "ConnectorOptions", "options_from", "read_options", "unknown_key"]


_HOST, _PORT = "localhost", 5555


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions:
    """What a user may set; the defaults suit a server on the same host.

    Attributes:
        servers: where the server listens, or each of several: then each keeps the shards of as
            many ranks, in the order of both; see `parts`.
        timeout_s: the longest that any single call may wait; hooks of a step wait far shorter.
        heartbeat_s: seconds between two heartbeats.
        lookup_timeout_s: how long a request waits for the answer to its lookup before it is
            computed without; steps go on meanwhile.
        fetch_timeout_s: how long it waits besides while the server fetches chunks from its tiers;
            then it uses what is there. 0: only what is in the server's memory counts.
        eager_prefetch: look up when a request arrives rather than when it is first considered.
        save_decode_cache: also store chunks that hold generated tokens.
        load_failure_policy: "recompute" or "fail": what becomes of a request whose load failed.
        autostart: start a server on this host where none answers.
        autostart_server_args: further flags of that server, as on a command line.
        autostart_wait_s: how long the engine's start waits for it.
        server_module: what is run to start it; follows from the connector's name.
        gate: load a hit only as far as that is quicker than computing it; False: always load it.
        copy_delay_s: for tests only: every copy waits so long before it touches its bytes.
    """

    servers: tuple[TcpAddress, ...] = (TcpAddress(_HOST, _PORT),)
    timeout_s: float = 300.0
    heartbeat_s: float = 10.0
    lookup_timeout_s: float = 0.5
    fetch_timeout_s: float = 2.0
    eager_prefetch: bool = False
    save_decode_cache: bool = False
    load_failure_policy: str = "recompute"
    autostart: bool = False
    autostart_server_args: str = ""
    autostart_wait_s: float = 90.0
    server_module: str = "kvcellar"
    gate: bool = True
    copy_delay_s: float = 0.0


OPTION_KEYS: Mapping[str, str] = {
    "kvcellar.host": "host",
    "kvcellar.port": "port",
    "kvcellar.server_urls": "server_urls",
    "kvcellar.timeout_s": "timeout_s",
    "kvcellar.heartbeat_s": "heartbeat_s",
    "kvcellar.lookup_timeout_s": "lookup_timeout_s",
    "kvcellar.fetch_timeout_s": "fetch_timeout_s",
    "kvcellar.eager_prefetch": "eager_prefetch",
    "kvcellar.save_decode_cache": "save_decode_cache",
    "kvcellar.load_failure_policy": "load_failure_policy",
    "kvcellar.autostart": "autostart",
    "kvcellar.autostart.server_args": "autostart_server_args",
    "kvcellar.autostart.wait_timeout_s": "autostart_wait_s",
    "kvcellar.gate": "gate",
    "kvcellar.testing.copy_delay_s": "copy_delay_s",
}
"""Key of `kv_connector_extra_config` to field of `ConnectorOptions`; host and port, or server_urls
before them, make `servers`."""

_SECONDS_MAX = 86_400.0
_POLICIES = ("recompute", "fail")
_MAY_BE_ZERO = ("copy_delay_s", "fetch_timeout_s")


def read_options(extra_config: Mapping[str, object]) -> ConnectorOptions:
    """Return the options of a `KVCellarConnector`.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`.

    Raises:
        ConfigError: a key is unknown or its value does not fit.
    """
    for key in extra_config:
        if key not in OPTION_KEYS:
            foreign = key.startswith("lmcache.")
            hint = "; LMCache's keys are read by LMCacheMPConnector" if foreign else ""
            raise unknown_key(key, OPTION_KEYS, hint=hint)
    return options_from({key: (OPTION_KEYS[key], value) for key, value in extra_config.items()})


def options_from(given: Mapping[str, tuple[str, object]]) -> ConnectorOptions:
    """Return options from values that were given under any keys.

    Args:
        given: the user's key to the field that it sets and the value, unchecked.

    Raises:
        ConfigError: a value does not fit, or two keys set one field to different values.
    """
    values: dict[str, object] = {}
    keys: dict[str, str] = {}
    for key, (field, value) in given.items():
        checked = _checked(key, field, value)
        if field in values and values[field] != checked:
            raise ConfigError(
                f"{keys[field]}={values[field]!r} and {key}={checked!r} set the same option: "
                "keep one of them"
            )
        values[field], keys[field] = checked, key
    alone = _one_server(values.pop("host", _HOST), values.pop("port", _PORT), keys)
    servers = values.pop("server_urls", (alone,))
    if isinstance(servers, tuple) and len(servers) > 1 and values.get("autostart"):
        raise ConfigError(
            f"{keys['autostart']} starts one server, but {keys['server_urls']} names "
            f"{len(servers)}: start them beforehand, or leave one of the two out"
        )
    values["servers"] = servers
    # Each value was checked against its field just now, which the type checker cannot see.
    return ConnectorOptions(**values)  # type: ignore[arg-type]


def _one_server(host: object, port: object, keys: Mapping[str, str]) -> TcpAddress:
    try:
        return parse_server_address(str(host), _port_of(port))
    except ConfigError as error:
        named = " and ".join(keys[name] for name in ("host", "port") if name in keys)
        raise ConfigError(f"{named}: {error}") from error


def unknown_key(key: str, known: Collection[str], *, hint: str = "") -> ConfigError:
    """Return the error for a key that nothing reads, with the one that was probably meant."""
    tail = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75) or [
        name for name in known if name.rpartition(".")[2] == tail
    ]
    if close:
        return ConfigError(
            f"kv_connector_extra_config has the unknown key {key!r}: "
            f"did you mean {close[0]!r}?{hint}"
        )
    return ConfigError(
        f"kv_connector_extra_config has the unknown key {key!r}{hint}; "
        f"known keys: {', '.join(sorted(known))}"
    )


def _checked(key: str, field: str, value: object) -> object:
    if field in {"eager_prefetch", "save_decode_cache", "autostart", "gate"}:
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r}: write true or false")
        return value
    if field == "load_failure_policy":
        if value not in _POLICIES:
            raise ConfigError(f"{key}={value!r}: write {' or '.join(_POLICIES)}")
        return value
    if field in {"host", "autostart_server_args"}:
        if not isinstance(value, str):
            example = "localhost" if field == "host" else "--l1-size-gb 20"
            raise ConfigError(f"{key}={value!r}: write a text, as in {example!r}")
        return value
    if field == "port":
        return _port_of(value, key)
    if field == "server_urls":
        return _addresses(key, value)
    return _seconds(key, value, may_be_zero=field in _MAY_BE_ZERO)


def _addresses(key: str, value: object) -> tuple[TcpAddress, ...]:
    urls = value.split(",") if isinstance(value, str) else value
    if not isinstance(urls, Sequence) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"{key}={value!r}: write addresses, as in 'tcp://a:5555,tcp://b:5555'")
    found: list[TcpAddress] = []
    for url in filter(None, (url.strip() for url in urls)):
        _, colon, port = url.rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError(f"{key}={value!r}: write the port too, as in 'tcp://localhost:5555'")
        try:
            address = parse_server_address(url, port)
        except ConfigError as error:
            raise ConfigError(f"{key}={value!r}: {error}") from error
        if address in found:
            raise ConfigError(f"{key}={value!r} names {address} twice: name each server once")
        found.append(address)
    if not found:
        raise ConfigError(f"{key}={value!r} names no server: write one address or several")
    return tuple(found)


def _port_of(value: object, key: str = "port") -> int:
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.isascii() and text.isdigit():
        text = int(text)
    if isinstance(text, bool) or not isinstance(text, int):
        raise ConfigError(f"{key}={value!r}: write a port, as in 5555")
    return text


def _seconds(key: str, value: object, *, may_be_zero: bool) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= _SECONDS_MAX or (number == 0 and not may_be_zero):
        raise ConfigError(f"{key}={value!r}: write seconds above 0 and up to {_SECONDS_MAX:.0f}")
    return number
