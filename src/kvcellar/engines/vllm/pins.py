"""Blocks of vLLM's pool that a running copy reads, kept from being given to anybody else.

A store copies after the step that computed its blocks, when their request may long be gone. Each
of its blocks is *pinned* meanwhile: its reference count in vLLM's own pool is raised, so the pool
neither hands it out nor evicts it. Pins take memory from requests, so there is a bound. Used by
`stores` on the engine's thread.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["PINNED_MAX_FRACTION", "Pins"]

PINNED_MAX_FRACTION = 0.5
"""Part of the pool that may be pinned. Most pinned blocks belong to running requests and take
nothing from anybody; the bound is for a server or a copy that lags behind a burst."""


class Pins:
    """The connector's references to blocks, on top of those that requests hold."""

    def __init__(self) -> None:
        self._pool: Any = None  # vLLM's BlockPool, which is handed over after construction.
        self.count = 0

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    def room(self) -> int:
        """Return how many more blocks may be pinned now."""
        if self._pool is None:
            return 0
        return max(0, int(self._pool.num_gpu_blocks * PINNED_MAX_FRACTION) - self.count)

    def free(self) -> int:
        """Return how many blocks the pool could hand out now."""
        return int(self._pool.get_num_free_blocks()) if self._pool is not None else 0

    def usable(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks are real ones: the null block stands for none."""
        blocks = self._pool.blocks
        return next(
            (index for index, id_ in enumerate(block_ids) if blocks[id_].is_null), len(block_ids)
        )

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks, which some request holds now, until they are let go."""
        self._pool.touch([self._pool.blocks[id_] for id_ in block_ids])
        self.count += len(block_ids)

    def let_go(self, block_ids: Sequence[int]) -> None:
        """Drop one pin of each block; a prefix's tail becomes reusable before its head."""
        self._pool.free_blocks([self._pool.blocks[id_] for id_ in reversed(block_ids)])
        self.count -= len(block_ids)
