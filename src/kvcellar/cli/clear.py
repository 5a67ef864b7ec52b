"""`kvcellar clear`: make a server forget every chunk, in memory or in the tiers behind it too."""

import json
from collections.abc import Sequence

from kvcellar.cli.asking import connect, read_asking
from kvcellar.config.server import Setting
from kvcellar.errors import TimeoutExpiredError
from kvcellar.protocol.messages import Clear, Cleared
from kvcellar.units import format_bytes

__all__ = ["run"]

_ALL_TIERS = Setting(
    "all_tiers",
    "--all-tiers",
    "",
    "Also what disks and other tiers hold; without it only memory is cleared.",
    "",
    False,
    "",
)


def run(arguments: Sequence[str]) -> int:
    """Clear a server and print what went; return 0.

    Raises:
        KVCellarError: nobody answers, or the tiers cannot be reached.
    """
    asking = read_asking(arguments, program="kvcellar clear", more=(_ALL_TIERS,))
    is_all = "all_tiers" in asking.more
    with connect(asking) as session:
        reply = session.call(lambda id_: Clear(id_, tiers=is_all), timeout_s=asking.timeout_s)
    assert isinstance(reply, Cleared), reply
    if reply.tier_chunks < 0:
        raise TimeoutExpiredError(
            "memory is cleared, but the tiers cannot be reached now and may keep some: try again"
        )
    if asking.as_json:
        facts = {"chunks": reply.chunks, "size_bytes": reply.size_bytes}
        print(json.dumps(facts | ({"tier_chunks": reply.tier_chunks} if is_all else {})))
    else:
        print(f"cleared {reply.chunks} chunks, {format_bytes(reply.size_bytes)}")
        if is_all:
            print(f"cleared {reply.tier_chunks} chunks in the tiers")
    return 0
