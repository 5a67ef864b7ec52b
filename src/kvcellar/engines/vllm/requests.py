"""What the scheduler half knows of one request, and what names its chunks.

A request's keys depend on more than its tokens: the adapter, the tenant's salt, images and prompt
embeddings, all gathered here and read in full, never as a Python hash or a counter's id. Keys are
made when they are first needed, not when the request arrives, because a connector beside ours may
still shorten the prompt. Used by lookups and stores, kept by the scheduler half.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from kvcellar.engines.vllm.adapters import Adapters
from kvcellar.engines.vllm.binding import Bound
from kvcellar.engines.vllm.receipts import Receipt
from kvcellar.engines.vllm.versions import mixed_prompt_mask, optional
from kvcellar.keys.chain import ChunkChain, SpanItem
from kvcellar.keys.digest import request_seed
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.tenancy.names import tenant_of

__all__ = ["RequestState", "RequestWishes", "read_wishes"]

# Any: vLLM's Request, which its releases define differently.

WISHES = ("skip_save", "max_offload_tokens")


@dataclass(frozen=True)
class RequestWishes:
    """What a client may ask for one request in `kv_transfer_params`.

    Attributes:
        may_save: False with `skip_save`.
        tokens_max: `max_offload_tokens`: store no chunk that goes beyond; None for no bound.
        problem: what could not be read and was left aside, for the log; "" for nothing.
    """

    may_save: bool = True
    tokens_max: int | None = None
    problem: str = ""


def read_wishes(params: Mapping[str, object] | None, prefixes: tuple[str, ...]) -> RequestWishes:
    """Return a request's wishes; one that makes no sense never fails the request.

    Who wishes something about storing wants less stored, so what cannot be read stores nothing.

    Args:
        params: the request's `kv_transfer_params`.
        prefixes: "kvcellar." and whatever other names the connector answers to.
    """
    may_save, tokens_max, problem = True, None, ""
    for key, value in (params or {}).items():
        name = next((key[len(at) :] for at in prefixes if key.startswith(at)), "")
        if name == "skip_save":
            may_save = value is False
            if not isinstance(value, bool):
                problem = f"{key}={value!r}: write true or false"
        elif name == "max_offload_tokens":
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                tokens_max = value
            else:
                may_save, problem = False, f"{key}={value!r}: write a number of tokens"
        elif name:
            meant = difflib.get_close_matches(name, WISHES, n=1)
            if meant:
                # Who mistyped a wish about storing wanted less stored.
                right = key.removesuffix(name) + meant[0]
                may_save, problem = False, f"{key} is unknown: did you mean {right}?"
            elif key.startswith("kvcellar."):
                problem = f"{key} is unknown; known are {' and '.join(WISHES)}"
    return RequestWishes(may_save, tokens_max, problem)


@dataclass(eq=False)
class RequestState:
    """One request between its arrival and its end, also over preemptions.

    Attributes:
        request: vLLM's own object; tokens are read from it and never copied.
        wishes: see `RequestWishes`.
        receipt: what was moved for it.
        tables: its block table in each KV group as the last steps scheduled it, with ids that the
            group may have given away since; empty while it has none.
        computed: so many leading tokens were computed when a step was scheduled last.
        chain: keys of its full chunks; None until they are needed.
        tokens_end: only chunks of so many leading tokens are offered.
        next_chunk: the first chunk that has not been offered to the server.
        offer_after_s: when to offer again after the server had no memory or said nothing.
        load_stop: tokens that are there once what was promised to vLLM last has been loaded.
        may_save: whether chunks are offered at all.
        may_load: False once a load failed or a lookup was not answered in time.
        adapter: what names its adapter; None without one.
    """

    request: Any
    wishes: RequestWishes
    receipt: Receipt
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    chain: ChunkChain | None = None
    tokens_end: int = 0
    next_chunk: int = 0
    offer_after_s: float = 0.0
    load_stop: int = 0
    may_save: bool = True
    may_load: bool = True
    adapter: bytes | None = None
    _bound: Bound | None = None
    _tokens: int = 0

    @property
    def request_id(self) -> str:
        """Return vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def tenant(self) -> str:
        """Return on whose account the request's chunks go."""
        return tenant_of(self.request.cache_salt)

    def follow(
        self, block_ids: tuple[list[int], ...] | None, *, is_whole: bool, computed: int
    ) -> None:
        """Keep the block tables as a step schedules them.

        Args:
            block_ids: of each KV group; None where nothing was added.
            is_whole: they are the whole tables.
            computed: tokens that were there before the step.
        """
        if is_whole and block_ids is not None:
            self.tables, self.computed = [[*ids] for ids in block_ids], computed
            return
        # It goes back where drafted tokens are not accepted; what vLLM gave away stays away.
        self.computed = max(self.computed, computed)
        if block_ids is not None:
            for table, ids in zip(self.tables, block_ids, strict=True):
                table.extend(ids)

    def put_off(self, bound: Bound, *, chunk: int, until_s: float) -> None:
        """Offer the chunks from `chunk` on again later: what is behind a gap cannot be found."""
        if self._bound is bound:
            self.next_chunk = min(self.next_chunk, chunk)
            self.offer_after_s = until_s

    def has_new_chunks(self, bound: Bound, *, token_count: int) -> bool:
        """Return whether there may be chunks to offer; cheap, for every request of every step."""
        next_chunk = self.next_chunk if self._bound is bound else 0
        return token_count >= (next_chunk + 1) * bound.chunk_tokens

    def lookup_end(self, bound: Bound) -> int:
        """Return how many leading chunks are worth a lookup, whether they have keys or not.

        vLLM computes the last token of a prompt that is there in full. What that token sees may
        begin before what a window keeps at the prompt's end, so a hit ends before it.
        """
        tokens = int(self.request.num_tokens) - (not bound.is_divisible)
        return min(tokens // bound.chunk_tokens, KEYS_MAX // len(bound.groups))

    def has_shrunk(self) -> bool:
        """Return whether tokens were taken away since the keys were made."""
        return bool(self.request.num_tokens < self._tokens)

    def keys(self, bound: Bound, adapters: Adapters, *, token_count: int) -> ChunkChain | None:
        """Return the keys of the full chunks among the first tokens; None: not to be cached.

        Args:
            bound: the namespace of now; another one than before makes new keys.
            adapters: names the request's adapter.
            token_count: tokens that are there, at most the request's own.
        """
        request = self.request
        if self._bound is not bound or self.has_shrunk():
            # Another life of the server holds nothing of what the last one was offered, and a
            # prompt that was shortened has other chunks.
            self.chain, self.next_chunk, self._bound = None, 0, bound
        if self.chain is None:
            self.chain = self._new_chain(bound, adapters)
            if self.chain is None:
                self.may_load = self.may_save = False
                return None
        self._tokens = request.num_tokens
        self.chain.extend(request.all_token_ids, token_count=token_count)
        return self.chain

    def _new_chain(self, bound: Bound, adapters: Adapters) -> ChunkChain | None:
        request = self.request
        if optional(request, "resumable", False):
            # Its next input may replace tokens that were computed already.
            return None
        lora = request.lora_request
        adapter = adapters.identity(lora) if lora is not None else None
        if lora is not None and adapter is None:
            return None
        self.adapter = adapter
        seeds = [
            request_seed(part.namespace, adapter=adapter, cache_salt=request.cache_salt)
            for part in bound.parts
        ]
        items = [*_media_items(request), *_embedding_items(request, bound.chunk_tokens)]
        return ChunkChain(*seeds, chunk_tokens=bound.chunk_tokens, items=items)


def _media_items(request: Any) -> list[SpanItem]:
    return [
        SpanItem(
            start=feature.mm_position.offset,
            length=feature.mm_position.length,
            identity=feature.identifier.encode(),
            kind=feature.modality,
        )
        for feature in request.mm_features or ()
        if feature.mm_position.length > 0
    ]


def _embedding_items(request: Any, chunk_tokens: int) -> list[SpanItem]:
    """Return one item for each chunk's span of embeddings: their tokens are all zero."""
    embeddings = request.prompt_embeds
    if embeddings is None:
        return []
    import torch

    mask = mixed_prompt_mask(request)
    items = []
    for start in range(0, embeddings.shape[0], chunk_tokens):
        piece = embeddings[start : start + chunk_tokens].contiguous().cpu()
        digest = blake3(str(piece.dtype).encode() + b"\x00")
        digest.update(piece.flatten().view(torch.uint8).numpy().tobytes())
        digest.update(mask[start : start + chunk_tokens])
        items.append(SpanItem(start, piece.shape[0], digest.digest(), "embeds"))
    return items
