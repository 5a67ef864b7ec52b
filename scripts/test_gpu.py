#!/usr/bin/env python3
"""Prove on a GPU what no CPU can show: `make test-gpu`.

`copies`: pages of many layouts leave the GPU and come back, byte for byte, with compiled kernels.
`shared`: engines that share the GPU and a server, one of them killed in the middle of its copies.
`bytes`: a preemption storm, then every stored chunk against KV computed afresh; damaged slots;
aborts, and a server and an engine killed at bad moments. The last two start real vLLM, which must
be importable, and take a few minutes each; `--graphs` runs them with CUDA graphs and asynchronous
scheduling. Without a GPU it says so and tests nothing, unless `--device cpu` asks for the same
tests on the CPU. Needs pytest, pytest-timeout, hypothesis, httpx and psutil; vLLM may lie in
`$KIT/site`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "copies": ("tests/engines/interpreted_copy_gpu.py", "tests/engines/test_copy_device.py"),
    "shared": ("tests/e2e/test_shared_device.py",),
    "bytes": ("tests/e2e/test_bytes.py",),
}


def main() -> int:
    """Run the tests and return pytest's exit status, 0 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, not eager steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pytest", default="", help="further words for pytest, as one text")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}, only {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"test-gpu: skipped, torch {torch.__version__} finds no CUDA GPU here")
        return 0
    paths = [path for part in arguments.parts or PARTS for path in PARTS[part]]
    device = "cuda-graphs" if arguments.graphs else arguments.device
    environment = {**os.environ, "E2E_DEVICE": device}
    if arguments.device == "cpu":
        # Its kernels are interpreted; the tests of streams skip themselves.
        environment["TRITON_INTERPRET"] = "1"
    kit = Path(environment.get("KIT", Path.home() / "kit")) / "site"
    sources = [str(ROOT / "src"), environment.get("PYTHONPATH", ""), str(kit) * kit.is_dir()]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", "."]
    command += [*arguments.pytest.split(), *paths]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
