"""The kernels compile for a GPU on a machine that has none; that they are right is shown elsewhere.

Triton's interpreter runs what its compiler would refuse, so a kernel that passes every other test
here may still not exist on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvcellar.engines import kernels, kernels_int8

INTS = ("first_page", "chunk_blocks", "chunk_pages", "first_word", "words", "slices",
        "scales_at", "exact_at", "exact_vectors", "inner", "block_tokens")

def build(kernel, warps, staging, **constants):
    types = {"staging": staging, "shard_bytes": "i64", **dict.fromkeys(INTS, "i32")}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i64") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert "cubin" in built.asm

rows = {"SLICES": 1, "SLICE_ROWS": 16, "ROWS": 4, "LANES": kernels.LANES}
for is_store in (True, False):
    build(kernels._move, 8, "*i32", PAGE_WORDS=16_384, IS_ALIGNED=True, IS_STORE=is_store, **rows)
    build(kernels_int8._code, 4, "*u8", COUNT=256, ELEMENTS=128, WIDTH=128, AT_ONCE=32, EXACT=4,
          IS_BF16=True, IS_STORE=is_store)
build(kernels._move, 8, "*i32", PAGE_WORDS=1_000, IS_ALIGNED=False, IS_STORE=True,
      **{**rows, "SLICE_ROWS": 1, "ROWS": 1})
build(kernels_int8._sum, 8, "*i32", SLICE_ROWS=16, ROWS=4, LANES=kernels.LANES)
print("built")
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_a_gpu():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "0"}
    # Triton decides when it is imported whether it interprets, so this takes a process of its own.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "built\n"
