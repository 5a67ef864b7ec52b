"""The ceiling of a lookup: the same bytes there and back between two processes, and no work."""

import sys

from kvcellar.bench.background import ECHO_HEAD_BYTES
from kvcellar.bench.figures import Latency, sample
from kvcellar.bench.programs import Programs
from kvcellar.clock import Clock
from kvcellar.errors import PeerClosedError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import REF_BYTES
from kvcellar.transport.sockets import dial_unix

__all__ = ["BareRoundTrip"]

_ADDRESS = "@kvcellar-bench-echo"
_READY_S = 20.0


class BareRoundTrip:
    """A peer over a Unix socket that answers with as many bytes as it is asked for."""

    def __init__(self, programs: Programs, clock: Clock) -> None:
        """Start the peer and connect to it.

        Raises:
            BenchError: it does not come up.
        """
        self._programs = programs
        self._clock = clock
        words = [sys.executable, "-m", "kvcellar.bench.background", "echo", _ADDRESS]
        self._peer = programs.start("echo", words)
        programs.wait_until(self._peer, self._connect, timeout_s=_READY_S)

    def measure(self, key_count: int, *, seconds: float) -> Latency:
        """Return how long the bytes of a lookup of so many keys take."""
        request_bytes = ECHO_HEAD_BYTES + KEY_BYTES * key_count
        reply_bytes = ECHO_HEAD_BYTES + REF_BYTES * key_count
        head = request_bytes.to_bytes(8, "little") + reply_bytes.to_bytes(8, "little")
        request = head + bytes(request_bytes - len(head))
        target = memoryview(bytearray(reply_bytes))

        def once() -> float:
            start_s = self._clock.monotonic_s()
            self._sock.sendall(request)
            got = 0
            while got < reply_bytes:
                got += self._sock.recv_into(target[got:])
            return self._clock.monotonic_s() - start_s

        return sample(once, seconds=seconds, clock=self._clock)

    def close(self) -> None:
        """Disconnect and end the peer."""
        self._sock.close()
        self._programs.stop(self._peer)

    def _connect(self) -> bool:
        try:
            self._sock = dial_unix(_ADDRESS, timeout_s=1.0)
        except PeerClosedError:
            return False
        return True
