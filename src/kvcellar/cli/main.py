"""`kvcellar`: find the command, run it, and turn failures into a line and an exit code.

Exit codes: 0 it worked; 1 it did not (no server, unhealthy); 2 the command line or a setting is
wrong. A command's module is imported when it is chosen, so that `kvcellar --help` costs nothing.
"""

import importlib
import sys
from collections.abc import Sequence

from kvcellar import __version__
from kvcellar.errors import ConfigError, KVCellarError

__all__ = ["main"]

_COMMANDS = {
    "server": "run the cache server of this node",
    "status": "show what a server holds and whether it is healthy",
    "ping": "ask a server for a sign of life",
    "clear": "make a server forget every chunk",
    "why-miss": "say why prompts did not hit",
    "doctor": "look for what is wrong on this host",
    "describe": "show what a server or an engine says of itself, over HTTP",
    "kvcache": "clear a server's memory, over HTTP",
    "query": "ask an engine a prompt and time it, or list what is cached",
    "quota": "set, show, list and remove what a tenant may hold",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: without the program's name; those of this process when None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_help())
        return 0 if words else 2
    if words[0] in {"-V", "--version"}:
        print(f"kvcellar {__version__}")
        return 0
    return _run(words[0], words[1:])


def _run(name: str, rest: Sequence[str]) -> int:
    if name not in _COMMANDS:
        from kvcellar.config.flags import suggestion

        hint = suggestion(name, list(_COMMANDS)) or " (see kvcellar --help)"
        print(f"kvcellar: {name!r} is not a command{hint}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"kvcellar.cli.{name.replace('-', '_')}")
        code: int = module.run(rest)
    except ConfigError as error:
        print(f"kvcellar {name}: {error}", file=sys.stderr)
        return 2
    except KVCellarError as error:
        print(f"kvcellar {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvcellar COMMAND [--flag value ...]",
            "",
            "Keeps the KV cache of LLM engines on this node.",
            "",
            *lines,
            "",
            "kvcellar COMMAND --help lists a command's flags; kvcellar --version says which one.",
        ]
    )
