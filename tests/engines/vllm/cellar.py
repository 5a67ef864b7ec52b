"""A server that tests start, freeze and kill while engines use it."""

import contextlib
import signal
import socket

from tests.engines.vllm.conftest import CHUNK_TOKENS
from tests.server import running
from tests.server.running import RunningServer, eventually


class Cellar:
    """A server that comes and goes at one port."""

    def __init__(self):
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server = None

    def start(self, *, has_memory=True):
        flags = running.FLAGS
        running.FLAGS = ("--port", str(self.port), *flags[2:])
        try:
            self.server = RunningServer("--chunk-size", str(CHUNK_TOKENS)).__enter__()
        finally:
            running.FLAGS = flags
        if has_memory:
            eventually(lambda: self.server.status()["kvcellar"]["arena"]["ready_bytes"])
        return self

    def kill(self):
        if self.server is not None:
            self.server.__exit__(None, None, None)
            self.server = None

    def freeze(self):
        self.server.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.server.process.send_signal(signal.SIGCONT)

    def held(self):
        state = self.server.status()["kvcellar"]
        return state["leases"], state["reservations"]
