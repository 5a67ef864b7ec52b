"""What is published about identity holds, in this process and in every other."""

import json
import os
import subprocess
import sys

import pytest
from tests.keys.vectors import KINDS, PATH, computed

from kvcellar.keys.digest import KEY_BYTES

VECTORS = json.loads(PATH.read_text(encoding="utf-8"))["vectors"]
ROOT = PATH.parents[1]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_published_vector_holds(vector):
    assert computed(vector) == vector["output"]


def test_there_are_vectors_of_every_kind_and_they_are_told_apart():
    assert {vector["kind"] for vector in VECTORS} == KINDS.keys()
    named = {vector["name"]: vector["output"] for vector in VECTORS}
    assert len(named) == len(VECTORS)
    assert named.pop("an empty salt is none") == named["nothing special"]
    digests = [output for output in named.values() if isinstance(output, str)]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {2 * KEY_BYTES}


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_another_process_with_another_hash_seed_computes_the_same(hash_seed):
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}, {str(ROOT)!r}]\n"
        "from tests.keys.vectors import main; main()"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert printed.stdout == PATH.read_bytes()
