"""`kvcellar status`: what a server holds, who uses it, and whether all of it works."""

import json
from collections.abc import Sequence

from kvcellar.cli.asking import connect, read_asking
from kvcellar.protocol.messages import Status, StatusReply
from kvcellar.telemetry.summary import status_lines

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Print a server's status; return 0 if it is healthy and 1 if not.

    Raises:
        KVCellarError: nobody answers.
    """
    asking = read_asking(arguments, program="kvcellar status")
    with connect(asking) as session:
        reply = session.call(Status, timeout_s=asking.timeout_s)
    assert isinstance(reply, StatusReply), reply
    page = reply.status
    metrics = page.pop("metrics")
    if asking.as_json:
        print(json.dumps(page, indent=2))
    else:
        print("\n".join(status_lines(page, metrics)))
    return 0 if page["is_healthy"] else 1
