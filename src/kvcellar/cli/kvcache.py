"""`kvcellar kvcache clear`: make a server forget every chunk in memory, over HTTP."""

from collections.abc import Sequence

from kvcellar.client.web_commands import run_web_command

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Run it and return 0.

    Raises:
        KVCellarError: the command line is wrong, nobody answers, or with an error.
    """
    text = run_web_command("kvcellar", "kvcache", arguments)
    if text:
        print(text)
    return 0
