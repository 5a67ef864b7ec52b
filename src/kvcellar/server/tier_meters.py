"""What the control loop counts about tiers; what a tier did itself is in its `TierFacts`."""

from kvcellar.telemetry.histogram import Histogram

__all__ = ["TierMeters"]


class TierMeters:
    """Counters since the server's start.

    Attributes:
        fetches: lookups whose rest was looked for in the tiers.
        fetched_chunks: chunks that came into the arena.
        fetches_late: fetches that took longer than somebody waited.
        fetch_s: time of fetches that read something.
        unwritten_chunks: chunks that no tier has: the queue was full, or the tiers had no room,
            failed or were away.
        told_chunks: chunks that memory answered for and the tiers were told of.
        untold_lookups: lookups that memory answered and the tiers were not told of.
        restarts: lives of the tier process that ended.
    """

    __slots__ = (
        "fetch_s",
        "fetched_chunks",
        "fetches",
        "fetches_late",
        "restarts",
        "told_chunks",
        "untold_lookups",
        "unwritten_chunks",
    )

    def __init__(self) -> None:
        self.fetches = 0
        self.fetched_chunks = 0
        self.fetches_late = 0
        self.fetch_s = Histogram()
        self.unwritten_chunks = 0
        self.told_chunks = 0
        self.untold_lookups = 0
        self.restarts = 0
