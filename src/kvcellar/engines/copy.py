"""Opens the copier that fits the memory in which an engine keeps its pages.

The worker half asks here and knows of no device. CPU pages are copied by numpy or numba, those of
CUDA devices through the host; any other device is refused by name.
"""

import platform
from collections.abc import Sequence

import torch

from kvcellar.engines.copy_cpu import CpuCopier
from kvcellar.engines.copy_device import DeviceCopier
from kvcellar.engines.pages import Copier, PageRun
from kvcellar.errors import UnsupportedModelError

__all__ = ["instruction_set", "open_copier"]


def open_copier(runs: Sequence[PageRun]) -> Copier:
    """Return a copier for runs that lie on one device.

    Raises:
        UnsupportedModelError: nothing here copies from that device.
    """
    device = runs[0].device
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CpuCopier(runs)
    if kind == "cuda":
        return DeviceCopier(runs)
    raise UnsupportedModelError(f"the KV cache lies on {device}; kvcellar copies from cpu and cuda")


def instruction_set(runs: Sequence[PageRun]) -> str:
    """Return what decides how a CPU's attention packs pages; empty for pages of accelerators."""
    if not runs[0].device.startswith("cpu"):
        return ""
    amx = "amx" if torch.cpu._is_amx_tile_supported() else "no amx"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"
