"""`lmcache`: LMCache's command line, answered by kvcellar as far as it goes.

`lmcache server` is `kvcellar server` with LMCache's other flags understood. The commands that
look at a server or an engine work over HTTP as LMCache's do. The rest is refused by name, because
a command that silently does something else is worse than none.
"""

import sys
from collections.abc import Sequence

from kvcellar import __version__
from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.compat.lmcache_metrics import LMCACHE_METRICS
from kvcellar.config.flags import suggestion
from kvcellar.config.load import load_server
from kvcellar.errors import ConfigError, KVCellarError

__all__ = ["main"]

_HELP = """usage: lmcache COMMAND ...        (kvcellar {version} under LMCache's name)

  server            run the cache server of this node
  ping kvcache      ask a server for a sign of life        [--url http://localhost:8080]
  describe kvcache  show a server's status                 [--url http://localhost:8080]
  describe engine   show an engine's models and caches     [--url http://localhost:8000]
  kvcache clear     make a server forget every chunk        --url http://localhost:8080
  query engine      ask an engine a prompt and time it      --prompt TEXT [--url …]
  query kvcache     list what is cached                    [--url http://localhost:8080]
  quota set SALT    say what a tenant may hold              --limit-gb GB [--url …]
  quota get SALT | list | delete SALT                       [--url http://localhost:8080]

--format json, --output PATH and -q say what becomes of an answer. Commands that change something
take --admin-token-file where the server has one.

lmcache server --help lists the server's flags; kvcellar --help the commands of our own."""

_LATER = ("bench", "coordinator", "mock", "tool", "trace")
_HERE = ("server", "ping", "describe", "kvcache", "query", "quota")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, as `kvcellar.cli.main` does.

    Args:
        arguments: without the program's name; those of this process when None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help"}:
        print(_HELP.format(version=__version__))
        return 0 if words else 2
    if words[0] == "--version":
        print(f"lmcache (kvcellar {__version__})")
        return 0
    try:
        return _run(words[0], words[1:])
    except ConfigError as error:
        print(f"lmcache {words[0]}: {error}", file=sys.stderr)
        return 2
    except KVCellarError as error:
        print(f"lmcache {words[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(name: str, rest: Sequence[str]) -> int:
    if name == "server":
        return _server(rest)
    if name == "quota":
        from kvcellar.compat.lmcache_quota import run_quota

        print(run_quota(rest))
        return 0
    if name in _HERE:
        from kvcellar.client.web_commands import run_web_command

        text = run_web_command("lmcache", name, rest)
        if text:
            print(text)
        return 0
    if name in _LATER:
        raise ConfigError("not yet in kvcellar 0.1; see lmcache --help for what is")
    raise ConfigError(f"not a command{suggestion(name, (*_HERE, *_LATER))}")


def _server(rest: Sequence[str]) -> int:
    loaded = load_server(
        rest,
        program="lmcache server",
        foreign=LMCACHE_SERVER_FLAGS,
        log_level_variable="LMCACHE_LOG_LEVEL",
    )
    from kvcellar.server.control import run as serve

    serve(loaded.config, loaded.notes, LMCACHE_METRICS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
