"""Times to the first token of vLLM over several KV layers, on the same prompts, one after another.

Every prompt is random token ids, the same for each layer, sent cold, again (vLLM's own hit, which
no layer can beat), and after a reset of vLLM's cache (the layer's hit). A burst sends many prompts
at once in the same three ways. Before all that, short prompts follow each other for some seconds
right after the engine says that it is healthy, when a layer may still prepare its memory.

Each case's figures are kept in a file of their own as soon as it is over, so that a run can go on
where an earlier one stopped. Driven by `scripts/bench_gpu.py`; a GPU is not needed to try it.
"""

import contextlib
import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvcellar.bench.layers import Layer
from kvcellar.bench.node import free_port
from kvcellar.bench.programs import BenchError, Program, Programs, pause
from kvcellar.bench.web import MODEL_NAME, counter, is_healthy, reset_prefix_cache
from kvcellar.clock import Clock

__all__ = ["Burst", "Case", "Engine", "Hit", "Work", "keep", "kept", "measure_case"]

_HITS = "vllm:external_prefix_cache_hits_total"
_SERVER_READY_S = 90.0
_ENGINE_READY_S = 300.0
_PREPARED_S = 120.0
_ANSWER_S = 300.0
_STORED_S = 1.5
"""Until a layer has surely stored what was computed last; the same for each."""
_WARM_UP_TOKENS = 600
_EARLY_TOKENS = 1024


class Hit(msgspec.Struct, frozen=True):
    """One prompt, sent three times; seconds to the answer of one token.

    Attributes:
        cold_s: nothing was cached.
        own_s: vLLM had it.
        layer_s: only the layer had it.
        hit_tokens: that the layer gave, as vLLM counts them; of a layer's hit only.
        is_same_text: whether cold and the layer's hit gave the same token.
    """

    cold_s: float
    own_s: float
    layer_s: float
    hit_tokens: int
    is_same_text: bool


class Burst(msgspec.Struct, frozen=True):
    """Seconds until all prompts of a burst were answered; see `Hit`."""

    cold_s: float
    own_s: float
    layer_s: float
    hit_tokens: int


class Case(msgspec.Struct):
    """What was seen of one layer.

    Attributes:
        name: of the case.
        kv_bytes_share: see `Layer`.
        trouble: why it could not be measured, or not to its end.
        early_s: seconds of each prompt in the first seconds after the engine's start.
        prepared_s: seconds from the engine's health until it was prepared; None where nothing says.
        hits: by the prompt's tokens.
        burst: of the burst.
        took_s: of the whole case.
    """

    name: str
    kv_bytes_share: float = 1.0
    trouble: str = ""
    early_s: list[float] = []
    prepared_s: float | None = None
    hits: dict[int, list[Hit]] = {}
    burst: Burst | None = None
    took_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """What each engine is asked.

    Attributes:
        lengths: tokens of the prompts.
        repeats: prompts of each length.
        burst_count: prompts of the burst; 0 for none.
        burst_tokens: tokens of each.
        early_s: how long the first prompts follow each other.
        seed: of the tokens.
    """

    lengths: Sequence[int]
    repeats: int
    burst_count: int
    burst_tokens: int
    early_s: float
    seed: int = 7


@dataclass(frozen=True)
class Engine:
    """How vLLM is started.

    Attributes:
        words: the command, without port and transfer.
        environment: variables.
    """

    words: Sequence[str]
    environment: Mapping[str, str]


Say = Callable[[str], None]


def measure_case(
    layer: Layer, engine: Engine, *, work: Work, programs: Programs, clock: Clock, say: Say
) -> Case:
    """Start a layer's server and vLLM, measure, and stop them; a failure is in `Case.trouble`."""
    name = layer.name
    case = Case(name, kv_bytes_share=layer.kv_bytes_share, trouble=layer.missing)
    if layer.missing:
        say(f"{name}: left out, {layer.missing}")
        return case
    started_s = clock.monotonic_s()
    try:
        if layer.server:
            server = programs.start(f"{name}-server", layer.server, environment=layer.environment)
            port, path = layer.ready
            programs.wait_until(server, lambda: is_healthy(port, path), timeout_s=_SERVER_READY_S)
        _Run(layer, engine, work=work, programs=programs, clock=clock, say=say).fill(case)
    except (BenchError, OSError, http.client.HTTPException) as error:
        case.trouble = str(error) or repr(error)
        say(f"{name}: {case.trouble}")
    finally:
        programs.stop_all()
    case.took_s = clock.monotonic_s() - started_s
    return case


