"""`kvcellar clear`: make a server forget every chunk."""

import json
from collections.abc import Sequence

from kvcellar.cli.asking import connect, read_asking
from kvcellar.protocol.messages import Clear, Cleared
from kvcellar.units import format_bytes

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Clear a server and print what went; return 0.

    Raises:
        KVCellarError: nobody answers.
    """
    asking = read_asking(arguments, program="kvcellar clear")
    with connect(asking) as session:
        reply = session.call(Clear, timeout_s=asking.timeout_s)
    assert isinstance(reply, Cleared), reply
    if asking.as_json:
        print(json.dumps({"chunks": reply.chunks, "size_bytes": reply.size_bytes}))
    else:
        print(f"cleared {reply.chunks} chunks, {format_bytes(reply.size_bytes)}")
    return 0
