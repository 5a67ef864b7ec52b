"""How fast this engine computes a prompt and how fast its link loads one, measured as it runs.

A step that mostly prefills takes a constant, plus so much a token, plus so much for each token
that a token attends to. A load waits for the loads before it, takes a constant (until the step
that reports it has ended), and so much a byte, more where stores run beside it. Fed by
`gatekeeping` with real steps and loads; asked by `gate`.
"""

from dataclasses import dataclass

from kvcellar.clock import Clock
from kvcellar.engines.vllm.estimates import Fit, Recent

__all__ = [
    "LoadForecast", "LoadSpeed", "PrefillForecast", "PrefillSpeed", "Work", "work_of",
]  # fmt: skip

PREFILL_SAMPLES_MIN = 3
PREFILL_TOKENS_MIN = 16
"""Fewer tokens of a request in a step are decoding, or not worth a measurement."""
PREFILL_SHARE_MIN = 0.75
"""A step with a smaller part of prefilled tokens says nothing about prefilling."""
NOTHING_S = (0.0, 0.0, 0.0)
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

    def forecast(self) -> "PrefillForecast | None":
        """Return what is known now, None while that is not enough."""
        if self._fit.count < PREFILL_SAMPLES_MIN:
            return None
        prices_s = self._fit.prices_s()
        return PrefillForecast(self.step_tokens, *prices_s) if prices_s is not None else None

    def predict_s(self, work: Work) -> float | None:
        """Return the seconds to compute so much, None while that is not known."""
        forecast = self.forecast()
        return forecast.seconds(work.tokens, work.attended) if forecast is not None else None

    def token_s(self) -> float:
        """Return the seconds that one more token costs without context, 0 if not known."""
        forecast = self.forecast()
        return forecast.token_s if forecast is not None else 0.0


@dataclass(frozen=True, slots=True)
class PrefillForecast:
    """Prices of computing at one moment.

    Attributes:
        step_tokens: the most tokens that a step computes.
        step_s: seconds a step.
        token_s: seconds a token.
        attended_s: seconds for each token that a token attends to.
    """

    step_tokens: int
    step_s: float
    token_s: float
    attended_s: float

    def seconds(self, tokens: int, attended: float) -> float:
        """Return the seconds to compute so much; see `Work`."""
        steps = max(1.0, tokens / self.step_tokens)
        return steps * self.step_s + tokens * self.token_s + attended * self.attended_s

    def rest_s(self, computed: int, stop: int) -> float:
        """Return the seconds to compute the tokens [computed, stop) of one request."""
        count = stop - computed
        return self.seconds(count, count * (computed + 0.5 * count))


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
        beside = min(tokens, sum(self._stores.values()))
        sent_s = self._clock.monotonic_s()
        _bound(self._loads)
        self._loads[job_id] = _Load(tokens, beside, sent_s, self.copy_s(tokens))

    def begin_store(self, job_id: int, tokens: int) -> None:
        """Note a store that is given to the workers; called for each part, the largest counts."""
        _bound(self._stores)
        self._stores[job_id] = max(tokens, self._stores.get(job_id, 0))

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

    def forecast(self) -> "LoadForecast | None":
        """Return what is known now, None if nothing is.

        A load that takes longer than expected is news before it has ended: those behind it are
        expected to take as much longer.
        """
        extra_s, loads = self._extra.usual(), list(self._loads.values())
        if extra_s is None and not loads:
            return None
        extra_s = extra_s or 0.0
        sum_s = sum(load.copy_s for load in loads)
        ahead_s = extra_s + sum_s
        if loads:
            running_s = self._clock.monotonic_s() - max(self._free_s, loads[0].sent_s)
            late_s = running_s - loads[0].copy_s - extra_s
            ahead_s += max(0.0, late_s) * len(loads) - min(running_s, loads[0].copy_s)
        prices = tuple(fit.prices_s() or NOTHING_S for fit in self._fits)
        return LoadForecast(ahead_s, prices, sum(self._stores.values()), len(loads), sum_s)

    def copy_s(self, tokens: int) -> float:
        """Return the seconds that copying would take alone, 0 if not known."""
        prices = tuple(fit.prices_s() or NOTHING_S for fit in self._fits)
        return LoadForecast(0.0, prices, sum(self._stores.values()), 0, 0.0).copy_s(tokens)

    def predict_s(self, tokens: int) -> float | None:
        """Return the seconds until a load that begins now is reported, None if not known."""
        forecast = self.forecast()
        return forecast.ready_s(tokens) if forecast is not None else None

    def bytes_per_s(self) -> float:
        """Return the rate of a long load over all ranks, 0 if not known."""
        _, token_s, _ = self._fits[0].prices_s() or NOTHING_S
        return self._token_bytes / token_s if token_s > 0.0 else 0.0

    def overhead_s(self) -> float:
        """Return what a load costs beside its tokens, 0 if not known."""
        load_s, _, _ = self._fits[0].prices_s() or NOTHING_S
        return (self._extra.usual() or 0.0) + load_s


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """Prices of loading at one moment.

    Attributes:
        ahead_s: seconds that pass beside the copy itself, waiting for other loads included.
        prices: for each explanation of what was seen: seconds a load, a token, and a token beside
            a store.
        stored: tokens that are being stored.
        loads: loads that run or wait.
        loads_s: seconds that these copy.
    """

    ahead_s: float
    prices: tuple[tuple[float, ...], ...]
    stored: int
    loads: int
    loads_s: float

    def copy_s(self, tokens: int) -> float:
        """Return the seconds that copying takes."""
        beside = min(tokens, self.stored)
        return min(
            load_s + token_s * tokens + beside_s * beside
            for load_s, token_s, beside_s in self.prices
        )

    def ready_s(self, tokens: int) -> float:
        """Return the seconds until a load that begins now is reported."""
        return self.ahead_s + self.copy_s(tokens)

    def ending_within(self, seconds: float) -> float:
        """Return about how many of the loads that run or wait will end within a time from now."""
        return self.loads * min(1.0, seconds / self.loads_s) if self.loads_s > 0.0 else 0.0


def _bound(jobs: dict[int, _Load] | dict[int, int]) -> None:
    if len(jobs) >= JOBS_MAX:
        del jobs[next(iter(jobs))]
