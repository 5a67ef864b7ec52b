"""The accelerator's copier under Triton's interpreter; the tests are in `interpreted_copy_gpu`."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent / "interpreted_copy_gpu.py"
SOURCE = Path(__file__).parents[2] / "src"


def test_the_gpu_copier_is_right_under_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
