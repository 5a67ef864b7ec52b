"""The file that keeps tenants' quotas over a restart: what it looks like, read and written whole.

JSON that people may write as well: `{"quotas": {"alice": {"limit_gb": 5, "disk_limit_gb": 100}}}`,
GB being 1024³ bytes and `_default` the tenant without a salt. Salts may be secrets, so only its
owner can read it, and no message shows one. Used by `config.load` and the server.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvcellar.errors import ConfigError

__all__ = ["SavedQuota", "read_quota_file", "write_quota_file"]

_FILE_MAX_BYTES = 8 * 1024 * 1024
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SavedQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tenant's quota.

    Attributes:
        limit_gb: what it may hold in memory.
        disk_limit_gb: what it may hold on each disk; None: as much as in memory.
    """

    limit_gb: _Size
    disk_limit_gb: _Size | None = None


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quotas: dict[Annotated[str, msgspec.Meta(min_length=1)], SavedQuota]


def read_quota_file(path: str) -> dict[str, SavedQuota]:
    """Return the quotas in a file by salt; none where there is no file yet.

    Raises:
        ConfigError: it cannot be read, or written anew; the message names the field.
    """
    flag, file = f"--quota-file {path}", Path(path)
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {file.parent} is no folder that this user may write to")
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(f"{flag}: is not a file")
        with file.open("rb") as opened:
            content = opened.read(_FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be read: {error.strerror}") from error
    if len(content) > _FILE_MAX_BYTES:
        raise ConfigError(f"{flag}: is larger than {_FILE_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=_Content).quotas
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{flag}: {error}; correct it as in "
            '{"quotas": {"alice": {"limit_gb": 5}}}, or remove the file'
        ) from error


def write_quota_file(path: str, quotas: Mapping[str, SavedQuota]) -> None:
    """Replace the file, whole or not at all, for its owner's eyes only; blocks for the disk.

    Raises:
        OSError: it is as it was.
    """
    target = Path(path).resolve()
    content = msgspec.json.format(msgspec.json.encode(_Content(dict(quotas))), indent=2)
    temporary = target.with_name(f".{target.name}.tmp")
    # Of a server that was killed.
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as new:
            new.write(content + b"\n")
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
