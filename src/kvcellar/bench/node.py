"""A cache server that a benchmark runs: on free ports, of any size, ready when it is returned.

Both servers are started here, kvcellar's and the peer's, since both have an engines' port and an
HTTP port with the same pages.
"""

import socket
import sys
from dataclasses import dataclass
from typing import Self

from kvcellar.bench.programs import Program, Programs
from kvcellar.bench.web import is_healthy

__all__ = ["CHUNK_TOKENS", "Node", "free_port"]

CHUNK_TOKENS = 256
"""Tokens a chunk, in both products where nothing else is said."""
_READY_S = 60.0


def free_port() -> int:
    """Return a port of this host that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Node:
    """A running cache server.

    Attributes:
        program: its process.
        port: of the engines.
        http_port: of its pages.
    """

    program: Program
    port: int
    http_port: int

    @property
    def metrics_url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self.http_port}/metrics"

    @classmethod
    def start(
        cls, programs: Programs, name: str, *, l1_gb: float, chunk_tokens: int = CHUNK_TOKENS
    ) -> Self:
        """Start `kvcellar server` and wait until it is healthy."""
        node = cls.launch(programs, name, l1_gb=l1_gb, chunk_tokens=chunk_tokens)
        node.wait_until_healthy(programs)
        return node

    @classmethod
    def launch(
        cls, programs: Programs, name: str, *, l1_gb: float, chunk_tokens: int = CHUNK_TOKENS
    ) -> Self:
        """Start `kvcellar server` and return at once."""
        words = [sys.executable, "-m", "kvcellar", "server"]
        words += ["--chunk-size", str(chunk_tokens)]
        return cls.launch_as(programs, name, words, l1_gb=l1_gb)

    @classmethod
    def launch_as(
        cls,
        programs: Programs,
        name: str,
        words: list[str],
        *,
        l1_gb: float,
        environment: dict[str, str] | None = None,
    ) -> Self:
        """Start a server by its command, which gets the flags that each of them needs."""
        port, http_port = free_port(), free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port)]
        flags += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
        flags += ["--l1-size-gb", f"{l1_gb:g}", "--eviction-policy", "LRU"]
        program = programs.start(name, [*words, *flags], environment=environment)
        return cls(program, port, http_port)

    def wait_until_healthy(self, programs: Programs, *, poll_s: float = 0.02) -> float:
        """Wait until /healthcheck answers with success; returns the seconds since the start."""
        return programs.wait_until(
            self.program,
            lambda: is_healthy(self.http_port, "/healthcheck"),
            timeout_s=_READY_S,
            poll_s=poll_s,
        )
