"""Reads what `--l2-adapter` says: one JSON object a tier, with LMCache's keys.

Every key is honoured, explained in one line, or refused with the reason; nothing is passed over.
The control process calls `read_adapter` at start, so that a mistake ends the start and not the
tier process, which reads the same texts again and builds the tiers with `registry`. Needs neither
numpy nor the medium.
"""

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from kvcellar.config.flags import suggestion
from kvcellar.errors import ConfigError
from kvcellar.units import bytes_from_gb

__all__ = ["Adapter", "FileSystemOptions", "read_adapter"]

_FLAG = "--l2-adapter"
_WORKERS_MAX = 64
_SIZE_MAX_GB = 1e9

# What LMCache has and kvcellar has not, so that nobody looks for a typing mistake.
_LATER = frozenset(
    {
        "aerospike", "bigtable", "dax", "hf3fs", "hfbucket", "mooncake_store", "nixl_native",
        "nixl_store", "nixl_store_dynamic", "raw_block", "resp", "s3", "sagemaker_hyperpod",
        "valkey",
    }
)  # fmt: skip
_NEVER = {
    "native_plugin": "it loads a library that LMCache's interface is compiled into",
    "plugin": "it loads a class with LMCache's interface; docs/tiers.md says how to write a tier",
    "p2p": "LMCache makes it by itself and does not read it from a flag",
    "mock": "it is for LMCache's own tests",
    "fault_inject": "it is for LMCache's own tests",
}


class FileSystemOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a folder is used.

    Attributes:
        name: for logs and metrics.
        base_path: the folder; made where it is missing.
        temporary_dir: folder for unfinished writes, below `base_path`.
        cap_bytes: the most that `du` of the folder may say; 0 leaves 5 % of the file system free.
        workers: threads that read; half as many write.
        direct: bypass the page cache where the file system can.
        is_shared: other processes, here or on other nodes, use the folder as well.
        keeps_chunks: False removes all chunks at start.
        may_evict: least recently used chunks leave for new ones; False keeps what is there.
        is_isolated: they leave by their tenants' shares and quotas (docs/tenants.md).
    """

    name: str
    base_path: Path
    temporary_dir: str = ".tmp"
    cap_bytes: int = 0
    workers: int = 4
    direct: bool = True
    is_shared: bool = False
    keeps_chunks: bool = True
    may_evict: bool = True
    is_isolated: bool = False


class Adapter(msgspec.Struct, frozen=True):
    """One configured tier.

    Attributes:
        kind: its type, as it was written.
        options: how it is used.
        notes: one line for each key that was accepted and means nothing here, for the log.
    """

    kind: str
    options: FileSystemOptions
    notes: tuple[str, ...] = ()


def read_adapter(text: str, *, position: int = 0) -> Adapter:
    """Return what one `--l2-adapter` says.

    Args:
        text: a JSON object.
        position: which of the adapters it is, from 0; makes its name.

    Raises:
        ConfigError: no such type or key, a wrong value, or something that is not there yet; the
            message names the key, the value and the fix.
    """
    try:
        words = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"{_FLAG} is not a JSON object ({error}); write it in single quotes, as in "
            f'{_FLAG} \'{{"type":"fs","base_path":"/data/kv"}}\''
        ) from error
    kind = _kind(words.pop("type", None))
    readers = {**_COMMON_KEYS, **_FS_KEYS[kind]}
    found: dict[str, object] = {"name": f"{kind}-{position}"}
    notes: list[str] = []
    for key, value in words.items():
        reader = readers.get(key)
        if reader is None:
            hint = suggestion(key, tuple(readers))
            known = ", ".join(sorted(readers))
            raise ConfigError(f"{_FLAG} {kind}: no key {key!r}{hint or f'; it knows {known}'}")
        where = f"{_FLAG} {kind}: {key} {_shown(value)}"
        fields, note = reader(where, value)
        found.update(fields)
        if note:
            notes.append(f"{where} {note}")
    if "base_path" not in found:
        raise ConfigError(f'{_FLAG} {kind}: base_path is missing: write "base_path":"/data/kv"')
    return Adapter(kind, msgspec.convert(found, FileSystemOptions, dec_hook=_path), tuple(notes))


def _kind(kind: object) -> str:
    if isinstance(kind, str) and kind in _FS_KEYS:
        return kind
    if kind is None:
        raise ConfigError(f'{_FLAG}: type is missing: write "type":"fs"')
    if kind in _LATER:
        raise ConfigError(f'{_FLAG}: type {kind} comes later; "fs" keeps chunks in a folder')
    if isinstance(kind, str) and kind in _NEVER:
        raise ConfigError(f"{_FLAG}: type {kind} is LMCache's own: {_NEVER[kind]}")
    known = [*_FS_KEYS, *sorted(_LATER)]
    hint = suggestion(kind, known) if isinstance(kind, str) else ""
    if kind in {"disk", "file", "filesystem", "local"}:
        hint = ': did you mean fs, with "base_path" for the folder?'
    raise ConfigError(f"{_FLAG}: no type {_shown(kind)}{hint or '; write fs'}")


# A reader returns fields for the options, and what of the key means nothing here, or "".
_Answer = tuple[dict[str, object], str]
_Reader = Callable[[str, Any], _Answer]


def _base_path(where: str, value: object) -> _Answer:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: write a folder, as in /data/kv")
    return {"base_path": Path(value).expanduser().absolute()}, ""


def _temporary_dir(where: str, value: object) -> _Answer:
    if value in (None, ""):
        return {}, ""
    path = PurePosixPath(value) if isinstance(value, str) else PurePosixPath("/")
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath():
        raise ConfigError(f"{where}: write a folder below base_path, as in tmp, so that a file can "
                          "be renamed into place and counts towards the cap")  # fmt: skip
    return {"temporary_dir": str(path)}, ""


def _capacity(where: str, value: object) -> _Answer:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(str(value)) <= _SIZE_MAX_GB:
        raise ConfigError(f"{where}: write a number of GB, or 0 to leave 5 % of the disk free")
    size_gb = float(str(value))
    if size_gb and bytes_from_gb(size_gb) <= 0:
        raise ConfigError(f"{where}: less than a page of 4 KiB; write GB, not TB")
    return {"cap_bytes": bytes_from_gb(size_gb)}, ""


def _workers(where: str, value: object) -> _Answer:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _WORKERS_MAX:
        raise ConfigError(f"{where}: write a number of threads from 1 to {_WORKERS_MAX}")
    return {"workers": value}, ""


def _flag_as(field: str) -> _Reader:
    def read(where: str, value: object) -> _Answer:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: write true or false")
        return {field: value}, ""

    return read


def _read_ahead(where: str, value: object) -> _Answer:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(f"{where}: write a number of bytes")
    return {}, "changes nothing: a chunk is read whole, in one call"


def _affinity(where: str, value: object) -> _Answer:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: write a text")
    return {}, "changes nothing: a server has one L1, so there is nothing to choose"


def _eviction(where: str, value: object) -> _Answer:
    if value is None:
        return {}, ""
    if not isinstance(value, Mapping):
        raise ConfigError(f'{where}: write an object, as in {{"eviction_policy":"LRU"}}')
    known = ("eviction_policy", "trigger_watermark", "eviction_ratio")
    for key in value:
        if key not in known:
            hint = suggestion(str(key), known) or f"; it knows {', '.join(known)}"
            raise ConfigError(f"{where}: no key {key!r}{hint}")
    for key in known[1:]:
        share = value.get(key, 0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"{where}: {key} {share}: write a share from 0 to 1")
    policy = value.get("eviction_policy", "LRU")
    if policy not in {"LRU", "IsolatedLRU", "noop"}:
        raise ConfigError(
            f"{where}: eviction_policy {policy}: this tier knows LRU, IsolatedLRU and noop"
        )
    note = "has no watermark: room is made when a chunk needs it, and for no more than it needs"
    found = {"may_evict": policy != "noop", "is_isolated": policy == "IsolatedLRU"}
    return found, note if len(value) > ("eviction_policy" in value) else ""


def _serde(where: str, value: object) -> _Answer:
    if value is None:
        return {}, ""
    raise ConfigError(
        f"{where}: codecs of a tier come later; chunks are stored as they lie in L1, and "
        "--l1-codec int8 halves them there"
    )


_COMMON_KEYS: dict[str, _Reader] = {
    "affinity_tag": _affinity,
    "shared": _flag_as("is_shared"),
    "persist_enabled": _flag_as("keeps_chunks"),
    "eviction": _eviction,
    "serde": _serde,
}
_FOLDER_KEYS: dict[str, _Reader] = {
    "base_path": _base_path,
    "relative_tmp_dir": _temporary_dir,
    "read_ahead_size": _read_ahead,
    "use_odirect": _flag_as("direct"),
    "max_capacity_gb": _capacity,
    "num_workers": _workers,
}
# LMCache's `fs` has no cap and no workers; here they are one thing under two names.
_FS_KEYS: dict[str, dict[str, _Reader]] = {"fs": _FOLDER_KEYS, "fs_native": _FOLDER_KEYS}


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _path(kind: type, value: object) -> object:
    assert kind is Path, kind
    return value
