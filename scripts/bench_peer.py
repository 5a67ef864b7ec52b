#!/usr/bin/env python3
"""Drive LMCache's server with its own client classes; `make bench` runs it in the peer's venv.

`lookups PORT SECONDS COUNT[,COUNT]` prints the seconds of each lookup as JSON in its last line;
`store PORT GB_PER_S` stores until it is ended and prints GB/s once a second. A lookup is what the
peer's scheduler half does in a step: the request, then the status, asked until it has the answer.
"""

import json
import signal
import sys
import time

from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key

CHUNK_TOKENS = 256
BLOCK_TOKENS = 128
CHUNKS_A_STORE = 250
ANSWER_S = 60
SAMPLES_MIN = 20
LOOKUP_SEQUENCE = 7
# 30 layers, 3 heads of 64, keys and values in 16 bits: 5.9 MB a chunk, as SmolLM2's.
STORED_SHAPE = "(2,{blocks},128,3,64):float16:30"
STORED_CHUNK_BYTES = 5_898_240
# As little as a chunk can be: only the bookkeeping is to be measured.
SMALL_SHAPE = "(2,{blocks},128,1,8):float16:1"


def connect(port: str, shape: str, chunks: int, transfer_mode: str) -> ServerBenchClient:
    """Return a started client whose pages hold `chunks` chunks."""
    blocks = max(chunks * CHUNK_TOKENS // BLOCK_TOKENS + 8, 64)
    config = BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{port}",
        http_url="",
        mode="cpu",
        transfer_mode=transfer_mode,
        tp_size=1,
        use_mla=False,
        num_tokens=chunks * CHUNK_TOKENS,
        kvcache_shape_spec=shape.format(blocks=blocks),
        num_blocks=blocks,
        block_size=BLOCK_TOKENS,
    )
    client = ServerBenchClient(config, lambda _line: None)
    client.start()
    return client


def lookups(port: str, seconds: float, counts: list[int]) -> None:
    """Store what is missing of one long prefix, then look up prefixes of it."""
    client = connect(port, SMALL_SHAPE, max(counts), "lmcache_driven")
    try:
        request = client.create_request(LOOKUP_SEQUENCE, "store", "store")
        step = CHUNKS_A_STORE * CHUNK_TOKENS
        if not client.lookup(request).is_full_hit:
            for start in range(0, request.num_full_tokens, step):
                stored = client.store(request, start, min(step, request.num_full_tokens - start))
                assert stored.succeeded, stored
        client.end_session(request)
        hold_all(client, request)
        took = {count: measure(client, request, count, seconds) for count in counts}
    finally:
        client.close()
    print(json.dumps(took))


def hold_all(client: ServerBenchClient, request: RequestContext) -> None:
    """Keep a read lock on everything, so that no store evicts it."""
    key = _make_key(request.token_ids, f"hold-{time.monotonic()}", 0, request.num_full_tokens)
    look_up(client, key)


def look_up(client: ServerBenchClient, key: object) -> int:
    """Return how many chunks a lookup finds."""
    server = client._require_started()
    server.lookup(key, 1).result(timeout=ANSWER_S)
    while True:
        found = server.query_prefetch_status(key.request_id).result(timeout=ANSWER_S)
        if found is not None:
            return found


def measure(
    client: ServerBenchClient, request: RequestContext, count: int, seconds: float
) -> list[float]:
    """Look the first chunks up for some seconds, and return how long each took."""
    server = client._require_started()
    tokens = request.token_ids[: count * CHUNK_TOKENS]
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(took) < SAMPLES_MIN:
        key = _make_key(tokens, f"{count}-{len(took)}-{end}", 0, count * CHUNK_TOKENS)
        start = time.monotonic()
        found = look_up(client, key)
        took.append(time.monotonic() - start)
        assert found == count, (found, count)
        server.free_lookup_locks(key, 1).result(timeout=ANSWER_S)
        server.end_session(key.request_id).result(timeout=ANSWER_S)
    return took


def store(port: str, gb_per_s: float) -> None:
    """Store new chunks at a steady rate until SIGTERM."""
    chunks = 4
    client = connect(port, STORED_SHAPE, chunks, "auto")
    done, printed, due = 0.0, time.monotonic(), time.monotonic()
    sequence = time.time_ns() % 1_000_000 * 1_000
    try:
        while True:
            sequence += 1
            request = client.create_request(sequence, f"store-{sequence}", "store")
            result = client.store(request, 0, request.num_full_tokens)
            client.end_session(request)
            done += chunks * STORED_CHUNK_BYTES / 1e9 if result.succeeded else 0.0
            now = time.monotonic()
            if now - printed >= 1.0:
                print(f"{done / (now - printed):.3f}", flush=True)
                done, printed = 0.0, now
            due = max(due + chunks * STORED_CHUNK_BYTES / 1e9 / gb_per_s, now)
            time.sleep(max(0.0, due - time.monotonic()))
    finally:
        client.close()


def main() -> int:
    """Do what the arguments say."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if sys.argv[1] == "lookups":
        lookups(sys.argv[2], float(sys.argv[3]), [int(text) for text in sys.argv[4].split(",")])
    else:
        store(sys.argv[2], float(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
