"""Memory that loads leave for one another, so that some request can always go on.

vLLM holds the blocks of a load from its admission on, and admits one only if those that were
admitted before can still get what their prompts need besides. For groups with windows it counts
the blocks that a window gave back as if they were still there, reserves too little, and several
loads may come to hold all memory while none of their requests can take its first step: nothing
runs, and nothing ever does (seen with vLLM 0.32). So a hit of such a model waits while others are
being loaded that it would leave too little to. Used by the scheduler half on the engine's thread.
"""

from collections.abc import Sequence

from kvcellar.clock import Clock
from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.pins import Pins

__all__ = ["HOLD_S", "Headroom"]

HOLD_S = 10.0
"""How long a hit waits for others' loads at most; then it is computed."""


class Headroom:
    """What requests that were loaded, or are being loaded, need for their next step."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        step_tokens: int,
        pins: Pins,
        clock: Clock,
    ) -> None:
        """Hold nothing back yet.

        Args:
            groups: the model's KV groups.
            step_tokens: the most tokens that a step of the engine computes.
            pins: know vLLM's pool.
            clock: for how long a hit has waited.
        """
        self._groups = groups
        self._step_tokens = step_tokens
        self._pins = pins
        self._clock = clock
        self._is_needed = any(not group.is_whole for group in groups)
        self._needs: dict[str, int] = {}
        self._waits: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._needs)

    def admit(
        self, request_id: str, *, computed_tokens: int, found_tokens: int, prompt_tokens: int
    ) -> int | None:
        """Return how many of the tokens that could be loaded are to be; None: ask again.

        Args:
            request_id: the request's.
            computed_tokens: tokens that the engine has itself.
            found_tokens: tokens beyond those that could be loaded.
            prompt_tokens: tokens that must be there before the request's next one.
        """
        if not self._is_needed or not self._needs:
            return found_tokens
        stop = computed_tokens + found_tokens
        taken = sum(self._held_blocks(group, computed_tokens, stop) for group in self._groups)
        needed = sum(self._needs.values()) + self._step_blocks(prompt_tokens - stop)
        if self._pins.free() - taken >= needed:
            return found_tokens
        now_s = self._clock.monotonic_s()
        is_patient = now_s - self._waits.setdefault(request_id, now_s) < HOLD_S
        return None if is_patient else 0

    def begin(self, request_id: str, *, rest_tokens: int) -> None:
        """Note a load, after which so many tokens of the prompt are left to compute."""
        self._waits.pop(request_id, None)
        self._needs[request_id] = self._step_blocks(rest_tokens)

    def end(self, request_id: str) -> None:
        """Note that the request has made a step, or never will."""
        self._needs.pop(request_id, None)
        self._waits.pop(request_id, None)

    def _step_blocks(self, rest_tokens: int) -> int:
        tokens = max(1, min(rest_tokens, self._step_tokens))
        return sum(-(-tokens // group.block_tokens) + 1 for group in self._groups)

    def _held_blocks(self, group: KVGroup, start: int, stop: int) -> int:
        first = max(start, group.kept_from(stop)) // group.block_tokens
        return -(-stop // group.block_tokens) - first
