"""The bounds of the server itself: how many peers, how much memory for each.

The protocol's bounds (`protocol.limits`) say what one message may hold; these say what one server
takes on, so that a peer that connects without end, says hello slowly or never reads costs itself
and nobody else.
"""

from kvcellar.units import MIB

__all__ = [
    "ARRIVALS_MAX",
    "CLIENTS_MAX",
    "HELLO_MAX_BYTES",
    "OUTGOING_MAX_BYTES",
    "REQUESTS_PER_TURN",
]

ARRIVALS_MAX = 256
"""Connections that have not said hello; one more pushes out the one that waits longest."""
CLIENTS_MAX = 4_096
"""Client processes that are connected, or alive and may still write to slots."""
HELLO_MAX_BYTES = MIB
"""A hello's frame: a layout of some thousand regions fits."""
OUTGOING_MAX_BYTES = 64 * MIB
"""Replies that a client has not read; beyond that it is disconnected."""
REQUESTS_PER_TURN = 32
"""Requests of one client that are answered before the others get a turn."""
