"""The configuration's page says what the code does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_not_stale():
    answer = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs_config.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
