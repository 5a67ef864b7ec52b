"""The device on which the end-to-end tests run vLLM, and all that differs between devices.

`E2E_DEVICE` names it: `cpu` (the default), `cuda`, or `cuda-graphs`, which is a GPU with vLLM's
compilation, CUDA graphs and asynchronous scheduling instead of eager steps. `make test-gpu` sets
it. A GPU's engines compute in float32 with Triton's attention, so that answers of a cold prompt
and of a loaded one are as near each other as on a CPU and a wrong block of KV stands out.
"""

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEVICE", "IS_INSTALLED", "Device"]

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # Offers POST /reset_prefix_cache.
}
_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Spinning OMP threads on two cores make everything beside them several times slower.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CACHE_ROOT": str(Path(__file__).parent.parent.parent / ".stack" / "vllm-cache"),
}
# The sampler of FlashInfer compiles at the first request, where it is there at all.
_CUDA = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONHASHSEED": "0"}
# Several engines share a GPU; what they need of it is set by the number of their blocks.
_CUDA_OPTIONS = ("--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.1")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: as in `E2E_DEVICE`.
        block_tokens: tokens of vLLM's block there.
        options: words for `vllm serve`.
        environment: variables for it.
        starts_at_once: whether engines may start at the same time; on a GPU vLLM measures what is
            free while it starts, and an engine beside it spoils that.
        logprob_tolerance: by how much the log-probabilities of two right answers may differ.
        kv_tolerance: by how much an element of KV that was computed twice may differ.
    """

    name: str
    block_tokens: int
    options: tuple[str, ...]
    environment: dict[str, str]
    starts_at_once: bool
    logprob_tolerance: float
    kv_tolerance: float

    def blocks(self, token_count: int) -> str:
        """Return how many blocks hold so many tokens, as a word of a command line."""
        return str(token_count // self.block_tokens)


_DEVICES = {
    "cpu": Device(
        name="cpu",
        block_tokens=128,
        options=("--enforce-eager",),
        environment=_OFFLINE | _CPU,
        starts_at_once=True,
        # Float32 sums in another order differ by 1e-5; one wrong block of KV moves it by 0.1.
        logprob_tolerance=2e-3,
        kv_tolerance=1e-4,
    ),
    "cuda": Device(
        name="cuda",
        block_tokens=16,
        options=("--enforce-eager", *_CUDA_OPTIONS),
        environment=_OFFLINE | _CUDA,
        starts_at_once=False,
        # Triton's products of float32 keep ten bits of each factor, and no prefill is like another.
        logprob_tolerance=2e-2,
        kv_tolerance=2e-2,
    ),
    "cuda-graphs": Device(
        name="cuda-graphs",
        block_tokens=16,
        options=("--async-scheduling", *_CUDA_OPTIONS),
        environment=_OFFLINE | _CUDA,
        starts_at_once=False,
        logprob_tolerance=2e-2,
        kv_tolerance=2e-2,
    ),
}

DEVICE = _DEVICES[os.environ.get("E2E_DEVICE", "cpu")]


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("kvcellar")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


IS_INSTALLED = _is_installed()
"""Whether kvcellar is a distribution here, or only a folder on the path, as on a bare machine:
then there is no command of its name, and vLLM does not find the connector by its entry point."""
