"""What a lookup was about, told to each server after it, so that a miss can be explained there.

The server sees keys, which say nothing about why they are not there. One small message for each
lookup tells what the prompt is like, without a token or a secret in it: digests cut to eight bytes
and a sketch. Sent when the answer is already used; nobody waits for it, and where it cannot be
sent at once it is not sent. Used by the scheduler half.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcellar.engines.vllm.binding import Bound
from kvcellar.engines.vllm.parts import Line
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.keys.chain import ChunkChain
from kvcellar.keys.digest import short_digest
from kvcellar.protocol.limits import SKETCH_MAX_BYTES, TEXT_MAX
from kvcellar.protocol.messages import LookupNote, Request

__all__ = ["Notes", "Outcome"]


class Outcome:
    """What became of a lookup, as far as the engine knows."""

    ANSWERED = "answered"
    """The server said how much it has."""
    LATE = "late"
    """It said nothing in time."""
    PART = "part"
    """It has more than another server that keeps other ranks' shards of the same chunks."""
    GATE = "gate"
    """Loading what it has would take longer than computing."""
    SHORT = "short"
    """The prompt has no full chunk."""
    UNNAMED = "unnamed"
    """The prompt's KV has no safe name."""


class Teller(Protocol):
    """What notes need of `Exchange`."""

    def tell(self, line: Line, make: Callable[[int], Request]) -> None:
        """Send what expects nothing, or drop it."""
        ...


class Notes:
    """Tells the servers about lookups."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller

    def tell(
        self, state: RequestState, bound: Bound, outcome: str, *, found: Sequence[int] = ()
    ) -> None:
        """Say what became of a request's lookup; takes some ten microseconds a server.

        Args:
            state: the request.
            bound: where it was asked.
            outcome: see `Outcome`.
            found: leading chunks that each server has.
        """
        least = min(found, default=0)
        for part, line in enumerate(bound.lines):
            count = found[part] if found else 0
            is_more = outcome == Outcome.ANSWERED and count > least
            said = Outcome.PART if is_more else outcome
            note = _note(state, bound, said, state.chain, found=count, part=part)
            self._teller.tell(line, note)


def _note(
    state: RequestState,
    bound: Bound,
    outcome: str,
    chain: ChunkChain | None,
    *,
    found: int,
    part: int,
) -> Callable[[int], LookupNote]:
    request_id, tokens = state.request_id[:TEXT_MAX], int(state.request.num_tokens)
    salt = short_digest("salt", (state.request.cache_salt or "").encode("utf-8", "surrogatepass"))
    adapter = short_digest("adapter", state.adapter or b"")
    if chain is None:
        return lambda id_: LookupNote(
            id_, request_id, outcome, tokens, 0, 0, salt=salt, adapter=adapter
        )
    keys = min(chain.count, state.lookup_end(bound))
    found = min(found, keys)
    return lambda id_: LookupNote(
        id_,
        request_id,
        outcome,
        tokens,
        keys,
        found,
        missing=bytes(chain.key(found, part=part)) if found < keys else b"",
        salt=salt,
        adapter=adapter,
        items=chain.items_digest(),
        item_start=chain.first_item_start(),
        unit_tokens=chain.unit_tokens,
        sketch=chain.sketch(size_max_bytes=SKETCH_MAX_BYTES),
    )
