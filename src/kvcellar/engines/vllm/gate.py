"""The gate: a hit is loaded only as far as loading brings the first token sooner than computing.

Loading a short prompt, or over a busy link, can take longer than computing it again. The gate
compares the two by what `speeds` has measured, and refuses a hit only if it is expected to lose
clearly; who knows nothing takes the hit. What is refused teaches nothing, so a small part of the
computed time is spent on trying again, and what was measured long ago counts no more. Pure but for
the clock; used by `gatekeeping`. The reasons are in docs/decisions/0007.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvcellar.clock import Clock
from kvcellar.engines.vllm.speeds import (
    LoadForecast,
    LoadSpeed,
    PrefillForecast,
    PrefillSpeed,
)

__all__ = ["Gate", "GateCounts", "Hit", "Outcome", "Verdict"]

MARGIN = 0.05
MARGIN_S = 0.001
"""One way is clearly slower than another if by both: this part of it, and these seconds."""
EXPLORED_SHARE = 0.02
"""The part of the time of refused requests that may be lost by trying whether it is still so."""


class Outcome(enum.Enum):
    """What becomes of a hit."""

    TAKEN = "taken"
    """All of it is loaded."""
    SHORTENED = "shortened"
    """Its first chunks are loaded while others compute; the rest is computed sooner."""
    EXPLORED = "explored"
    """It is loaded to learn, although computing seems quicker."""
    REFUSED = "refused"
    """It is computed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request could load.

    Attributes:
        prompt_tokens: tokens that must be there before the request's next token.
        computed_tokens: leading ones that the engine has itself.
        stop_chunk: leading chunks that the server has; the last of them ends behind
            `computed_tokens`.
        chunk_tokens: tokens a chunk.
        waiting: requests that wait behind this one.
        is_divisible: whether a part of it can be loaded, too; a window is only good at its end.
    """

    prompt_tokens: int
    computed_tokens: int
    stop_chunk: int
    chunk_tokens: int
    waiting: int = 0
    is_divisible: bool = True

    @property
    def first_chunk(self) -> int:
        """Return the first chunk that the engine does not have in full."""
        return self.computed_tokens // self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a hit.

    Attributes:
        outcome: in a word.
        stop_chunk: load up to this chunk (exclusive); 0 for nothing.
        expected_s: seconds to the first token this way; None without knowledge.
        other_s: seconds that the best other way was expected to take; None without knowledge.
    """

    outcome: Outcome
    stop_chunk: int
    expected_s: float | None = None
    other_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """One length of the load.

    Attributes:
        stop_chunk: where it ends.
        ttft_s: seconds to the first token.
        cost_s: the same, and what others wait longer for it: those behind this request for the
            engine, and about as many as are on the link already for the link.
    """

    stop_chunk: int
    ttft_s: float
    cost_s: float


@dataclass
class GateCounts:
    """What the gate has decided since the start.

    Attributes:
        taken: see `Outcome`, as the next three.
        shortened: …
        explored: …
        refused: …
        regret_s: seconds by which ways took longer than the other one was expected to take.
    """

    taken: int = 0
    shortened: int = 0
    explored: int = 0
    refused: int = 0
    regret_s: float = 0.0


