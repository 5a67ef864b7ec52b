#!/usr/bin/env python3
"""Show what kvcellar is for, with real vLLM on this machine's CPU: `make demo`.

One cache server and one vLLM are started with the commands of LMCache's guide. Three questions
about one long text are asked cold, then again from vLLM's own cache, then after that cache was
reset, and at last to a second vLLM that never saw the text. The table and the plot show the time
to the first token, the counters show where the prefix came from, and the answers are compared.
Everything is stopped at the end, also on Ctrl-C or failure. Needs only the standard library, and
the environment that `make setup` makes.
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path(".stack/model")
LOGS = ROOT / ".stack" / "demo"
PROGRAMS = ROOT / ".venv" / "bin"

SERVER_PORT, SERVER_HTTP_PORT = 6555, 8090
ENGINE_PORTS = (8001, 8002)
PATIENCE_S = 240.0
ANSWER_TOKENS = 20
BAR_CHARACTERS = 44

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # Offers POST /reset_prefix_cache.
    # One thread an engine: OMP threads that spin on few cores slow each other down many times.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

WINES = ("Riesling", "Merlot", "Malbec", "Barolo", "Rioja", "Chablis", "Port", "Madeira", "Cava")
TOWNS = (
    "Trier",
    "Bordeaux",
    "Mendoza",
    "Alba",
    "Haro",
    "Auxerre",
    "Porto",
    "Funchal",
    "Sant Sadurni",
)
QUESTIONS = (7, 23, 41)


class DemoError(Exception):
    """Something that the demo shows did not come out; the message says what."""


@dataclass
class Program:
    """A started program: its process, and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """Return the last lines that it wrote."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])


@dataclass(frozen=True)
class Answer:
    """What a question came to, and how long its first token took."""

    text: str
    ttft_s: float


@dataclass
class Stage:
    """Under which circumstances the questions were asked, and the answers."""

    name: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """The median time to the first token."""
        return sorted(answer.ttft_s for answer in self.answers)[len(self.answers) // 2]


class Troupe:
    """All programs of the demo; stops them, whatever happened, in the reverse order."""

    def __init__(self, scratch: str) -> None:
        """Begin with nobody on stage.

        Args:
            scratch: a folder for temporary files: vLLM leaves sockets there when it is stopped.
        """
        self._programs: list[Program] = []
        self._scratch = scratch

    def start(self, name: str, command: Sequence[str], environment: dict[str, str]) -> Program:
        """Start a program in a session of its own; the kernel ends it should the demo be killed."""
        say(f"$ {shlex.join(command)}")
        log = LOGS / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
                    "TMPDIR": self._scratch,
                    **environment,
                },
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - the demo has no other thread here.
            )
        program = Program(name, process, log)
        self._programs.append(program)
        return program

    def stop(self) -> None:
        """End every program with all that it started; never raises, never waits for ever."""
        for program in reversed(self._programs):
            with contextlib.suppress(ProcessLookupError):
                program.process.terminate()
        deadline = time.monotonic() + 20
        for program in reversed(self._programs):
            try:
                program.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{program.name} did not end by itself")
            # What the program started and left is in its session, whose id is its pid.
            _kill_session(program.process.pid)
            program.process.wait()
        self._programs.clear()


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _kill_session(session: int) -> None:
    """End what is left of a session, with time for vLLM's processes to go by themselves."""
    deadline = time.monotonic() + 10
    while pids := _session_members(session):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session_members(session: int) -> list[int]:
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(folder.name))
    return members


def say(text: str = "") -> None:
    """Show a line at once."""
    print(text, flush=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what happens now, sign of life every ten seconds, and how long it took."""
    say(f"… {what}")
    started = time.monotonic()
    is_over = threading.Event()

    def show_life() -> None:
        while not is_over.wait(10):
            say(f"  … {time.monotonic() - started:.0f} s")

    life = threading.Thread(target=show_life, daemon=True)
    life.start()
    try:
        yield
    finally:
        is_over.set()
        life.join()
    say(f"  done in {time.monotonic() - started:.1f} s")


def free_port(wished: int) -> int:
    """Return `wished`, or any free port where somebody has that one already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wished))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            say(f"  port {wished} is taken; using {probe.getsockname()[1]}")
        return int(probe.getsockname()[1])


