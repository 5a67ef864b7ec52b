"""LMCache's server 0.5.6, the peer that is measured beside ours.

It is the real wheel, in an environment of its own (`.stack/peer`) that is made at the first run:
a virtual environment which sees this checkout's torch and vLLM through a path file and adds
LMCache and what that needs, so that its console script does not replace ours. Its own client
classes drive it (`scripts/bench_peer.py`, run by its own interpreter).
"""

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcellar.bench.node import CHUNK_TOKENS, Node
from kvcellar.bench.programs import BenchError, Programs

__all__ = ["Peer"]

_WANTED = (
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "opentelemetry-exporter-prometheus==0.66b2",
    "redis==8.1.0",
    "sortedcontainers==2.4.0",
)
_SEGMENT = f"kvcellar_bench_{os.getpid()}"
_INSTALL_S = 900.0
_RUN_S = 600.0
# Empty: its vLLM loads no plug-in, so none of ours takes its connector's name.
_ENVIRONMENT = {"VLLM_PLUGINS": "", "LMCACHE_TRACK_USAGE": "false"}


class Peer:
    """The peer's environment and what can be done with it.

    Attributes:
        name: for tables.
        python: its interpreter.
    """

    name = "LMCache 0.5.6"

    def __init__(self, root: Path, programs: Programs, say: Callable[[str], None]) -> None:
        """Prepare; `check` makes the environment.

        Args:
            root: of the checkout.
            programs: runs what makes it.
            say: told when it is made.
        """
        self._programs = programs
        self._say = say
        self._folder = root / ".stack" / "peer"
        self._script = root / "scripts" / "bench_peer.py"
        self.python = self._folder / "bin" / "python"
        self._trouble: str | None = None

    def check(self) -> None:
        """Make the environment unless it is there.

        Raises:
            BenchError: the peer cannot be measured; said again at each call, tried once.
        """
        if self._trouble is None:
            self._trouble = self._install()
        if self._trouble:
            raise BenchError(self._trouble)

    def _install(self) -> str:
        """Return what is wrong with the environment, empty text where it is complete."""
        stamp = self._folder / "complete"
        wanted = "\n".join(_WANTED)
        try:
            if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
                self._say(f"{self.name} is installed into {self._folder}")
                shutil.rmtree(self._folder, ignore_errors=True)
                self._make()
                stamp.write_text(wanted, encoding="utf-8")
        except (BenchError, OSError) as error:
            return f"it could not be installed: {error}"
        return ""

    def _make(self) -> None:
        words = [sys.executable, "-m", "venv", str(self._folder)]
        self._programs.run("peer-venv", words, timeout_s=_INSTALL_S)
        here = sysconfig.get_path("purelib")
        there = sysconfig.get_path("purelib", vars={"base": str(self._folder)})
        Path(there, "ours.pth").write_text(f"{here}\n", encoding="utf-8")
        words = [str(self.python), "-m", "pip", "install", "--no-input", "--no-deps", *_WANTED]
        self._programs.run("peer-install", words, timeout_s=_INSTALL_S)
        words = [str(self.python), "-c", "import lmcache.cli.main, vllm"]
        self._programs.run("peer-check", words, timeout_s=_INSTALL_S, environment=_ENVIRONMENT)

    @staticmethod
    def clean_up() -> None:
        """Remove the shared memory that its server leaves behind when it is killed."""
        for path in Path("/dev/shm").glob(f"*{_SEGMENT}*"):  # noqa: S108 - where the kernel has it.
            path.unlink(missing_ok=True)

    def start(self, programs: Programs, name: str, *, l1_gb: float) -> Node:
        """Start its server, in the mode that is fastest on a CPU, and wait until it is healthy."""
        node = self.launch(programs, name, l1_gb=l1_gb)
        node.wait_until_healthy(programs)
        return node

    def launch(self, programs: Programs, name: str, *, l1_gb: float) -> Node:
        """Start its server and return at once."""
        words = [str(self.python), "-m", "lmcache.cli.main", "server"]
        words += ["--supported-transfer-mode", "auto", "--shm-name", _SEGMENT]
        words += ["--chunk-size", str(CHUNK_TOKENS)]
        return Node.launch_as(programs, name, words, l1_gb=l1_gb, environment=_ENVIRONMENT)

    def lookups(
        self, programs: Programs, node: Node, key_counts: Sequence[int], *, seconds: float
    ) -> dict[int, list[float]]:
        """Store as many chunks as needed, look them up, and return the durations in seconds."""
        counts = ",".join(map(str, key_counts))
        words = self._client("lookups", node, f"{seconds:g}", counts)
        answer = programs.run("peer-lookups", words, timeout_s=_RUN_S, environment=_ENVIRONMENT)
        return {int(count): durations for count, durations in json.loads(answer).items()}

    def disk_speeds(
        self, programs: Programs, folder: Path, *, chunk_bytes: int, chunks: int, workers: int
    ) -> dict[str, float]:
        """Run its own benchmark of its tier on a disk, and return the GB/s of `write` and `read`.

        Its benchmark takes sizes in KiB, so a chunk is rounded down to one.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tier = {"type": "fs_native", "base_path": str(folder / "files"), "use_odirect": True}
        result = folder / "result.json"
        words = [str(self.python), "-m", "lmcache.cli.main", "bench", "l2"]
        words += ["--l2-adapter", json.dumps({**tier, "num_workers": workers})]
        words += ["--num-keys", str(chunks), "--data-size-kb", str(chunk_bytes // 1024)]
        words += ["--l1-align-bytes", "4096", "--rounds", "5"]
        words += ["--format", "json", "--output", str(result)]
        programs.run("peer-disk", words, timeout_s=_RUN_S, environment=_ENVIRONMENT)
        try:
            metrics = json.loads(result.read_text(encoding="utf-8"))["metrics"]
            seconds = {
                part["operation"]: part["duration_p50_ms"] / 1e3
                for name, part in metrics.items()
                if name.startswith("op_")
            }
            moved_gb = chunks * (chunk_bytes // 1024) * 1024 / 1e9
            return {"write": moved_gb / seconds["Store"], "read": moved_gb / seconds["Load"]}
        except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
            raise BenchError(f"its benchmark's result cannot be read: {error!r}") from error

    def storing(self, node: Node, gb_per_s: float) -> list[str]:
        """Return the command that stores at a steady rate until it is ended."""
        return self._client("store", node, f"{gb_per_s:g}")

    def engine(self) -> tuple[list[str], dict[str, str]]:
        """Return the words that begin `vllm serve` in its environment, and variables to set."""
        return [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve"], _ENVIRONMENT

    def _client(self, kind: str, node: Node, *more: str) -> list[str]:
        return [str(self.python), str(self._script), kind, str(node.port), *more]
