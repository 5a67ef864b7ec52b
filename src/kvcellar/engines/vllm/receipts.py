"""What was moved for one request: what a log line, and nothing else, is made of.

Figures come from the workers' reports and are measured around the real copies. A receipt is
handed out once, when the request has ended and none of its copies runs any more. Kept by the
scheduler half; the connector class under LMCache's name prints it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcellar.engines.vllm.metadata import JobResult
from kvcellar.units import GIB

__all__ = ["Receipt", "Transfers"]


@dataclass
class Transfers:
    """The sum of a request's loads, or of its stores.

    Attributes:
        token_count: tokens whose KV was moved.
        size_bytes: over all ranks.
        copy_s: seconds of copying, job after job, of each the slowest rank.
        failed_count: jobs that failed on some rank; their tokens and bytes are not counted.
    """

    token_count: int = 0
    size_bytes: int = 0
    copy_s: float = 0.0
    failed_count: int = 0

    def add(self, result: JobResult, *, token_count: int) -> None:
        """Count a job that every rank has reported."""
        if result.ranks_failed:
            self.failed_count += 1
            return
        self.token_count += token_count
        self.size_bytes += result.size_bytes
        self.copy_s += result.copy_s

    def rate_gbps(self) -> float:
        """Return GB (of 1024³ bytes) a second; 0 when nothing was copied."""
        return self.size_bytes / self.copy_s / GIB if self.copy_s > 0 else 0.0


@dataclass
class Receipt:
    """One request's transfers.

    Attributes:
        request_id: vLLM's.
        hand_out: called once with the receipt, at the end; None where nobody wants it.
        loaded: see `Transfers`.
        stored: see `Transfers`.
        open_jobs: jobs that some rank has not reported.
        is_finished: whether the request has ended.
    """

    request_id: str
    hand_out: Callable[["Receipt"], None] | None
    loaded: Transfers = field(default_factory=Transfers)
    stored: Transfers = field(default_factory=Transfers)
    open_jobs: int = 0
    is_finished: bool = False

    def open_job(self) -> None:
        """Note that a job was given to the workers, or is about to be."""
        self.open_jobs += 1

    def close_job(self) -> None:
        """Note that a job is over."""
        self.open_jobs -= 1
        self._hand_out_when_complete()

    def finish(self) -> None:
        """Note that the request has ended."""
        self.is_finished = True
        self._hand_out_when_complete()

    def _hand_out_when_complete(self) -> None:
        if self.is_finished and not self.open_jobs and self.hand_out is not None:
            hand_out, self.hand_out = self.hand_out, None
            hand_out(self)
