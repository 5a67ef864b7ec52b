"""Make the configuration, once: the only place that reads flags' values and the environment.

Every value is checked here, before anything is started, and a mistake is answered with the flag,
the value and the fix. `kvcellar server` and `lmcache server` call `load_server`.
"""

import ipaddress
import math
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvcellar.config.admin_token import read_admin_token
from kvcellar.config.flags import ForeignFlag, read_flags, suggestion
from kvcellar.config.quota_file import read_quota_file
from kvcellar.config.server import (
    EVICTION_POLICIES,
    L1_CODECS,
    L2_PREFETCH_POLICIES,
    L2_STORE_POLICIES,
    LOG_LEVELS,
    ServerConfig,
    settings,
)
from kvcellar.errors import ConfigError
from kvcellar.units import bytes_from_gb

__all__ = ["LoadedServer", "is_switched_on", "load_server", "variable"]

CHUNK_TOKENS_MAX = 65_536
NAME_MAX = 255
COUNT_MAX = 1_024
SECONDS_MAX = 31_536_000.0


class LoadedServer(msgspec.Struct, frozen=True):
    """A checked configuration, and what the user should be told about how it came to be."""

    config: ServerConfig
    notes: tuple[str, ...]


def load_server(
    arguments: Sequence[str],
    *,
    program: str,
    foreign: Sequence[ForeignFlag] = (),
    log_level_variable: str = "KVCELLAR_LOG_LEVEL",
) -> LoadedServer:
    """Return the server's configuration from its command line.

    Args:
        arguments: what follows the command's name.
        program: the command, for its help.
        foreign: flags of another product that this command answers to.
        log_level_variable: environment variable that is used when `--log-level` is not given.

    Raises:
        ConfigError: something is missing, unknown or wrong; the message says what to write.
    """
    flags = read_flags(arguments, settings(), program=program, foreign=foreign)
    values: dict[str, object] = {}
    for setting in settings():
        texts = flags.given.get(setting.field)
        if texts is not None:
            values[setting.field] = _value(setting.field, setting.flag, texts)
        elif setting.required:
            raise ConfigError(_MISSING[setting.field])
    if "log_level" not in values and log_level_variable in os.environ:
        values["log_level"] = _log_level(log_level_variable, os.environ[log_level_variable])
    values.setdefault("instance_id", str(uuid.uuid4()))
    if "eviction_watermark" in values or "eviction_ratio" in values:
        # Who writes one of them means the other as LMCache has it.
        values = {"eviction_watermark": 0.8, "eviction_ratio": 0.2} | values
    config = msgspec.convert(values, ServerConfig)
    if config.port == config.http_port != 0 and config.host == config.http_host:
        raise ConfigError(
            f"--port {config.port} and --http-port {config.http_port} are the same: choose two"
        )
    if config.disk_bytes and config.disk_path is None:
        raise ConfigError("--disk-size-gb is there without --disk-path: say which folder it bounds")
    return LoadedServer(config, flags.notes)


def is_switched_on(variable: str) -> bool:
    """Return whether a variable leaves something on: unless it says 0, false, no or off."""
    return os.environ.get(variable, "").strip().lower() not in {"0", "false", "no", "off"}


def variable(name: str) -> str | None:
    """Return a variable of the environment, for those who show what is set there."""
    return os.environ.get(name)


_MISSING = {
    "l1_bytes": "--l1-size-gb is missing: say how much memory the cache may take, "
    "as in --l1-size-gb 20",
    "eviction_policy": "--eviction-policy is missing: write --eviction-policy LRU (or "
    "IsolatedLRU, noop)",
}


def _value(field: str, flag: str, texts: Sequence[str]) -> object:
    if field == "client_uids":
        return tuple(_uid(flag, text) for text in texts)
    if field == "l2_adapters":
        return tuple(_adapter(flag, text) for text in texts)
    # The last one counts, so that a wrapper's defaults can be overridden behind them.
    return _CHECKS[field](flag, texts[-1])


_SIZE_MAX_GB = 1e9


def _size(flag: str, text: str) -> int:
    try:
        size_gb = float(text)
    except ValueError:
        size_gb = math.nan
    if not math.isfinite(size_gb) or size_gb > _SIZE_MAX_GB:
        raise ConfigError(f"{flag} {text}: write a number of GB, as in {flag} 20 or {flag} 0.5")
    size_bytes = bytes_from_gb(size_gb)
    if size_bytes <= 0:
        raise ConfigError(f"{flag} {text}: must be more than 0 GB, and at least a page of 4 KiB")
    return size_bytes


