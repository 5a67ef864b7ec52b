"""A real server as its own process, on free ports, and real clients of it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvcellar.client.handshake import open_session
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.client.tool import connect_tool
from kvcellar.clock import SystemClock
from kvcellar.errors import KVCellarError
from kvcellar.keys.digest import request_seed
from kvcellar.keys.tokens import token_keys
from kvcellar.layout.shard import PageRegion, ShardLayout
from kvcellar.protocol.messages import (
    Bind,
    Commit,
    Goodbye,
    Heartbeat,
    Lookup,
    Release,
    Reserve,
    Role,
    Status,
)

SOURCE = Path(__file__).parents[2] / "src"
WAIT_S = 20.0
CHUNK_TOKENS = 16
SHARD_BYTES = 4096
MODEL = "a/model"
FLAGS = ("--port", "0", "--http-port", "0", "--eviction-policy", "LRU", "--l1-size-gb", "0.0625")


def eventually(condition, *, timeout_s=WAIT_S):
    """Wait until `condition()` is true and return its value; for what another process does."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def is_running(pid):
    """Return whether a process runs; one that ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2][1] != "Z"
    except OSError:
        return False


def namespace(world_size=1):
    return bytes([world_size]) * 32


def key(number):
    return number.to_bytes(32, "big")


def keys(*numbers):
    return b"".join(key(number) for number in numbers)


def numbers_of(tokens, salt=None):
    """Return the chunks of a prompt as the numbers that tests call chunks by."""
    seed = request_seed(namespace(), adapter=None, cache_salt=salt)
    packed = token_keys(seed, tokens, chunk_tokens=CHUNK_TOKENS)
    return [int.from_bytes(packed[at : at + 32], "big") for at in range(0, len(packed), 32)]


def layout(rank, *, block_tokens=CHUNK_TOKENS):
    return ShardLayout(rank, block_tokens, (PageRegion("layer.0", SHARD_BYTES),), "bf16 test")


class RunningServer:
    """`kvcellar server` in a process of its own."""

    def __init__(self, *flags, command=("-m", "kvcellar", "server")):
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        # vLLM's CPU platform, once a test made its configuration in this process, preloads
        # torch's OpenMP into whatever is started from here.
        environment.pop("LD_PRELOAD", None)
        # A file and no pipe: a process that outlives the server by mistake cannot hold us up.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server.
        self.process = subprocess.Popen(
            [sys.executable, *command, *FLAGS, *flags],
            env=environment,
            stderr=self._stderr,
        )
        self.opened = []

    def __enter__(self):
        try:
            self.start_line = self.wait_for_line(" started ")
            self.port = int(re.search(r"engines=tcp://\S*:(\d+) ", self.start_line)[1])
            self.http = re.search(r"http=(\S+)", self.start_line)[1]
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()
        self._stderr.close()

    def log(self):
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode()

    def wait_for_line(self, part, *, timeout_s=WAIT_S):
        def found():
            has_ended = self.process.poll() is not None
            line = next((line for line in self.log().splitlines() if part in line), None)
            assert line or not has_ended, self.log()
            return line

        return eventually(found, timeout_s=timeout_s)

    def stop(self):
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)

    def kill(self):
        self.leave()
        self.process.kill()
        self.process.wait(WAIT_S)

    def tool(self):
        return connect_tool("localhost", self.port)

    def status(self):
        with self.tool() as session:
            return session.call(Status, timeout_s=WAIT_S).status

    def status_metrics(self):
        with self.tool() as session:
            return session.call(Status, timeout_s=WAIT_S).status["metrics"]

    def open(self, role, instance="engine", *, client_id=None, rank=0, world_size=1, **more):
        identity = Identity(
            role,
            instance_id=instance,
            software="test",
            model=MODEL,
            rank=rank,
            world_size=world_size,
            layouts=(layout(rank),) if role == Role.WORKER else (),
            **more,
        )
        options = ClientOptions(host="localhost", port=self.port)
        session = open_session(
            options, identity, client_id=client_id or os.urandom(16), clock=SystemClock()
        )
        self.opened.append(session)
        return session

    def leave(self, sessions=None):
        """Say goodbye for these clients, or for all that were opened here."""
        for session in list(self.opened if sessions is None else sessions):
            self.opened.remove(session)
            with contextlib.suppress(KVCellarError):
                session.call(Goodbye, timeout_s=WAIT_S)
            session.close()
            if session.arena is not None:
                session.arena.close()

    def engine(self, instance="engine", *, world_size=1):
        return Engine(self, instance, world_size)

    def rss_kb(self, pid=None):
        """Return the resident memory of the control process, or of another."""
        status = Path(f"/proc/{pid or self.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    def descriptors(self):
        """Return how many descriptors the control process has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def http_pid(self):
        """Return the process id of its HTTP process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (pid,) = children.split()
        return int(pid)


class Engine:
    """The two halves of an instance, all in the test's process."""

    def __init__(self, server, instance, world_size):
        self.server = server
        self.workers = [
            server.open(Role.WORKER, instance, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        self.scheduler = server.open(Role.SCHEDULER, instance, world_size=world_size)
        sizes = (SHARD_BYTES,) * world_size
        # Memory comes in the background; a store before that is FULL.
        eventually(lambda: self.call(lambda i: Heartbeat(i, (), (), 0)).steps_ready)
        self.call(lambda i: Bind(i, namespace(world_size), CHUNK_TOKENS, sizes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.leave([self.scheduler, *self.workers])

    def call(self, make):
        return self.scheduler.call(make, timeout_s=WAIT_S)

    def lookup(self, *numbers):
        return self.call(lambda i: Lookup(i, keys(*numbers)))

    def reserve(self, *numbers, tenant=""):
        return self.call(lambda i: Reserve(i, keys(*numbers), b"", tenant=tenant))

    def release(self, *hits):
        self.call(lambda i: Release(i, tuple(hit.lease for hit in hits)))

    def let_go(self):
        """Release every lease."""
        self.call(lambda i: Heartbeat(i, (), (), i))

    def commit(self, reservation, seals, *, shard=0, copy_s=0.001):
        return self.workers[shard].call(
            lambda i: Commit(i, reservation, shard, seals, copy_s), timeout_s=WAIT_S
        )

    def store(self, *numbers, tenant=""):
        """Store chunks; the bytes are whatever lies in the slots."""
        reserved = self.reserve(*numbers, tenant=tenant)
        seals = bytes(8) * reserved.states.count(1)
        outcomes = [
            self.commit(reserved.reservation, seals, shard=shard).outcome
            for shard in range(len(self.workers))
        ]
        return outcomes[-1]
