"""Keeps an error of ours from ending the engine that we are a guest in.

A cache that fails makes an engine slower, never wrong and never dead. A hook runs inside the fuse;
if it fails nevertheless, the fault is logged once with its traceback and caching stops, while what
the workers still run is accounted for to the end. Used by the scheduler half.
"""

from types import TracebackType

from kvcellar.telemetry.logs import EventLog

__all__ = ["Fuse"]

log = EventLog("vllm.kvcellar.fuse")


class Fuse:
    """A context in which an exception is the end of caching and of nothing else.

    Attributes:
        blown: the first error, None while all is well.
    """

    def __init__(self) -> None:
        self.blown: Exception | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(value, Exception):
            return False
        if self.blown is None:
            self.blown = value
            log.error("a fault in kvcellar; this engine goes on without it", exception=value)
        return True
