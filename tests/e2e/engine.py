"""Run a real `vllm serve` and talk to it as a user does; `device` says on what.

What the tests rely on, measured on vLLM 0.32.0's CPU build (two cores, one OMP thread):

* It starts in 24 s with the tiny model when nothing else runs, nearly all of it imports in three
  processes (API server, EngineCore, Worker); with tensor parallel 2 it takes no longer. The first
  request takes some seconds more. SIGTERM ends it in half a second: its EngineCore and workers
  are killed, so no hook of a connector runs then.
* Greedy answers and log-probabilities of a cold prompt, of one whose prefix vLLM holds itself, of
  one prefilled in pieces and of one in a full batch are equal to the bit in float32.
* Blocks are 128 tokens, so a chunk of 256 is two of them. Without triton-cpu the V1 model runner
  serves, asynchronous scheduling is off, and the scheduler's steps follow each other.
* A prefix hit never covers the whole prompt: at least one token is computed.
"""

import http.client
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.e2e.device import DEVICE
from tests.e2e.processes import NO_REUSE, Program, eventually, free_port

__all__ = ["BLOCK_TOKENS", "Answer", "Counters", "Engine", "assert_same_answer", "start_together"]

BLOCK_TOKENS = DEVICE.block_tokens
START_S = 150.0
REQUEST_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What a completion said.

    Attributes:
        tokens: ids of the generated tokens.
        logprobs: of each generated token.
        cached_tokens: prompt tokens that were not computed, from whichever cache.
        ttft_s: seconds from the request to the first token; 0 when not streamed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    ttft_s: float = 0.0


@dataclass(frozen=True)
class Counters:
    """Prometheus counters of one engine, in tokens unless the name says otherwise."""

    own_queries: int
    own_hits: int
    external_queries: int
    external_hits: int
    preemptions: int

    def __sub__(self, other: "Counters") -> "Counters":
        mine, others = vars(self), vars(other)
        return Counters(**{name: mine[name] - others[name] for name in mine})


