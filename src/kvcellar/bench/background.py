"""What runs beside a measurement: a store of some GB/s, a scraper that never rests, an echo.

Each is a process of its own (`python -m kvcellar.bench.background KIND ...`), because in the
measuring process it would take the interpreter's lock from what is measured. Load and scraper
print once a second how much they did, so that a report says what the load really was.
"""

import contextlib
import http.client
import signal
import socket
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import numpy as np

from kvcellar.bench.programs import BenchError, pause
from kvcellar.bench.stand_in import StandIn, random_keys
from kvcellar.clock import SystemClock
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.memory import seal
from kvcellar.protocol.messages import OFFSET_BYTES
from kvcellar.transport.sockets import listen_unix

__all__ = ["ECHO_HEAD_BYTES", "STORED_SHARD_BYTES", "main"]

STORED_SHARD_BYTES = 5_898_240
"""256 tokens of SmolLM2-135M in bfloat16: a chunk as it is stored here by vLLM."""
ECHO_HEAD_BYTES = 16
"""An echo's request begins with its own length and its reply's, both uint64 little-endian."""
_CHUNKS_A_STORE = 4
_ECHO_MAX_BYTES = 1 << 20


def store(port: int, gb_per_s: float) -> None:
    """Store new chunks at a steady rate, for ever, copying and sealing real bytes."""
    clock = SystemClock()
    source = np.random.default_rng(0).integers(0, 256, 16 * STORED_SHARD_BYTES, dtype=np.uint8)
    seal.warm_up()
    pace = _Pace(clock.monotonic_s)
    with StandIn(port, name="background", shard_bytes=STORED_SHARD_BYTES) as engine:
        turn = 0
        while True:
            keys = random_keys(_CHUNKS_A_STORE)
            turn += 1

            def fill(view: memoryview, offsets: list[int], keys: bytes = keys) -> bytes:
                return b"".join(
                    _copy(source, view, offset, key=keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
                    for at, offset in enumerate(offsets)
                )

            # A server that has just started has no memory yet.
            stored = 0
            with contextlib.suppress(BenchError):
                stored = engine.store(keys, fill=fill)
            pace.note(stored * STORED_SHARD_BYTES / 1e9)
            pace.wait(_CHUNKS_A_STORE * STORED_SHARD_BYTES / 1e9 / gb_per_s)


def _copy(source: np.ndarray, view: memoryview, offset: int, *, key: bytes) -> bytes:
    # The source moves on with the offset, so that it does not stay in the cache.
    start = offset // 4096 * 4096 % (source.size - STORED_SHARD_BYTES)
    total = seal.copy_and_sum(
        source[start : start + STORED_SHARD_BYTES], view[offset : offset + STORED_SHARD_BYTES], 0
    )
    return seal.finish(total, key, 0, STORED_SHARD_BYTES).to_bytes(OFFSET_BYTES, "little")


def scrape(url: str) -> None:
    """Fetch a page again and again, without a rest, for ever."""
    parts = urlsplit(url)
    pace = _Pace(SystemClock().monotonic_s)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    while True:
        connection.request("GET", parts.path)
        connection.getresponse().read()
        pace.note(1.0)


def echo(address: str) -> None:
    """Answer requests of any length with as many bytes as they ask for, until the peer leaves."""
    listener = listen_unix(address)
    listener.setblocking(True)
    sock, _ = listener.accept()
    sock.setblocking(True)
    # One buffer for everything: fresh memory of this size costs more than the round trip.
    space = memoryview(bytearray(_ECHO_MAX_BYTES))
    with sock:
        while _receive(sock, space[:ECHO_HEAD_BYTES]):
            length, reply_bytes = (int.from_bytes(space[at : at + 8], "little") for at in (0, 8))
            _receive(sock, space[ECHO_HEAD_BYTES:length])
            sock.sendall(space[:reply_bytes])


def _receive(sock: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False when the peer has left."""
    got = 0
    while got < len(target):
        count = sock.recv_into(target[got:])
        if not count:
            return False
        got += count
    return True


class _Pace:
    """Counts what was done, prints it each second, and keeps a steady rate."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._printed_s = self._due_s = now()
        self._done = 0.0

    def note(self, done: float) -> None:
        self._done += done
        now_s = self._now()
        if now_s - self._printed_s >= 1.0:
            print(f"{self._done / (now_s - self._printed_s):.3f}", flush=True)
            self._printed_s, self._done = now_s, 0.0

    def wait(self, interval_s: float) -> None:
        # Time that was lost is not made up for: a burst would be another load.
        self._due_s = max(self._due_s + interval_s, self._now())
        pause(self._due_s - self._now())


def main(arguments: list[str]) -> int:
    """Run one kind of load until it is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    match arguments:
        case ["store", port, gb_per_s]:
            store(int(port), float(gb_per_s))
        case ["scrape", url]:
            scrape(url)
        case ["echo", address]:
            echo(address)
        case _:
            print("usage: background store PORT GB_PER_S | scrape URL | echo ADDRESS")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