def _policy(flag: str, text: str) -> str:
    if text in EVICTION_POLICIES:
        return text
    if text == "ARC":
        raise ConfigError(f"{flag} {text}: not yet in kvcellar 0.1; use LRU")
    same = [policy for policy in EVICTION_POLICIES if policy.lower() == text.lower()]
    hint = f"did you mean {same[0]}?" if same else f"choose {' or '.join(EVICTION_POLICIES)}"
    raise ConfigError(f"{flag} {text}: no such policy; {hint}")


def _port(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise ConfigError(f"{flag} {text}: write a port from 1 to 65535, or 0 for any free one")
    return int(text)


def _host(flag: str, text: str) -> str:
    host = text.removeprefix("tcp://")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare.replace(".", "").isdigit():
        try:
            return str(ipaddress.ip_address(bare))
        except ValueError:
            raise ConfigError(
                f"{flag} {text}: write a host name or an IP address without a port"
            ) from None
    if not bare or not all(part.isalnum() for part in bare.replace("-", "").split(".")):
        raise ConfigError(f"{flag} {text}: write a host name or an IP address, as in localhost")
    return bare


def _chunk_tokens(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= CHUNK_TOKENS_MAX):
        raise ConfigError(
            f"{flag} {text}: write tokens from 1 to {CHUNK_TOKENS_MAX}, as in {flag} 256"
        )
    return int(text)


def _name(flag: str, text: str) -> str:
    if not text or len(text) > NAME_MAX or not text.isprintable():
        raise ConfigError(f"{flag} {text!r}: write a name of 1 to {NAME_MAX} printable characters")
    return text


def _folder(flag: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{flag} is empty: write a folder, as in {flag} /run/kvcellar")
    return str(Path(text).expanduser().absolute())


def _token_file(flag: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{flag} is empty: write a file, as in {flag} /run/secrets/kvcellar")
    path = str(Path(text).expanduser().absolute())
    read_admin_token(path)
    return path


def _quota_file(flag: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{flag} is empty: write a file, as in {flag} /var/lib/kvcellar/quotas")
    path = str(Path(text).expanduser().absolute())
    read_quota_file(path)
    return path


def _adapter(flag: str, text: str) -> str:
    # What the object says is checked by who builds the tier; its text may hold secrets.
    try:
        adapter = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"{flag}: not a JSON object ({error}); write it in single quotes, as in "
            f'{flag} \'{{"type":"fs","base_path":"/data"}}\''
        ) from error
    if not isinstance(adapter.get("type"), str):
        raise ConfigError(f'{flag}: the object has no "type"; write "type":"fs" for a folder')
    return text


def _choice(choices: Sequence[str]) -> Callable[[str, str], str]:
    def check(flag: str, text: str) -> str:
        if text not in choices:
            raise ConfigError(f"{flag} {text}: choose {' or '.join(choices)}")
        return text

    return check


def _count(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= COUNT_MAX):
        raise ConfigError(f"{flag} {text}: write a number from 1 to {COUNT_MAX}")
    return int(text)


def _uid(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32 - 1):
        raise ConfigError(f"{flag} {text}: write a numeric user id (see `id -u NAME`)")
    return int(text)


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= SECONDS_MAX:
        raise ConfigError(f"{flag} {text}: write seconds, as in {flag} 60; 0 switches it off")
    return seconds


def _fraction(flag: str, text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ConfigError(f"{flag} {text}: write a fraction above 0 and up to 1, as in {flag} 0.8")
    return fraction


def _switch(_flag: str, _text: str) -> bool:
    return True


def _log_level(flag: str, text: str) -> str:
    level = text.upper()
    if level not in LOG_LEVELS:
        raise ConfigError(
            f"{flag} {text}: choose {', '.join(LOG_LEVELS)}{suggestion(level, LOG_LEVELS)}"
        )
    return level


_CHECKS: dict[str, Callable[[str, str], object]] = {
    "l1_bytes": _size,
    "eviction_policy": _policy,
    "l1_codec": _choice(L1_CODECS),
    "disk_path": _folder,
    "disk_bytes": _size,
    "l2_store_policy": _choice(L2_STORE_POLICIES),
    "l2_prefetch_policy": _choice(L2_PREFETCH_POLICIES),
    "l2_prefetches_max": _count,
    "host": _host,
    "port": _port,
    "http_host": _host,
    "http_port": _port,
    "chunk_tokens": _chunk_tokens,
    "instance_id": _name,
    "socket_dir": _folder,
    "stop_when_unused_s": _seconds,
    "log_level": _log_level,
    "log_misses": _switch,
    "admin_token_file": _token_file,
    "quota_file": _quota_file,
    "eviction_watermark": _fraction,
    "eviction_ratio": _fraction,
}
