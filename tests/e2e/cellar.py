"""Run a real cache server and ask it what a user can ask: status, metrics, health, clear.

A server keeps its ports over restarts, as an engine's configuration does. Used by the end-to-end
tests only.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from tests.e2e.device import IS_INSTALLED
from tests.e2e.processes import NO_REUSE, Program, eventually, free_port

__all__ = ["Cellar"]

START_S = 15.0
ANSWER_S = 5.0
QUIET_S = 1.0
"""How long after the last request every lease and reservation must be gone (issue: 1 s)."""

SERVER = ("kvcellar", "server") if IS_INSTALLED else (sys.executable, "-m", "kvcellar", "server")

_SAMPLE = re.compile(r"^(?P<name>[a-z0-9_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


class Cellar(Program):
    """One `kvcellar server`, or one started under LMCache's name."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path,
        l1_gb: float = 1.0,
        command: Sequence[str] = SERVER,
        ports: tuple[int, int] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Prepare it; nothing runs yet.

        Args:
            name: names the log and the node.
            folder: where the log goes.
            l1_gb: size of L1 in GB of 1024³ bytes.
            command: which of the commands starts it.
            ports: engines' and HTTP; None takes free ones.
            flags: more of them; they count before those that it always gets.
        """
        self.port, self.http_port = ports or (free_port(), free_port())
        words = [*command, "--port", str(self.port), "--http-port", str(self.http_port)]
        words += ["--l1-size-gb", str(l1_gb), "--eviction-policy", "LRU", "--chunk-size", "256"]
        words += ["--instance-id", name, *flags]
        super().__init__(name, words, folder=folder)
        self.ports = (self.port, self.http_port)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.http_port}", timeout=ANSWER_S, limits=NO_REUSE
        )

    def close(self) -> None:
        """Close the connection to it."""
        self.http.close()

    def start_and_wait(self) -> None:
        """Start it and wait until it says that it is healthy."""
        self.start()
        self.wait_until(self.is_healthy, START_S, what="health")

    def is_healthy(self) -> bool:
        """Whether /healthcheck says so."""
        try:
            return self.http.get("/healthcheck").status_code == 200
        except httpx.TransportError:
            return False

    def status(self) -> dict[str, object]:
        """Read /status."""
        return self._page("/status").json()

    def _page(self, path: str) -> httpx.Response:
        """Read a page, again while it says 503: the control loop may starve on a busy machine."""

        def read() -> httpx.Response | None:
            reply = self.http.get(path)
            assert reply.status_code in {200, 503}, reply.text
            return reply if reply.status_code == 200 else None

        return eventually(read, 3 * ANSWER_S, what=f"an answer of {path}")

    def objects(self) -> int:
        """Read the number of complete objects (chunks times ranks), as the guide does."""
        return self.status()["storage_manager"]["l1_manager"]["total_object_count"]

    def metric(self, name: str, label: str = "") -> float:
        """Read one metric; with a label's value only that sample, else the sum over labels."""
        total = 0.0
        for line in self._page("/metrics").text.splitlines():
            sample = _SAMPLE.match(line)
            if sample and sample["name"] == name and label in (sample["labels"] or ""):
                total += float(sample["value"])
        return total

    def clear(self) -> None:
        """Forget everything that is stored."""
        reply = self.http.post("/cache/clear")
        assert reply.status_code == 200, reply.text

    def wait_for_objects(self, count: int, timeout_s: float = 15.0) -> None:
        """Wait until exactly `count` objects are complete and nothing is being stored."""
        eventually(
            lambda: self.objects() == count and self.is_quiet(),
            timeout_s,
            what=f"{count} objects in {self.name} (now {self.objects()})",
        )

    def holdings(self) -> dict[str, int]:
        """Read what clients hold now: all zero when nobody does anything."""
        page = self.status()
        l1 = page["storage_manager"]["l1_manager"]
        own = page["kvcellar"]
        return {
            "leases": own["leases"],
            "reservations": own["reservations"],
            "read_locked": l1["read_locked_count"],
            "write_locked": l1["write_locked_count"],
        }

    def is_quiet(self) -> bool:
        """Whether no lease and no reservation is out."""
        return not any(self.holdings().values())

    def wait_until_quiet(self, timeout_s: float = QUIET_S) -> None:
        """Wait until nobody holds anything; fail after `timeout_s` with what is held."""
        eventually(self.is_quiet, timeout_s, what=f"no holdings in {self.name}")

    def wait_for_writers(self, timeout_s: float = 30.0) -> None:
        """Wait until some chunk is being written."""
        eventually(
            lambda: self.holdings()["write_locked"] > 0, timeout_s, what="a chunk being written"
        )

    def memory_bytes(self) -> int:
        """Return the memory that its processes use, the arena not counted."""
        private = 0
        for process in self.members():
            private += process.memory_full_info().uss
        return private

    def open_files(self) -> int:
        """Return how many descriptors its processes have open."""
        return sum(process.num_fds() for process in self.members())
