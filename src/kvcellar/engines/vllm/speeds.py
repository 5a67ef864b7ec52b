"""How fast this engine computes a prompt and how fast its link loads one, measured as it runs.

A step that mostly prefills takes a constant, plus so much a token, plus so much for each token
that a token attends to. A load waits for the loads before it, takes a constant (until the step
that reports it has ended), and so much a byte, more where stores run beside it. Fed by
`gatekeeping` with real steps and loads; asked by `gate`.
"""

from dataclasses import dataclass

from kvcellar.clock import Clock
from kvcellar.engines.vllm.estimates import Fit, Recent

__all__ = ["LoadSpeed", "PrefillSpeed", "Work", "work_of"]

PREFILL_SAMPLES_MIN = 3
PREFILL_TOKENS_MIN = 16
"""Fewer tokens of a request in a step are decoding, or not worth a measurement."""
PREFILL_SHARE_MIN = 0.75
"""A step with a smaller part of prefilled tokens says nothing about prefilling."""
JOBS_MAX = 4096
"""Jobs that are accounted for at once; what a lost report leaves behind goes first."""


@dataclass(slots=True)
class Work:
    """What is to be computed.

    Attributes:
        tokens: in all.
        prefilled: those of them that are prefilled, not decoded.
        attended: for each token the tokens before it, summed up.
    """

    tokens: int = 0
    prefilled: int = 0
    attended: float = 0.0

    def add(self, computed: int, count: int) -> None:
        """Add a request's next `count` tokens, `computed` of which are there."""
        self.tokens += count
        self.attended += count * (computed + 0.5 * count)
        if count >= PREFILL_TOKENS_MIN:
            self.prefilled += count

    @property
    def is_prefill(self) -> bool:
        """Whether a step of this work says how fast prompts are computed."""
        return self.prefilled > 0 and self.prefilled >= PREFILL_SHARE_MIN * self.tokens


def work_of(computed: int, stop: int) -> Work:
    """Return the work of computing the tokens [computed, stop) of one request."""
    work = Work()
    work.add(computed, stop - computed)
    return work


class PrefillSpeed:
    """Seconds that computing takes."""

    def __init__(self, *, step_tokens: int, clock: Clock) -> None:
        """Know nothing.

        Args:
            step_tokens: the most tokens that a step computes.
            clock: for what is too old.
        """
        self.step_tokens = step_tokens
        # A prompt of always the same length says only how long it takes: that is first blamed on
        # its tokens, which makes hits look better than they are, not worse.
        self._fit = Fit((1e-2, 1e-4, 1e-3), clock)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step, if it has something to say about prefilling."""
        if work.is_prefill:
            self._fit.observe((1.0, work.tokens, work.attended), seconds)

    def predict_s(self, work: Work) -> float | None:
        """Return the seconds to compute so much, None while that is not known."""
        if self._fit.count < PREFILL_SAMPLES_MIN:
            return None
        steps = max(1.0, work.tokens / self.step_tokens)
        return self._fit.predict_s((steps, work.tokens, work.attended))

    def token_s(self) -> float:
        """Return the seconds that one more token costs without context, 0 if not known."""
        return self._fit.slope_s(1)


@dataclass(slots=True)
class _Load:
    tokens: int
    beside: int
    sent_s: float
    copy_s: float


class LoadSpeed:
    """Seconds that loading takes, with all that is on its way at the moment."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Loads of one size do not say what another size takes. Both explanations are kept, by the
        # tokens and by the constant, and the quicker one is believed: what is loaded then tells.
        self._fits = (Fit((1e-2, 1e-4, 1e-2), clock), Fit((1e-4, 1e-2, 1e-2), clock))
        self._extra = Recent(clock)
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, int] = {}
        self._free_s = 0.0
        self._token_bytes = 0.0

    def __len__(self) -> int:
        return len(self._loads)

    def begin_load(self, job_id: int, tokens: int) -> None:
        """Note a load that is given to the workers; it runs when those before it have ended."""
        beside = self._beside(tokens)
        sent_s = self._clock.monotonic_s()
        _bound(self._loads)
        self._loads[job_id] = _Load(tokens, beside, sent_s, self.copy_s(tokens))

    def begin_store(self, job_id: int, tokens: int) -> None:
        """Note a store that is given to the workers."""
        _bound(self._stores)
        self._stores[job_id] = tokens

    def end(
        self, job_id: int, *, copy_s: float, wait_s: float, size_bytes: int, is_good: bool
    ) -> None:
        """Note that a job is over, of whichever kind, and learn from a good load.

        Args:
            job_id: as it began.
            copy_s: seconds that the slowest rank copied.
            size_bytes: bytes that all ranks copied.
            wait_s: seconds that the job had to wait for others on the slowest rank.
            is_good: whether every rank copied everything.
        """
        self._stores.pop(job_id, None)
        load = self._loads.pop(job_id, None)
        if load is None:
            return
        now_s = self._clock.monotonic_s()
        self._free_s = now_s
        if is_good and load.tokens:
            self._token_bytes = size_bytes / load.tokens
            for fit in self._fits:
                fit.observe((1.0, load.tokens, load.beside), copy_s)
            self._extra.add(max(0.0, now_s - load.sent_s - wait_s - copy_s))

    def ending_within(self, seconds: float) -> float:
        """Return about how many of the loads that run or wait will end within a time from now."""
        total_s = sum(load.copy_s for load in self._loads.values())
        return len(self._loads) * min(1.0, seconds / total_s) if total_s > 0.0 else 0.0

    def copy_s(self, tokens: int) -> float:
        """Return the seconds that copying would take alone, 0 if not known."""
        features = (1.0, tokens, self._beside(tokens))
        return min(fit.predict_s(features) or 0.0 for fit in self._fits)

    def predict_s(self, tokens: int) -> float | None:
        """Return the seconds until a load that begins now is reported, None if not known.

        A load that takes longer than expected is news before it has ended: those behind it are
        expected to take as much longer.
        """
        extra_s = self._extra.usual()
        loads = list(self._loads.values())
        if extra_s is None and not loads:
            return None
        seconds = (extra_s or 0.0) + self.copy_s(tokens)
        if loads:
            running_s = self._clock.monotonic_s() - max(self._free_s, loads[0].sent_s)
            seconds += max(0.0, loads[0].copy_s - running_s)
            seconds += sum(load.copy_s for load in loads[1:])
            late_s = running_s - loads[0].copy_s - (extra_s or 0.0)
            seconds += max(0.0, late_s) * len(loads)
        return seconds

    def bytes_per_s(self) -> float:
        """Return the rate of a long load over all ranks, 0 if not known."""
        token_s = self._fits[0].slope_s(1)
        return self._token_bytes / token_s if token_s > 0.0 else 0.0

    def overhead_s(self) -> float:
        """Return what a load costs beside its tokens, 0 if not known."""
        return (self._extra.usual() or 0.0) + self._fits[0].slope_s(0)

    def _beside(self, tokens: int) -> int:
        return min(tokens, sum(self._stores.values()))


def _bound(jobs: dict[int, _Load] | dict[int, int]) -> None:
    if len(jobs) >= JOBS_MAX:
        del jobs[next(iter(jobs))]
