"""`kvcellar ping`: is a server there, and how fast does its control loop answer."""

import json
from collections.abc import Sequence

from kvcellar.cli.asking import connect, read_asking
from kvcellar.clock import SystemClock
from kvcellar.protocol.messages import Ping

__all__ = ["run"]

_ROUNDS = 5


def run(arguments: Sequence[str]) -> int:
    """Ping a server some times and print the fastest answer; return 0.

    Raises:
        KVCellarError: nobody answers.
    """
    asking = read_asking(arguments, program="kvcellar ping")
    clock = SystemClock()
    times_s = []
    with connect(asking) as session:
        for _ in range(_ROUNDS):
            start_s = clock.monotonic_s()
            session.call(Ping, timeout_s=asking.timeout_s)
            times_s.append(clock.monotonic_s() - start_s)
        welcome = session.welcome
    fastest_ms = min(times_s) * 1000
    if asking.as_json:
        page = {"node": welcome.node, "boot_id": welcome.boot_id.hex(), "fastest_ms": fastest_ms}
        print(json.dumps(page))
    else:
        print(
            f"pong from {asking.host}:{asking.port} in {fastest_ms:.3f} ms "
            f"(node {welcome.node}, boot {welcome.boot_id.hex()[:8]})"
        )
    return 0
