"""The secret that allows changes over HTTP: where it lies and what it must look like.

Read at the server's start, so that a bad file is answered there, and again for each request that
changes something, so that a token can be replaced without a restart. Used by `config.load` and the
HTTP process.
"""

import stat
from pathlib import Path

from kvcellar.errors import ConfigError

__all__ = ["TOKEN_MIN", "read_admin_token"]

TOKEN_MIN = 16
_FILE_MAX_BYTES = 4096


def read_admin_token(path: str) -> bytes:
    """Return the token in a file: its one line, without the white space around it.

    Raises:
        ConfigError: it cannot be read, or holds no token; the message never shows what is in it.
    """
    flag = f"--admin-token-file {path}"
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(f"{flag}: is not a file")
        with Path(path).open("rb") as file:
            token = file.read(_FILE_MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be read: {error.strerror}") from error
    if len(token) < TOKEN_MIN or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"{flag}: must hold one line of at least {TOKEN_MIN} printable ASCII characters "
            "without spaces, as `openssl rand -hex 32` prints"
        )
    return token
