"""What an engine tells of its gate, which decides whether a hit is loaded or computed.

Apart from `messages`, which gives it on, because nothing is decided by it at the server: it is
only shown.
"""

import msgspec

__all__ = ["GateFigures", "GateReport"]


class GateFigures(msgspec.Struct, frozen=True, array_like=True):
    """Counts since the engine's start, and what it knows now; nothing is below 0 or infinite.

    Attributes:
        taken: hits that were loaded in full.
        shortened: hits whose first chunks were loaded.
        explored: hits that were loaded to learn.
        refused: hits that were computed.
        regret_s: seconds by which ways took longer than the other one was expected to take.
        prefill_token_s: seconds that computing a token takes, 0 while it is not known.
        load_overhead_s: seconds that a load takes beside its bytes, 0 while that is not known.
        load_bytes_per_s: bytes a second of a long load, 0 while that is not known.
    """

    taken: int = 0
    shortened: int = 0
    explored: int = 0
    refused: int = 0
    regret_s: float = 0.0
    prefill_token_s: float = 0.0
    load_overhead_s: float = 0.0
    load_bytes_per_s: float = 0.0


class GateReport(msgspec.Struct, tag="gate_report", frozen=True, array_like=True):
    """A scheduler half says what its gate has decided, for metrics. Reply: `Ok`."""

    id: int
    figures: GateFigures
