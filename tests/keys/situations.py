"""Everything that KV depends on, as one value that tests can draw and change in one place."""

import dataclasses
import json

from hypothesis import strategies as st

from kvcellar.keys.chain import ChunkChain, SpanItem
from kvcellar.keys.digest import engine_digest, namespace_id, request_seed
from kvcellar.layout.shard import PageRegion, ShardLayout, Vectors


@dataclasses.dataclass(frozen=True)
class Situation:
    """An engine, a request and its tokens."""

    model: str = "org/model"
    revision: str | None = None
    weights: bytes = b"sampled"
    overrides: tuple[tuple[str, object], ...] = ()
    kv_dtype: str = "auto"
    draft_model: str | None = None
    layouts: tuple[ShardLayout, ...] = ()
    chunk_tokens: int = 4
    fidelity: str = "exact"
    epoch: bytes = b""
    part: tuple[int, int] = (0, 1)
    adapter: bytes | None = None
    cache_salt: str | None = None
    items: tuple[SpanItem, ...] = ()
    tokens: tuple[int, ...] = tuple(range(12))

    def namespace(self):
        engine = engine_digest(
            {
                "model": self.model,
                "revision": self.revision,
                "weights": self.weights,
                "config": json.dumps(dict(self.overrides), sort_keys=True),
                "kv_dtype": self.kv_dtype,
                "draft_model": self.draft_model,
            }
        )
        return namespace_id(
            engine,
            layouts=[layout.fingerprint() for layout in self.layouts],
            chunk_tokens=self.chunk_tokens,
            fidelity=self.fidelity,
            epoch=self.epoch,
            part=self.part,
        )

    def keys(self):
        """Return the keys of all full chunks."""
        seed = request_seed(self.namespace(), adapter=self.adapter, cache_salt=self.cache_salt)
        chain = ChunkChain(seed, chunk_tokens=self.chunk_tokens, items=self.items)
        chain.extend(self.tokens, token_count=len(self.tokens))
        return [chain.key(index) for index in range(chain.count)]

    def meaning(self, chunk):
        """Return a value that is equal exactly where the KV of a chunk is the same."""
        stop = (chunk + 1) * self.chunk_tokens
        rest = dataclasses.replace(self, items=(), tokens=(), cache_salt=self.cache_salt or None)
        # An image that ends in a later chunk has its later part there: what counts here is where
        # it begins, which one it is, and that it is this long.
        items = sorted(item for item in self.items if item.start < stop)
        # 1, 1.0 and True are equal in Python and three different settings in a configuration.
        return repr(rest), self.tokens[:stop], items


def layout(rank=0, *, page_bytes=64, names=("layer.0", "layer.1"), **changes):
    regions = tuple(PageRegion(name, page_bytes) for name in names)
    given = {"block_tokens": 2, "format": "bf16", **changes}
    return ShardLayout(rank, regions=regions, **given)


# Few values for each field, so that two draws are equal in most of them and differ in one.
VALUES = {
    "model": ["org/model", "org/mode", "l"],
    "revision": [None, "", "main"],
    "weights": [b"sampled", b"other", b""],
    "overrides": [(), (("rope", 1),), (("rope", 1.0),), (("rope", "1"),), (("rope", True),)],
    "kv_dtype": ["auto", "fp8"],
    "draft_model": [None, "none"],
    "layouts": [
        (layout(0),),
        (layout(1),),
        (layout(0), layout(1)),
        (layout(1), layout(0)),
        (layout(0, page_bytes=128),),
        (layout(0, names=("layer.1", "layer.0")),),
        (layout(0, names=("layer.0",)),),
        (layout(0, format="fp8"),),
        (layout(0, block_tokens=4),),
        (layout(0, vectors=Vectors("bfloat16", 8, 2, 4)),),
        (layout(0, vectors=Vectors("float16", 8, 2, 4)),),
        (layout(0, vectors=Vectors("bfloat16", 4, 2, 8)),),
    ],
    "chunk_tokens": [2, 4, 6],
    "fidelity": ["exact", "int8"],
    "epoch": [b"", b"\x00", b"\x01" * 16],
    "part": [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4)],
    "adapter": [None, b"", b"name:path:1", b"name:path:2"],
    "cache_salt": [None, "", "tenant", "tenant2"],
}
ITEMS = st.builds(
    SpanItem,
    start=st.integers(0, 11),
    length=st.integers(1, 6),
    identity=st.sampled_from([b"cat", b"dog", b""]),
    kind=st.sampled_from(["image", "audio", "embeds"]),
)
FIELDS = {name: st.sampled_from(values) for name, values in VALUES.items()} | {
    "items": st.lists(ITEMS, max_size=2).map(tuple),
    "tokens": st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=4, max_size=13).map(tuple),
}
SITUATIONS = st.builds(Situation, **FIELDS)
