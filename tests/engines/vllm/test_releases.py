"""The scheduler half under the other releases of vLLM that it supports, from their sources.

Their kernels need a GPU; their schedulers do not. The same tests run in a process that finds the
release's Python sources before the installed engine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STACK = ROOT / ".stack"
TESTS = ("test_scheduling.py", "test_groups.py", "test_beside_others.py", "test_gatekeeping.py")
RELEASES = ("0.25.1", "0.33.0")

pytestmark = [pytest.mark.engine, pytest.mark.sources]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_the_scheduler_half_works_in(release):
    sources = STACK / f"vllm-{release}"
    if not sources.is_dir():
        pytest.fail(f"{sources} is missing: make setup-sources")
    path = [str(sources), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    version = f"import vllm; assert '{sources}' in vllm.__file__"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    subprocess.run([sys.executable, "-c", version], env=environment, check=True, timeout=120)
    ended = subprocess.run(
        [*command, *(str(Path(__file__).parent / name) for name in TESTS)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
