"""A simulated engine behind a simulated link: what a policy about hits costs, in virtual seconds.

Steps of a bounded number of tokens with attention that grows with the context, prompts first come
first served, loads one after the other on a link, reported when a step ends. Times have noise and,
now and then, an outlier. Everything follows from a seed, so that policies meet the same day.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace

from kvcellar.clock import FakeClock
from kvcellar.engines.vllm.gate import Gate, Hit, Outcome, Verdict
from kvcellar.engines.vllm.speeds import Work, work_of

CHUNK_TOKENS = 256
STEP_TOKENS = 8192
RUNNING_MAX = 64
POLL_S = 0.001
MORNING = 8


@dataclass(frozen=True)
class Machine:
    """An H200 with Llama-3.1-8B and PCIe Gen5, about."""

    step_s: float = 0.015
    token_s: float = 22e-6
    attended_s: float = 9e-10
    chunk_bytes: int = CHUNK_TOKENS * 131_072
    link_rate: float = 50e9
    load_s: float = 0.001
    noise: float = 0.05
    outliers: float = 0.01
    link_factor: object = staticmethod(lambda now_s: 1.0)
    gpu_factor: object = staticmethod(lambda now_s: 1.0)


@dataclass(frozen=True)
class Arrival:
    at_s: float
    tokens: int
    found_chunks: int


@dataclass
class _Request:
    arrival: Arrival
    computed: int = 0
    verdict: Verdict | None = None
    settled_s: float = 0.0


@dataclass
class _Load:
    request: _Request
    number: int
    sent_s: float
    start_s: float
    end_s: float


@dataclass
class World:
    """One day under one policy: "always", "never" or "gate"."""

    machine: Machine
    arrivals: list
    policy: str
    seed: int = 0
    ttfts: list = field(default_factory=list)

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.clock = FakeClock(0.0)
        self.gate = Gate(step_tokens=STEP_TOKENS, clock=self.clock)
        self.waiting = deque()
        self.running, self.loads = [], []
        self.link_free_s = 0.0
        self.loaded = 0

    @property
    def now_s(self):
        return self.clock.monotonic_s()

    def run(self):
        """Live through the day and return the sum of all times to the first token."""
        coming = deque(sorted(self.arrivals, key=lambda arrival: arrival.at_s))
        while coming or self.waiting or self.running or self.loads:
            while coming and coming[0].at_s <= self.now_s:
                self.waiting.append(_Request(coming.popleft()))
            if not self._step():
                ends = [load.end_s for load in self.loads]
                ends += [coming[0].at_s] if coming else []
                self.clock.advance(max(POLL_S, min(ends, default=0.0) - self.now_s))
            self._report()
        assert len(self.ttfts) == len(self.arrivals)
        return sum(self.ttfts)

    def _step(self):
        """Run a step; False when there was nothing to compute."""
        budget, work, ready = STEP_TOKENS, Work(), []
        for request in self.running:
            budget -= self._compute(request, budget, work, ready)
        while self.waiting and budget > 0 and len(self.running) + len(self.loads) < RUNNING_MAX:
            request = self.waiting.popleft()
            if not self._load(request):
                self.running.append(request)
                budget -= self._compute(request, budget, work, ready)
        if not work.tokens:
            return False
        left = [work_of(r.computed, r.arrival.tokens) for r in self.running if r not in ready]
        known = [self.gate.prefill.predict_s(part) or 0.0 for part in (work, *left)]
        self.gate.note_queue(sum(known))
        machine = self.machine
        seconds = machine.step_s + machine.token_s * work.tokens
        seconds += machine.attended_s * work.attended
        seconds *= machine.gpu_factor(self.now_s) * self._noise()
        self.clock.advance(seconds)
        self.gate.prefill.observe(work, seconds)
        for request in ready:
            self.running.remove(request)
            self.ttfts.append(self.now_s - request.arrival.at_s)
            if request.verdict is not None:
                self.gate.judge(request.verdict, self.now_s - request.settled_s)
        return True

    def _compute(self, request, budget, work, ready):
        count = min(budget, request.arrival.tokens - request.computed)
        if count > 0:
            work.add(request.computed, count)
            request.computed += count
            if request.computed == request.arrival.tokens:
                ready.append(request)
        return count

    def _load(self, request):
        """Send a request's load as far as the policy wants that; False to compute it."""
        found = request.arrival.found_chunks
        if not found or request.computed or self.policy == "never":
            return False
        machine = self.machine
        verdict = Verdict(Outcome.TAKEN, found)
        if self.policy == "gate":
            hit = Hit(
                request.arrival.tokens,
                0,
                found,
                CHUNK_TOKENS,
                len(self.waiting),
            )
            verdict = self.gate.weigh(hit)
            self.gate.settle(verdict)
            request.verdict, request.settled_s = verdict, self.now_s
        if not verdict.stop_chunk:
            return False
        self.loaded += 1
        size_bytes = verdict.stop_chunk * machine.chunk_bytes
        start_s = max(self.now_s, self.link_free_s)
        seconds = machine.load_s + size_bytes / machine.link_rate
        self.link_free_s = start_s + seconds * machine.link_factor(start_s) * self._noise()
        self.gate.link.begin_load(self.loaded, verdict.stop_chunk * CHUNK_TOKENS)
        self.loads.append(_Load(request, self.loaded, self.now_s, start_s, self.link_free_s))
        tokens = verdict.stop_chunk * CHUNK_TOKENS
        request.computed = min(tokens, request.arrival.tokens - 1)
        return True

    def _report(self):
        over = [load for load in self.loads if load.end_s <= self.now_s]
        self.loads = [load for load in self.loads if load.end_s > self.now_s]
        for load in over:
            self.gate.link.end(
                load.number,
                copy_s=load.end_s - load.start_s,
                wait_s=load.start_s - load.sent_s,
                size_bytes=1,
                is_good=True,
            )
            self.running.append(load.request)

    def _noise(self):
        if self.chance.random() < self.machine.outliers:
            return 8.0
        return self.chance.uniform(1.0 - self.machine.noise, 1.0 + 2.0 * self.machine.noise)


def arrivals(seed, *, count, per_s, tokens, found=1.0):
    """Return a day's prompts: lengths from a range, a part of them found.

    In the morning some are computed and a few are loaded, one at a time, so that speeds are known.
    """
    chance = random.Random(seed)
    made = []
    for turn in range(MORNING):
        length = chance.randint(*tokens)
        loaded = {MORNING - 2: 1, MORNING - 1: length // CHUNK_TOKENS}
        made.append(Arrival(10.0 * turn, length, loaded.get(turn, 0)))
    at_s = 10.0 * MORNING
    for _ in range(count):
        at_s += chance.expovariate(per_s)
        length = chance.randint(*tokens)
        hit = chance.random() < found
        made.append(Arrival(at_s, length, length // CHUNK_TOKENS if hit else 0))
    return made


def compare(machine, day, *, seed=0):
    """Return the three policies' sums, and the gate's world."""
    sums, gated = {}, None
    for policy in ("always", "never", "gate"):
        world = World(replace(machine), day, policy, seed)
        sums[policy] = world.run()
        gated = world
    return sums, gated
