"""`kvcellar server`: run the cache server of this node until it is told to stop."""

from collections.abc import Sequence

from kvcellar.config.load import load_server

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Serve; return 0 after an orderly stop.

    Raises:
        ConfigError: a flag is wrong, or what it asks for cannot be had.
    """
    loaded = load_server(arguments, program="kvcellar server")
    # Only now: a mistyped flag is answered before the server's modules are read.
    from kvcellar.server.control import run as serve

    serve(loaded.config, loaded.notes)
    return 0