class _Run:
    """One engine that runs over one layer."""

    def __init__(
        self,
        layer: Layer,
        engine: Engine,
        *,
        work: Work,
        programs: Programs,
        clock: Clock,
        say: Say,
    ) -> None:
        name = layer.name
        self._name = name
        self._layer = layer
        self._work = work
        self._say = say
        self._clock = clock
        self._random = np.random.default_rng(work.seed)
        self._port = free_port()
        words = [*engine.words, "--served-model-name", MODEL_NAME]
        words += ["--host", "127.0.0.1", "--port", str(self._port)]
        if layer.transfer is not None:
            words += ["--kv-transfer-config", json.dumps(layer.transfer)]
        environment = {**engine.environment, **layer.environment}
        self._program: Program = programs.start(f"{name}-vllm", words, environment=environment)
        ready_s = programs.wait_until(
            self._program,
            lambda: is_healthy(self._port, "/health"),
            timeout_s=_ENGINE_READY_S,
        )
        self._healthy_s = self._clock.monotonic_s()
        say(f"{name}: vLLM is healthy after {ready_s:.0f} s")

    def fill(self, case: Case) -> None:
        """Measure everything."""
        self._early(case)
        self._await_prepared(case)
        self._answer(self._prompt(_WARM_UP_TOKENS))
        for length in self._work.lengths:
            case.hits[length] = [self._hit(length) for _ in range(self._work.repeats)]
            shown = [(h.cold_s, h.own_s, h.layer_s, h.hit_tokens) for h in case.hits[length]]
            cells = "  ".join(f"{c:.3f}/{o:.3f}/{h:.3f} ({t:,})" for c, o, h, t in shown)
            self._say(f"{self._name:13s} {length:6,} tokens, cold/own/layer (hit tokens): {cells}")
            if not all(hit.is_same_text for hit in case.hits[length]):
                self._say(f"{self._name}: a hit of {length:,} tokens gave another token than cold")
        if self._work.burst_count:
            case.burst = self._burst()
            self._say(f"{self._name:13s} burst, cold/own/layer: {case.burst}")

    def _early(self, case: Case) -> None:
        while self._clock.monotonic_s() - self._healthy_s < self._work.early_s:
            took_s, _ = self._answer(self._prompt(_EARLY_TOKENS))
            case.early_s.append(round(took_s, 4))
        if case.early_s:
            self._say(
                f"{self._name}: slowest of {len(case.early_s)} prompts of {_EARLY_TOKENS} tokens "
                f"in the first {self._work.early_s:.0f} s: {max(case.early_s):.3f} s"
            )

    def _await_prepared(self, case: Case) -> None:
        """Wait until the engine's log says that memory is prepared, where that is ever said."""
        if not self._layer.prepared:
            return
        words = self._layer.prepared.encode()
        end_s = self._clock.monotonic_s() + _PREPARED_S
        while words not in self._program.log.read_bytes():
            if self._clock.monotonic_s() > end_s:
                self._say(f"{self._name}: nothing says that its memory is prepared; going on")
                return
            pause(0.1)
        case.prepared_s = self._clock.monotonic_s() - self._healthy_s
        self._say(f"{self._name}: memory prepared within {case.prepared_s:.0f} s of health")

    def _hit(self, length: int) -> Hit:
        prompt = self._prompt(length)
        cold_s, text = self._answer(prompt)
        own_s, _ = self._answer(prompt)
        layer_s, layer_text, tokens = self._after_reset(lambda: self._answer(prompt))
        reset_prefix_cache(self._port)
        return Hit(round(cold_s, 4), round(own_s, 4), round(layer_s, 4), tokens, text == layer_text)

    def _burst(self) -> Burst:
        prompts = [self._prompt(self._work.burst_tokens) for _ in range(self._work.burst_count)]

        def all_at_once() -> tuple[float, str]:
            start_s = self._clock.monotonic_s()
            with ThreadPoolExecutor(len(prompts)) as pool:
                list(pool.map(self._answer, prompts))
            return self._clock.monotonic_s() - start_s, ""

        (cold_s, _), (own_s, _) = all_at_once(), all_at_once()
        layer_s, _, tokens = self._after_reset(all_at_once)
        return Burst(round(cold_s, 3), round(own_s, 3), round(layer_s, 3), tokens)

    def _after_reset(self, ask: Callable[[], tuple[float, str]]) -> tuple[float, str, int]:
        """Have vLLM forget, ask again, and say how many tokens the layer gave."""
        pause(_STORED_S)
        reset_prefix_cache(self._port)
        before = counter(self._port, _HITS)
        took_s, text = ask()
        return took_s, text, int(counter(self._port, _HITS) - before)

    def _prompt(self, length: int) -> list[int]:
        tokens: list[int] = self._random.integers(1_000, 40_000, length).tolist()
        return tokens

    def _answer(self, prompt: Sequence[int]) -> tuple[float, str]:
        """Return the seconds to an answer of one token, and its text."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        encoded, headers = json.dumps(body), {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            start_s = self._clock.monotonic_s()
            connection.request("POST", "/v1/completions", encoded, headers)
            reply = connection.getresponse()
            text = reply.read().decode()
            took_s = self._clock.monotonic_s() - start_s
        if reply.status != http.client.OK:
            raise BenchError(f"vLLM answered {reply.status}: {text[:300]}")
        return took_s, str(json.loads(text)["choices"][0]["text"])


def keep(case: Case, folder: Path) -> None:
    """Write a case's figures to its file, all or nothing."""
    path = folder / f"{case.name}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1))
    scratch.replace(path)


def kept(folder: Path, name: str) -> Case | None:
    """Return what an earlier run has kept of a case, None where that is nothing whole."""
    try:
        return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Case)
    except (OSError, msgspec.MsgspecError):
        return None
