"""The time to the first token through real vLLM: cold, vLLM's own hit, ours, the peer's.

Each engine runs alone, one after the other: vLLM with our connector and our server, then vLLM with
the peer's. Every prompt is new random tokens, sent cold, then again (vLLM's own cache answers),
then after a reset of that cache (the layer answers, or the figure is refused).

vLLM's own cache knows blocks and a layer knows chunks, so after a hit of its own vLLM has fewer
tokens left to compute. What the layer itself costs is therefore the difference to an own hit *at
the same boundary*: a prompt that shares exactly the layer's chunks with the one before.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcellar.bench.figures import median
from kvcellar.bench.node import CHUNK_TOKENS, Node, free_port
from kvcellar.bench.options import Effort
from kvcellar.bench.peer import Peer
from kvcellar.bench.programs import BenchError, Programs
from kvcellar.bench.report import Cell, Column, Table
from kvcellar.bench.web import (
    MODEL_NAME,
    counter,
    first_token,
    is_healthy,
    reset_prefix_cache,
    stored_objects,
    wait_until_stored,
)
from kvcellar.clock import Clock

__all__ = ["measure_first_token"]

_L1_GB = 2.0
_READY_S = 240.0
_WARM_UP_TOKENS = 600
_HITS = "vllm:external_prefix_cache_hits_total"
_AIM_S = 0.1
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    # Threads that spin on few cores make everything beside them several times slower.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Setup:
    """One engine and the layer below it.

    Attributes:
        name: for tables and logs.
        serve: the words that begin `vllm serve`.
        environment: variables to set.
        transfer: what `--kv-transfer-config` says.
        node: the layer's server.
        chunk_tokens: of the layer.
    """

    name: str
    serve: Sequence[str]
    environment: Mapping[str, str]
    transfer: dict[str, object]
    node: Node
    chunk_tokens: int


@dataclass(frozen=True)
class _Times:
    """Seconds to the first token of prompts of one length.

    Attributes:
        cold_s: nothing is cached.
        own_s: vLLM has the whole prompt.
        same_s: vLLM has as much of the prompt as a layer would.
        layer_s: vLLM has nothing, the layer its chunks.
    """

    cold_s: float
    own_s: float
    same_s: float
    layer_s: float


def measure_first_token(
    programs: Programs, peer: Peer, root: Path, *, effort: Effort, clock: Clock, say: Say
) -> Table:
    """Return the table of times to the first token; each figure is a median.

    Raises:
        BenchError: our own part could not be measured. The peer's is then a note.
    """
    engine = functools.partial(_measure, programs, root, effort=effort, clock=clock, say=say)
    measured = [
        (f"kvcellar, chunks of {size}", engine(_ours(programs, size)))
        for size in effort.chunk_tokens
    ]
    notes = [
        "own hit: vLLM's own prefix cache, in the same engine.",
        "own at chunk: the same, where only as many tokens are shared as the layer has chunks of.",
        f"behind: the layer's hit behind that; aim {_AIM_S} s.",
    ]
    try:
        peer.check()
        name = f"{peer.name}, chunks of {CHUNK_TOKENS}"
        measured.append((name, engine(_peers(programs, peer))))
    except BenchError as error:
        notes.append(f"{peer.name} was not measured: {error.summary}")
    rows: list[tuple[Cell, ...]] = []
    for tokens in effort.prompt_tokens:
        for name, times in measured:
            one = times[tokens]
            behind_s = one.layer_s - one.same_s
            rows.append((name, tokens, one.cold_s, one.own_s, one.same_s, one.layer_s, behind_s))
    columns = (
        Column("layer"),
        Column("tokens", 0),
        Column("cold"),
        Column("own hit"),
        Column("own at chunk"),
        Column("layer's hit"),
        Column("behind"),
    )
    title = f"time to the first token, s (vLLM, float32, median of {effort.prompts})"
    return Table("ttft", title, columns, tuple(rows), tuple(notes))


def _ours(programs: Programs, chunk_tokens: int) -> _Setup:
    node = Node.start(programs, "ttft-server", l1_gb=_L1_GB, chunk_tokens=chunk_tokens)
    extra: dict[str, object] = {"kvcellar.host": "127.0.0.1", "kvcellar.port": node.port}
    return _Setup(
        name=f"ttft-engine-{chunk_tokens}",
        serve=[sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"],
        environment={},
        transfer=_transfer("KVCellarConnector", extra),
        node=node,
        chunk_tokens=chunk_tokens,
    )


def _peers(programs: Programs, peer: Peer) -> _Setup:
    node = peer.start(programs, "ttft-peer", l1_gb=_L1_GB)
    extra: dict[str, object] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": node.port}
    serve, environment = peer.engine()
    return _Setup(
        name="ttft-peer-engine",
        serve=serve,
        environment=environment,
        transfer=_transfer("LMCacheMPConnector", extra),
        node=node,
        chunk_tokens=CHUNK_TOKENS,
    )


def _transfer(connector: str, extra: dict[str, object]) -> dict[str, object]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _measure(
    programs: Programs, root: Path, setup: _Setup, *, effort: Effort, clock: Clock, say: Say
) -> dict[int, _Times]:
    say(f"{setup.name} starts")
    port = free_port()
    words = [*setup.serve, str(root / ".stack" / "model"), "--served-model-name", MODEL_NAME]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"]
    words += ["--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log"]
    words += ["--kv-transfer-config", json.dumps(setup.transfer)]
    cache = {"VLLM_CACHE_ROOT": str(root / ".stack" / "vllm-cache")}
    environment = {**_ENVIRONMENT, **cache, **setup.environment}
    program = programs.start(setup.name, words, environment=environment)
    programs.wait_until(program, lambda: is_healthy(port, "/health"), timeout_s=_READY_S)
    once = functools.partial(_times, port, setup, clock)
    # The first prompt of an engine pays for what is made only once.
    once(_WARM_UP_TOKENS)
    found = {}
    for tokens in effort.prompt_tokens:
        times = []
        for _ in range(effort.prompts):
            times.append(once(tokens))
            say(f"{setup.name}: {tokens:,} tokens, {_shown(times[-1])}")
        found[tokens] = _Times(
            *(
                median([getattr(one, name) for one in times])
                for name in ("cold_s", "own_s", "same_s", "layer_s")
            )
        )
    programs.stop(program)
    programs.stop(setup.node.program)
    return found


def _times(port: int, setup: _Setup, clock: Clock, tokens: int) -> _Times:
    """Send one new prompt three times, and one that shares its chunks."""
    prompt, other = _random_tokens(tokens), _random_tokens(tokens)
    http_port = setup.node.http_port
    chunks = (tokens - 1) // setup.chunk_tokens
    shared = chunks * setup.chunk_tokens
    objects = stored_objects(http_port)
    cold_s = first_token(port, prompt, clock=clock)
    wait_until_stored(http_port, objects_min=objects + chunks, clock=clock)
    own_s = first_token(port, prompt, clock=clock)
    same_s = first_token(port, prompt[:shared] + other[shared:], clock=clock)
    reset_prefix_cache(port)
    hits = counter(port, _HITS)
    layer_s = first_token(port, prompt, clock=clock)
    hit_tokens = counter(port, _HITS) - hits
    if hit_tokens < shared:
        raise BenchError(f"the layer gave {hit_tokens:.0f} of {shared} tokens back")
    return _Times(cold_s, own_s, same_s, layer_s)


def _random_tokens(count: int) -> list[int]:
    """Return ids that every model here knows, and no other run has sent."""
    tokens: list[int] = np.random.default_rng().integers(1_000, 40_000, count).tolist()
    return tokens


def _shown(times: _Times) -> str:
    return (
        f"cold {times.cold_s:.2f} s, own hit {times.own_s:.2f}, own at chunk {times.same_s:.2f}, "
        f"layer's hit {times.layer_s:.2f}"
    )
