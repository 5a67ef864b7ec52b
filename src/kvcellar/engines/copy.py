"""Opens the copier that fits the memory in which an engine keeps its pages.

The worker half asks here and knows of no device. CPU pages are copied by numpy or numba, those of
accelerators by Triton kernels and the copy engine.
"""

import platform
from collections.abc import Sequence

import torch

from kvcellar.engines.copy_cpu import CpuCopier
from kvcellar.engines.pages import Copier, PageRun
from kvcellar.errors import UnsupportedModelError
from kvcellar.layout.shard import Vectors

__all__ = ["instruction_set", "open_copier"]


def open_copier(
    runs: Sequence[PageRun],
    *,
    vectors: Vectors | None = None,
    block_tokens: int = 1,
    beside: Copier | None = None,
) -> Copier:
    """Return a copier for runs that lie on one device.

    Args:
        runs: where the pages lie.
        vectors: how each page divides, where that is known.
        block_tokens: tokens a block.
        beside: another copier for the same device, whose streams and staging this one may use:
            of all of them one copy runs at a time in each direction.

    Raises:
        UnsupportedModelError: nothing here copies from that device, or pages of that kind.
    """
    device = runs[0].device
    if device.startswith("cpu"):
        return CpuCopier(runs)
    try:
        # Imported here: Triton is neither needed nor always there where the pages are a CPU's.
        from kvcellar.engines.copy_gpu import GpuCopier, open_gpu_copier
    except ImportError as error:
        raise UnsupportedModelError(
            f"the KV cache lies on {device}, whose copies need Triton: {error}"
        ) from error
    if not torch.get_device_module(device.partition(":")[0]).is_available():
        raise UnsupportedModelError(f"the KV cache lies on {device}, which this torch cannot use")
    assert beside is None or isinstance(beside, GpuCopier), type(beside)
    return open_gpu_copier(runs, vectors=vectors, block_tokens=block_tokens, beside=beside)


def instruction_set(runs: Sequence[PageRun]) -> str:
    """Return what decides how a CPU's attention packs pages; empty for pages of accelerators."""
    if not runs[0].device.startswith("cpu"):
        return ""
    amx = "amx" if torch.cpu._is_amx_tile_supported() else "no amx"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"
