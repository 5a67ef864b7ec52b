"""A key in the catalogue costs less than 500 bytes, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = 50_000
PROGRAM = """
import gc, json, os, sys
sys.path.insert(0, sys.argv[1])
from kvcellar.memory.slots import SlotAllocator
from kvcellar.store.machine import Store
from kvcellar.store.policies import LRU

keys, alone = int(sys.argv[2]), sys.argv[3] == "alone"
step_bytes = 1 << 30
store = Store(SlotAllocator(step_bytes), LRU())
store.add_step(0, step_bytes)
space = bytes(32)
store.bind(space, (4096,))

def fill(count):
    parent, batch = b"", 1 if alone else 8
    for number in range(0, count, batch):
        names = os.urandom(32 * batch)
        reserved = store.reserve(
            1, space, names, parent=parent, writers=(2,), now_s=0.0, request=number
        )
        store.commit(2, reserved.reservation, 0, os.urandom(8 * batch))
        parent = b"" if alone else names[-32:]

def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

fill(800)
before = resident_bytes()
fill(keys)
print(json.dumps([store.statistics.chunks, (resident_bytes() - before) / keys]))
"""


@pytest.mark.parametrize("shape", ["chains", "alone"])
def test_a_key_costs_less_than_500_bytes(shape):
    """Also where each chunk is a leaf, and so in the eviction queue as well."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "src"), str(KEYS), shape],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    chunks, bytes_a_key = json.loads(answer.stdout)
    assert chunks == KEYS + 800
    assert bytes_a_key < 500