class Gate:
    """Decides; the speeds are fed by whoever sees steps and loads.

    Attributes:
        prefill: how fast prompts are computed.
        link: how fast they are loaded.
        counts: see `GateCounts`.
    """

    def __init__(self, *, step_tokens: int, clock: Clock) -> None:
        """Know nothing, and so take every hit.

        Args:
            step_tokens: the most tokens that a step of the engine computes.
            clock: see `Clock`.
        """
        self.prefill = PrefillSpeed(step_tokens=step_tokens, clock=clock)
        self.link = LoadSpeed(clock)
        self.counts = GateCounts()
        self._clock = clock
        self._allowance_s = 0.0
        self._busy_until_s = 0.0

    def note_queue(self, seconds: float) -> None:
        """Note how long the engine will compute for those that it runs already."""
        self._busy_until_s = self._clock.monotonic_s() + seconds

    def weigh(self, hit: Hit) -> Verdict:
        """Decide about a hit; may be asked any number of times before it is `settle`d."""
        prefill, link = self.prefill.forecast(), self.link.forecast()
        if prefill is None or link is None:
            return Verdict(Outcome.TAKEN, hit.stop_chunk)
        ways = _Ways(hit, prefill, link, self.queue_s())
        computed, full = ways.way(hit.first_chunk), ways.way(hit.stop_chunk)
        loaded = full
        shorter = min(ways.shorter(), key=lambda way: way.cost_s, default=full)
        if _is_clearly_worse(full.cost_s, shorter.cost_s):
            loaded = shorter
        if _is_clearly_worse(loaded.cost_s, computed.cost_s):
            loss_s = loaded.cost_s - computed.cost_s
            if loss_s > self._allowance_s:
                return Verdict(Outcome.REFUSED, 0, computed.ttft_s, loaded.ttft_s)
            return Verdict(Outcome.EXPLORED, loaded.stop_chunk, loaded.ttft_s, computed.ttft_s)
        if loaded is full:
            return Verdict(Outcome.TAKEN, full.stop_chunk, full.ttft_s, computed.ttft_s)
        other_s = min(full.ttft_s, computed.ttft_s)
        return Verdict(Outcome.SHORTENED, loaded.stop_chunk, loaded.ttft_s, other_s)

    def settle(self, verdict: Verdict) -> None:
        """Count a verdict that the engine acts upon."""
        counts = self.counts
        if verdict.outcome is Outcome.TAKEN:
            counts.taken += 1
        elif verdict.outcome is Outcome.SHORTENED:
            counts.shortened += 1
        elif verdict.outcome is Outcome.EXPLORED:
            counts.explored += 1
            # All of it: else what a long time has saved is lost in a row.
            self._allowance_s = 0.0
        else:
            counts.refused += 1
            self._allowance_s += EXPLORED_SHARE * (verdict.expected_s or 0.0)

    def judge(self, verdict: Verdict, seconds: float) -> None:
        """Add to the regret what a verdict's way took longer than the other was expected to.

        Args:
            verdict: one that was settled.
            seconds: from then until the prompt was there.
        """
        if verdict.other_s is not None:
            self.counts.regret_s += max(0.0, seconds - verdict.other_s)

    def queue_s(self) -> float:
        """Return how long a request that comes now waits for those that run."""
        return max(0.0, self._busy_until_s - self._clock.monotonic_s())


class _Ways:
    """What a hit's possible lengths come to, by what is known at one moment."""

    def __init__(
        self, hit: Hit, prefill: PrefillForecast, link: LoadForecast, queue_s: float
    ) -> None:
        self._hit = hit
        self._prefill = prefill
        self._link = link
        self._queue_s = queue_s

    def way(self, stop_chunk: int) -> _Way:
        """Return what loading the chunks up to one comes to."""
        hit, link = self._hit, self._link
        start = max(hit.computed_tokens, stop_chunk * hit.chunk_tokens)
        # Of a prompt that is there in full the last token is computed nevertheless.
        start = min(start, hit.prompt_tokens - 1)
        rest_s = self._prefill.rest_s(start, hit.prompt_tokens)
        ready_s = copy_s = 0.0
        if stop_chunk > hit.first_chunk:
            copy_s = link.copy_s(self._loaded(stop_chunk))
            ready_s = link.ahead_s + copy_s
        ttft_s = max(ready_s, self._queue_s) + rest_s
        others_s = rest_s * (hit.waiting + link.ending_within(rest_s)) + copy_s * link.loads
        return _Way(stop_chunk, ttft_s, ttft_s + others_s)

    def shorter(self) -> Iterator[_Way]:
        """Yield the shorter loads that can be best.

        The cost is concave in the length but at two places: where the load is over just as the
        engine gets free, and where the rest just fits into a step. So one of their neighbours is
        best, or the whole hit, or none of it; which spares looking at thousands of chunks.
        """
        hit = self._hit
        if not hit.is_divisible:
            return
        one_step = -(-(hit.prompt_tokens - self._prefill.step_tokens) // hit.chunk_tokens)
        for kink in (one_step, self._shadow()):
            for stop in (kink - 1, kink):
                if hit.first_chunk < stop < hit.stop_chunk:
                    yield self.way(stop)

    def _shadow(self) -> int:
        """Return the first stop whose load ends after the engine gets free."""
        low, high = self._hit.first_chunk + 1, self._hit.stop_chunk
        while low < high:
            middle = (low + high) // 2
            if self._link.ready_s(self._loaded(middle)) <= self._queue_s:
                low = middle + 1
            else:
                high = middle
        return low

    def _loaded(self, stop_chunk: int) -> int:
        return (stop_chunk - self._hit.first_chunk) * self._hit.chunk_tokens


def _is_clearly_worse(cost_s: float, other_s: float) -> bool:
    return cost_s > other_s + max(MARGIN_S, MARGIN * other_s)
