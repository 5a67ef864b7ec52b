"""What the gate sees of the engine: steps begin and end, requests come, wait and are admitted.

A step is measured from when it was scheduled, or from the end of the step before where the engine
schedules ahead, until the workers' report of it is here. So pauses between steps count for nothing,
and steps in flight are told apart by their number, which the workers' reports carry back. Used by
the scheduler half, on the engine's thread.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvcellar.clock import Clock
from kvcellar.engines.vllm.gate import Gate, Hit, Outcome, Verdict
from kvcellar.engines.vllm.metadata import JobResult
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.engines.vllm.speeds import Work
from kvcellar.protocol.gate import GateFigures
from kvcellar.telemetry.logs import EventLog

__all__ = ["Gatekeeper"]

STEPS_MAX = 64
"""Steps in flight that are remembered; engines schedule one or two ahead."""

log = EventLog("vllm.kvcellar.gate")


@dataclass(slots=True)
class _Step:
    """A step in flight.

    Attributes:
        number: the workers report it by this.
        began_s: when it was scheduled.
        after: the step that was in flight then; 0 for none.
        work: what it computes.
        ready: verdicts about requests whose prompt it completes, and when they were settled.
            vLLM ends a request before it tells us of the step, so they are kept here.
    """

    number: int
    began_s: float
    after: int
    work: Work
    ready: list[tuple[Verdict, float]]


class Gatekeeper:
    """Stands at the gate of one engine."""

    def __init__(self, gate: Gate, *, is_on: bool, clock: Clock) -> None:
        """Begin with no request and no step.

        Args:
            gate: decides.
            is_on: False to let every hit pass and measure nothing.
            clock: for steps and requests.
        """
        self.gate = gate
        self._is_on = is_on
        self._clock = clock
        self._waiting: set[str] = set()
        self._verdicts: dict[str, Verdict] = {}
        self._watched: dict[str, tuple[Verdict, float]] = {}
        self._steps: deque[_Step] = deque(maxlen=STEPS_MAX)
        self._number = 0
        self._ended = (0, 0.0)
        self._told: object = None
        self._work, self._left, self._ready = Work(), Work(), list[tuple[Verdict, float]]()

    def arrive(self, request_id: str) -> None:
        """Note that a request waits for its turn, for the first time or after a preemption."""
        self._waiting.add(request_id)

    def leave(self, request_id: str) -> None:
        """Forget a request that has ended, or whose run was broken off."""
        self._waiting.discard(request_id)
        self._verdicts.pop(request_id, None)
        self._watched.pop(request_id, None)

    def choose(
        self,
        state: RequestState,
        *,
        computed_tokens: int,
        found_tokens: int,
        chunk_tokens: int,
        is_divisible: bool,
    ) -> int:
        """Return how many of the tokens that could be loaded are to be; may be asked again.

        Args:
            state: the request.
            computed_tokens: tokens that the engine has itself.
            found_tokens: tokens beyond those that the server has; above 0.
            chunk_tokens: tokens a chunk.
            is_divisible: see `Hit`.
        """
        if not self._is_on:
            return found_tokens
        hit = Hit(
            int(state.request.num_tokens),
            computed_tokens,
            (computed_tokens + found_tokens) // chunk_tokens,
            chunk_tokens,
            len(self._waiting) - (state.request_id in self._waiting),
            is_divisible,
        )
        verdict = self.gate.weigh(hit)
        self._verdicts[state.request_id] = verdict
        return max(0, verdict.stop_chunk * chunk_tokens - computed_tokens)

    def admit(self, request_id: str, *, loads: bool) -> Verdict | None:
        """Note that the engine admits a request, and return the verdict that it acts upon, if any.

        Args:
            request_id: the request's.
            loads: whether it loads what `choose` returned; else nothing, or from elsewhere.
        """
        self._waiting.discard(request_id)
        verdict = self._verdicts.pop(request_id, None)
        if verdict is None or loads == (verdict.outcome is Outcome.REFUSED):
            return None
        self.gate.settle(verdict)
        self._watched[request_id] = (verdict, self._clock.monotonic_s())
        log.debug(
            "gate decided", request_id=request_id, outcome=verdict.outcome.value,
            chunks=verdict.stop_chunk, expected_s=verdict.expected_s, other_s=verdict.other_s,
            queue_s=self.gate.queue_s(), loads=len(self.gate.link), waiting=len(self._waiting),
        )  # fmt: skip
        return verdict

    def begin_load(self, job_id: int, tokens: int) -> None:
        """Note a load that is about to be given to the workers."""
        self.gate.link.begin_load(job_id, tokens)

    def begin_store(self, job_id: int, tokens: int) -> None:
        """Note a store that is about to be given to the workers."""
        self.gate.link.begin_store(job_id, tokens)

    def measures(self, *, tokens: int, requests: int) -> bool:
        """Return whether `schedule` wants to know of a step's requests; not if all only decode."""
        return self._is_on and (tokens > requests or bool(self._watched))

    def schedule(self, state: RequestState, *, computed: int, count: int) -> None:
        """Note what the step that is being made computes of a request.

        Args:
            state: the request.
            computed: its tokens that are there before the step.
            count: tokens that the step computes.
        """
        self._work.add(computed, count)
        stop = computed + count
        left = state.request.num_tokens - stop
        if left > 0:
            self._left.add(stop, left)
        elif state.request_id in self._watched:
            self._ready.append(self._watched.pop(state.request_id))

    def begin_step(self, tokens: int) -> int:
        """End the noting of a step that is given to the workers now, and return its number.

        Args:
            tokens: that the step computes.

        Returns:
            0 for a step that computes nothing, or when the gate is off: nobody needs its end.
        """
        if not self._is_on or not tokens:
            return 0
        work, left, ready = self._work, self._left, self._ready
        self._work, self._left, self._ready = Work(), Work(), []
        self._number += 1
        after = self._steps[-1].number if self._steps else 0
        now_s = self._clock.monotonic_s()
        self._steps.append(_Step(self._number, now_s, after, work, ready))
        prefill = self.gate.prefill
        queue = [part for part in (work, left) if part.prefilled]
        self.gate.note_queue(sum(prefill.predict_s(part) or 0.0 for part in queue))
        return self._number

    def learn(self, number: int, jobs: Mapping[int, JobResult]) -> None:
        """Learn from what the workers report.

        Args:
            number: of the step that has ended; 0 is none.
            jobs: results of loads and stores that every rank has reported, by job id.
        """
        now_s = self._clock.monotonic_s()
        while self._steps and self._steps[0].number <= number:
            step = self._steps.popleft()
            if step.number == number:
                self._measure(step, now_s)
        for job_id, result in jobs.items():
            self.gate.link.end(
                job_id,
                copy_s=result.copy_s,
                wait_s=result.wait_s,
                size_bytes=result.size_bytes,
                is_good=not result.ranks_failed,
            )

    def has_news(self, bound: object) -> bool:
        """Return whether servers were not told yet what the gate has decided; then they are."""
        news = (id(bound), msgspec.structs.astuple(self.figures())[:5])
        is_new, self._told = news != self._told, news
        return is_new

    def figures(self) -> GateFigures:
        """Return what the gate has decided and knows, for the server's metrics."""
        gate = self.gate
        counts = gate.counts
        return GateFigures(
            taken=counts.taken,
            shortened=counts.shortened,
            explored=counts.explored,
            refused=counts.refused,
            regret_s=counts.regret_s,
            prefill_token_s=gate.prefill.token_s(),
            load_overhead_s=gate.link.overhead_s(),
            load_bytes_per_s=gate.link.bytes_per_s(),
        )

    def _measure(self, step: _Step, now_s: float) -> None:
        ended, ended_s = self._ended
        self._ended = (step.number, now_s)
        if step.after in {0, ended}:
            began_s = max(step.began_s, ended_s)
            self.gate.prefill.observe(step.work, now_s - began_s)
        for verdict, since_s in step.ready:
            self.gate.judge(verdict, now_s - since_s)
