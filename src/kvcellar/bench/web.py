"""What the benchmark asks over HTTP: health, counters, completions, resets.

The standard library's client, since a benchmark of the time to the first token must know what its
own client costs: here one connection, one request, and the first line of the stream.
"""

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence

from kvcellar.bench.programs import BenchError, pause
from kvcellar.clock import Clock

__all__ = [
    "MODEL_NAME",
    "counter",
    "fetch",
    "first_token",
    "is_healthy",
    "reset_prefix_cache",
    "stored_objects",
    "wait_until_stored",
]

MODEL_NAME = "bench"
_ANSWER_S = 30.0
_COMPLETION_S = 300.0
_STORED_S = 60.0
_TRIES = 600
_TRY_S = 0.05


def fetch(port: int, path: str, *, body: dict[str, object] | None = None) -> str:
    """Return what a page of this host says; with a body it is a POST.

    Raises:
        BenchError: it answered with an error.
        OSError: nobody answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        text = reply.read().decode()
    if reply.status != http.client.OK:
        raise BenchError(f"{path} on port {port} answered {reply.status}: {text[:300]}")
    return text


def is_healthy(port: int, path: str) -> bool:
    """Return whether a page answers with success."""
    with contextlib.suppress(OSError, http.client.HTTPException, BenchError):
        fetch(port, path)
        return True
    return False


def counter(port: int, name: str) -> float:
    """Return one metric of a program's /metrics, summed over its labels."""
    total = 0.0
    for line in fetch(port, "/metrics").splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name:
            total += float(value)
    return total


def reset_prefix_cache(port: int) -> None:
    """Empty vLLM's own prefix cache; asked until it says success, since blocks may be in use."""
    for _ in range(_TRIES):
        if json.loads(fetch(port, "/reset_prefix_cache", body={}))["success"]:
            return
        pause(_TRY_S)
    raise BenchError(f"vLLM's prefix cache could not be reset within {_TRIES * _TRY_S:g} s")


def stored_objects(http_port: int) -> int:
    """Return how many complete objects a cache server holds."""
    return int(_l1(http_port)["total_object_count"])


def wait_until_stored(http_port: int, *, objects_min: int, clock: Clock) -> None:
    """Wait until a cache server holds so many objects and writes none.

    Raises:
        BenchError: it does not come to that.
    """
    deadline_s = clock.monotonic_s() + _STORED_S
    l1: dict[str, int] = {}
    while clock.monotonic_s() < deadline_s:
        l1 = _l1(http_port)
        if l1["total_object_count"] >= objects_min and l1["write_locked_count"] == 0:
            return
        pause(_TRY_S)
    raise BenchError(f"{l1.get('total_object_count')} of {objects_min} objects were stored")


def _l1(http_port: int) -> dict[str, int]:
    # The same path in both servers.
    page = json.loads(fetch(http_port, "/status"))
    found: dict[str, int] = page["storage_manager"]["l1_manager"]
    return found


def first_token(port: int, prompt: Sequence[int], *, clock: Clock) -> float:
    """Send a prompt of token ids to vLLM and return the seconds to its first token.

    Raises:
        BenchError: vLLM answered with an error or with nothing.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    encoded = json.dumps(body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_COMPLETION_S)
    with contextlib.closing(connection):
        start_s = clock.monotonic_s()
        connection.request("POST", "/v1/completions", encoded, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise BenchError(f"vLLM answered {reply.status}: {reply.read().decode()[:300]}")
        events = _events(reply)
        if "choices" not in next(events, {}):
            raise BenchError("vLLM's stream ended without a token")
        ttft_s = clock.monotonic_s() - start_s
        # The rest is read, so that the request is over when this returns.
        for event in events:
            if "error" in event:
                raise BenchError(f"vLLM reported {event['error']}")
    return ttft_s


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    for line in reply:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)
