"""What the control loop counts beside the store's own statistics.

Plain integers and histograms, written on the loop and read by the status page; what the store
counts is not counted twice.
"""

from collections import Counter
from collections.abc import Mapping

from kvcellar.telemetry.histogram import Histogram

__all__ = ["Meters"]


ENGINE_CHUNKS = (
    "offered", "present", "busy", "full", "lost", "crowded", "stored", "failed",
)  # fmt: skip
"""What scheduler halves count of chunks that they offer; anything else they say is not kept."""


class Meters:
    """The server's counters and histograms."""

    __slots__ = (
        "client_deaths",
        "commit_s",
        "connections",
        "engine_chunks",
        "error_replies",
        "http_restarts",
        "load_s",
        "loaded_bytes",
        "loaded_chunks",
        "loads_failed",
        "loads_ok",
        "lookup_hit_tokens",
        "lookup_s",
        "lookup_tokens",
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
        self.lookup_tokens = 0
        self.lookup_hit_tokens = 0
        self.connections = 0
        self.client_deaths = 0
        self.engine_chunks = dict.fromkeys(ENGINE_CHUNKS, 0)
        self.http_restarts = 0
        self.error_replies: Counter[str] = Counter()
        self.peers_refused: Counter[str] = Counter()

    def count_engine(self, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        """Add what an engine's own counters rose by; one that restarted counts from 0 again."""
        for name in ENGINE_CHUNKS:
            was, is_now = before.get(name, 0), max(now.get(name, 0), 0)
            self.engine_chunks[name] += is_now - was if is_now >= was else is_now