def fetch(port: int, path: str, *, body: dict[str, object] | None = None) -> str:
    """Ask a program of the demo over HTTP and return the body of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != http.client.OK:
            raise DemoError(f"{path} answered {reply.status}: {text[:300]}")
        return text


def wait_for(program: Program, port: int, path: str) -> None:
    """Wait until a program answers with success; fail with its log when it ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, DemoError):
            fetch(port, path)
            return
        if program.process.poll() is not None:
            raise DemoError(f"{program.name} ended; {program.log} says:\n{program.tail()}")
        if time.monotonic() > deadline:
            raise DemoError(f"{program.name} is not ready after {PATIENCE_S:.0f} s: {program.log}")
        time.sleep(0.1)


def reset_engine(port: int) -> None:
    """Empty vLLM's own prefix cache; asked until it says success, since blocks may be in use."""
    deadline = time.monotonic() + 30
    while not json.loads(fetch(port, "/reset_prefix_cache", body={}))["success"]:
        if time.monotonic() > deadline:
            raise DemoError("vLLM's prefix cache could not be reset within 30 s")
        time.sleep(0.05)


def counters(port: int, *names: str) -> list[int]:
    """Read counters of a /metrics page, each summed over its labels."""
    sums = dict.fromkeys(names, 0.0)
    for line in fetch(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name in sums:
            sums[name] += float(value)
    return [int(sums[name]) for name in names]


def objects(http_port: int) -> int:
    """Read how many objects the server holds, as the guide does with curl."""
    page = json.loads(fetch(http_port, "/status"))
    return int(page["storage_manager"]["l1_manager"]["total_object_count"])


def wait_until_stored(http_port: int) -> None:
    """Wait until the objects are there and nothing is being written any more."""
    deadline = time.monotonic() + 30
    while True:
        l1 = json.loads(fetch(http_port, "/status"))["storage_manager"]["l1_manager"]
        if l1["total_object_count"] > 0 and l1["write_locked_count"] == 0:
            return
        if time.monotonic() > deadline:
            raise DemoError("nothing was stored within 30 s of the answer")
        time.sleep(0.05)


def document(shelves: int) -> str:
    """Return a text whose every sentence an answer may depend on."""
    lines = ["The inventory of a wine cellar, shelf by shelf.\n"]
    for shelf in range(1, shelves + 1):
        wine = WINES[shelf * 7 % len(WINES)]
        town = TOWNS[(shelf * 5 + shelf // 9) % len(TOWNS)]
        bottles, year = 12 + shelf * 37 % 88, 1950 + shelf * 29 % 70
        lines.append(f"Shelf {shelf} holds {bottles} bottles of {wine} from {town}, {year}.")
    return "\n".join(lines)


def ask(port: int, text: str, shelf: int) -> Answer:
    """Ask about one shelf, as a stream, and time the first token."""
    prompt = f"{text}\n\nQuestion: What is on shelf {shelf}?\nAnswer: Shelf {shelf} holds"
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        started = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise DemoError(f"vLLM answered {reply.status}: {reply.read().decode()[:300]}")
        ttft_s, words = 0.0, []
        for line in reply:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"vLLM reported {event['error']}")
            ttft_s = ttft_s or time.monotonic() - started
            words += [choice["text"] for choice in event["choices"]]
    return Answer("".join(words).split("\n")[0].strip(), ttft_s)


def run_stage(
    name: str, port: int, text: str, *, before_each: Callable[[], None] | None = None
) -> Stage:
    """Ask all questions under one circumstance and show each answer as it comes."""
    stage = Stage(name)
    say(f"… {name}")
    for shelf in QUESTIONS:
        if before_each is not None:
            before_each()
        answer = ask(port, text, shelf)
        stage.answers.append(answer)
        say(f"  {answer.ttft_s:7.2f} s   shelf {shelf} holds {answer.text}")
    return stage


def engine_command(port: int, server_port: int) -> list[str]:
    """Return the guide's own command for vLLM, with the CPU's settings."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": server_port,
        },
    }
    command = ["vllm", "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "smollm2", "--max-model-len", "8192"]
    command += ["--dtype", "float32", "--enforce-eager"]
    return [*command, "--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]


def perform(troupe: Troupe, shelves: int) -> tuple[list[Stage], list[str]]:
    """Run the whole demo; returns the stages and what the counters say."""
    server_port, http_port = free_port(SERVER_PORT), free_port(SERVER_HTTP_PORT)
    ports = [free_port(port) for port in ENGINE_PORTS]
    text = document(shelves)

    command = ["lmcache", "server", "--port", str(server_port), "--http-port", str(http_port)]
    command += ["--l1-size-gb", "2", "--eviction-policy", "LRU", "--chunk-size", "256"]
    server = troupe.start("server", [*command, "--instance-id", "demo"], {})
    with progress("the cache server starts"):
        wait_for(server, http_port, "/healthcheck")
    engine = troupe.start("engine-1", engine_command(ports[0], server_port), ENGINE_ENVIRONMENT)
    with progress("vLLM starts"):
        wait_for(engine, ports[0], "/health")
        ask(ports[0], "Warm up.", 1)

    def forget_all() -> None:
        reset_engine(ports[0])
        fetch(http_port, "/cache/clear", body={})

    forget_own = partial(reset_engine, ports[0])
    stages = [run_stage("cold: nothing cached anywhere", ports[0], text, before_each=forget_all)]
    wait_until_stored(http_port)
    stages.append(run_stage("vLLM's own cache holds the text", ports[0], text))
    stages.append(
        run_stage("vLLM's cache reset, kvcellar holds it", ports[0], text, before_each=forget_own)
    )
    notes = [_hits_of(ports[0], "first instance"), f"kvcellar holds {objects(http_port)} objects"]

    engine = troupe.start("engine-2", engine_command(ports[1], server_port), ENGINE_ENVIRONMENT)
    with progress("a second vLLM starts"):
        wait_for(engine, ports[1], "/health")
        ask(ports[1], "Warm up.", 1)

    forget_own = partial(reset_engine, ports[1])
    stages.append(
        run_stage("another instance, kvcellar holds it", ports[1], text, before_each=forget_own)
    )
    notes.append(_hits_of(ports[1], "second instance"))
    names = ("kvcellar_lookup_hit_chunks_total", "kvcellar_loaded_bytes_total")
    chunks, size_bytes = counters(http_port, *names)
    notes.append(f"kvcellar found {chunks} chunks, {size_bytes / 1e6:.0f} MB of them were loaded")
    return stages, notes


def _hits_of(port: int, name: str) -> str:
    queries, hits = counters(
        port, "vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"
    )
    if hits == 0:
        raise DemoError(f"{name}: vllm:external_prefix_cache_hits is 0: nothing was loaded")
    return f"{name}: vllm:external_prefix_cache_hits {hits} of {queries} tokens asked for"


def show(stages: list[Stage], notes: list[str]) -> None:
    """Print the table, the plot, the counters, and whether the answers are equal."""
    width = max(len(stage.name) for stage in stages)
    heads = "".join(f"{f'shelf {shelf}':>10}" for shelf in QUESTIONS)
    say(f"\n{'time to the first token, s':{width}}{heads}{'median':>10}")
    for stage in stages:
        cells = "".join(f"{answer.ttft_s:10.2f}" for answer in stage.answers)
        say(f"{stage.name:{width}}{cells}{stage.ttft_s:10.2f}")
    say()
    cold_s = stages[0].ttft_s
    for stage in stages:
        bar = _bar(stage.ttft_s / cold_s)
        say(f"{stage.name:{width}}  {bar} {stage.ttft_s:.2f} s, {cold_s / stage.ttft_s:.0f} x")
    say()
    for note in notes:
        say(note)


def _bar(share: float) -> str:
    """Return a bar in eighths of a character."""
    eighths = max(1, round(min(share, 1.0) * BAR_CHARACTERS * 8))
    part = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return "█" * (eighths // 8) + part


def check_answers(stages: list[Stage]) -> None:
    """Fail unless every stage gave the same answers."""
    expected = [answer.text for answer in stages[0].answers]
    for stage in stages[1:]:
        got = [answer.text for answer in stage.answers]
        if got != expected:
            raise DemoError(f"answers differ: cold {expected}, but {stage.name!r} {got}")
    say(f"answers: {len(stages)} times {len(expected)}, all equal")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; returns 0 when everything that it shows came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shelves", type=int, default=110, help="sentences of the text (110)")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if not (ROOT / MODEL / "config.json").is_file() or not (PROGRAMS / "vllm").is_file():
        say("demo: run `make setup` first")
        return 1
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvcellar-demo-") as scratch:
        return run(Troupe(scratch), arguments.shelves)


def run(troupe: Troupe, shelves: int) -> int:
    """Perform, show, and stop everything; returns the exit code."""
    started = time.monotonic()
    try:
        stages, notes = perform(troupe, shelves)
        show(stages, notes)
        check_answers(stages)
    except (DemoError, OSError, http.client.HTTPException) as error:
        say(f"\ndemo: {error}\nlogs: {LOGS}")
        return 1
    except KeyboardInterrupt:
        say("\ndemo: interrupted")
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A second Ctrl-C must not stop the stopping.
            signal.signal(number, signal.SIG_IGN)
        troupe.stop()
        say(f"all stopped after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
