"""What the control loop counts beside the store's own statistics.

Plain integers and histograms, written on the loop and read by the status page; what the store
counts is not counted twice.
"""

from collections import Counter

from kvcellar.telemetry.histogram import Histogram

__all__ = ["Meters"]


class Meters:
    """The server's counters and histograms."""

    __slots__ = (
        "client_deaths",
        "commit_s",
        "connections",
        "error_replies",
        "http_restarts",
        "load_s",
        "loaded_bytes",
        "loaded_chunks",
        "loads_failed",
        "loads_ok",
        "lookup_s",
        "peers_refused",
        "reserve_s",
        "store_s",
    )

    def __init__(self) -> None:
        self.lookup_s = Histogram()
        self.reserve_s = Histogram()
        self.commit_s = Histogram()
        self.store_s = Histogram()
        self.load_s = Histogram()
        self.loads_ok = 0
        self.loads_failed = 0
        self.loaded_chunks = 0
        self.loaded_bytes = 0
        self.connections = 0
        self.client_deaths = 0
        self.http_restarts = 0
        self.error_replies: Counter[str] = Counter()
        self.peers_refused: Counter[str] = Counter()