_COUNTER_NAMES = {
    "own_queries": "vllm:prefix_cache_queries_total",
    "own_hits": "vllm:prefix_cache_hits_total",
    "external_queries": "vllm:external_prefix_cache_queries_total",
    "external_hits": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


class Engine(Program):
    """One `vllm serve`."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        folder: Path,
        transfer: dict[str, object] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Prepare it; nothing runs yet.

        Args:
            name: names the log, too.
            model: folder of the model, served under the name "m".
            folder: where the log goes.
            transfer: what `--kv-transfer-config` says; None for an engine without connector.
            options: further words of the command line.
        """
        self.port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", *DEVICE.options, "--enable-prompt-tokens-details"]
        command += ["--disable-uvicorn-access-log"]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(name, [*command, *options], folder=folder)
        self.ports = (self.port,)
        # vLLM leaves sockets in the folder for temporary files when its processes are killed; a
        # socket's path may have 107 characters.
        self._scratch = tempfile.mkdtemp(prefix="e2e-")
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_S, limits=NO_REUSE
        )

    def start(self, environment: dict[str, str] | None = None) -> None:
        """Start it; `wait_until_ready` tells when it serves."""
        super().start({**DEVICE.environment, "TMPDIR": self._scratch, **(environment or {})})

    def close(self) -> None:
        """Close the connection to it and remove what it left."""
        self.http.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it answers /health; fail when it dies first or takes too long."""
        self.wait_until(self._is_healthy, timeout_s, what="health")

    def _is_healthy(self) -> bool:
        try:
            return self.http.get("/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def complete(self, prompt: Sequence[int], **options: object) -> Answer:
        """Complete a prompt of token ids greedily; `options` are fields of the request's body."""
        reply = self.http.post("/v1/completions", json=_body(prompt, options))
        assert reply.status_code == 200, f"{self.name}: {reply.status_code} {reply.text}"
        return _answer(reply.json())

    def complete_or_break(self, prompt: Sequence[int]) -> None:
        """Ask for a completion of an engine that is about to be killed."""
        try:
            self.http.post("/v1/completions", json=_body(prompt, {}))
        except httpx.TransportError:
            assert not self.is_alive or not self._is_healthy()

    def stream(self, prompt: Sequence[int], **options: object) -> Answer:
        """Complete a prompt as a stream and say when its first token came."""
        body = {**_body(prompt, options), "stream": True, "stream_options": {"include_usage": True}}
        started = time.monotonic()
        ttft_s = math.nan
        tokens: list[int] = []
        logprobs: list[float] = []
        cached = 0
        with self._events(body) as events:
            for event in events:
                for choice in event["choices"]:
                    if not tokens:
                        ttft_s = time.monotonic() - started
                    tokens += choice["token_ids"]
                    logprobs += choice["logprobs"]["token_logprobs"]
                if event.get("usage"):
                    cached = _cached_tokens(event["usage"])
        return Answer(tuple(tokens), tuple(logprobs), cached, ttft_s)

    def abort_stream(self, prompt: Sequence[int], after_tokens: int, **options: object) -> int:
        """Start a stream and hang up after some tokens (0: at once); returns tokens received."""
        received = 0
        with self._events({**_body(prompt, options), "stream": True}) as events:
            if after_tokens == 0:
                return 0
            for event in events:
                received += sum(len(choice["token_ids"]) for choice in event["choices"])
                if received >= after_tokens:
                    break
        return received

    def hang_up(self, prompt: Sequence[int], *, when: Callable[[], object]) -> None:
        """Ask for a completion and hang up, before any token, as soon as `when` is true."""
        body = json.dumps({**_body(prompt, {}), "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        with closing(connection):
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            eventually(when, REQUEST_S, what="the moment to hang up")

    @contextmanager
    def _events(self, body: dict[str, object]) -> Iterator[Iterator[dict[str, object]]]:
        """Yield the events of a stream; leaving the block closes the connection."""
        with (
            httpx.Client(base_url=self.http.base_url, timeout=REQUEST_S) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            assert reply.status_code == 200, f"{self.name}: {reply.read().decode()}"
            with closing(reply.iter_lines()) as lines:
                yield _decoded(lines)

    def reset_prefix_cache(self, timeout_s: float = 10.0, *, external: bool = False) -> None:
        """Empty vLLM's own prefix cache; asked until it says success, for pins end by and by."""

        def reset() -> bool:
            parameters = {"reset_external": "true"} if external else {}
            reply = self.http.post("/reset_prefix_cache", params=parameters)
            return reply.json()["success"]

        eventually(reset, timeout_s, what=f"a successful reset of {self.name}'s prefix cache")

    def counters(self) -> Counters:
        """Read the counters that prove where a prompt's KV came from."""
        values = self.metrics()
        return Counters(
            **{field: int(values.get(name, 0)) for field, name in _COUNTER_NAMES.items()}
        )

    def metrics(self) -> dict[str, float]:
        """Read all of /metrics, summed over labels."""
        sums: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        values = self.metrics()
        return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"] == 0

    def mapped_arenas(self) -> set[str]:
        """Return the inodes of the arenas that its processes have mapped."""
        inodes = set()
        for process in self.members():
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
                if "memfd:kvcellar" in line:
                    inodes.add(line.split()[4])
        return inodes

    def process(self, title: str) -> int:
        """Return the pid of its one process whose title begins so, e.g. "VLLM::EngineCore"."""
        (found,) = [p.pid for p in self.members() if " ".join(p.cmdline()).startswith(title)]
        return found


def start_together(*engines: Engine) -> None:
    """Start several engines, at once where the device allows that: two cores are faster then.

    Each has answered a request then: the first one takes seconds, and has a connector bind its
    namespace.
    """
    for engine in engines:
        engine.start()
        if not DEVICE.starts_at_once:
            engine.wait_until_ready()
    for engine in engines:
        engine.wait_until_ready(2 * START_S)
    for engine in engines:
        engine.complete([3])


def assert_same_answer(answer: Answer, expected: Answer) -> None:
    """Check that two answers are the same tokens with the same log-probabilities."""
    assert answer.tokens == expected.tokens
    for position, (mine, theirs) in enumerate(zip(answer.logprobs, expected.logprobs, strict=True)):
        assert math.isclose(mine, theirs, abs_tol=DEVICE.logprob_tolerance), (
            f"token {position}: {mine} instead of {theirs}"
        )


def _body(prompt: Sequence[int], options: dict[str, object]) -> dict[str, object]:
    body: dict[str, object] = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return {**body, **options}


def _answer(body: dict[str, object]) -> Answer:
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length", body
    return Answer(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        _cached_tokens(body["usage"]),
    )


def _cached_tokens(usage: dict[str, object]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def _decoded(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
