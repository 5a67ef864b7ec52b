"""Compute what docs/vectors.json says, from its inputs; prints it when run as a program.

Run by the tests in processes with other hash seeds, and by whoever adds a vector. A value that is
there already never changes: stored chunks are found by it.
"""

import json
import sys
from pathlib import Path

from kvcellar.keys.chain import ChunkChain, SpanItem
from kvcellar.keys.digest import (
    KEY_BYTES,
    EngineDigest,
    NamespaceId,
    RequestSeed,
    engine_digest,
    field_digests,
    namespace_id,
    request_seed,
)
from kvcellar.keys.groups import group_keys
from kvcellar.layout.shard import PageRegion, ShardLayout, Vectors

PATH = Path(__file__).parents[2] / "docs" / "vectors.json"


def _plain(value):
    """Return a field's value; bytes stand as {"hex": …} in JSON."""
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _optional_bytes(text):
    return None if text is None else bytes.fromhex(text)


def _layout(given):
    regions = tuple(PageRegion(name, page_bytes) for name, page_bytes in given["regions"])
    vectors = Vectors(*given["vectors"]) if "vectors" in given else None
    layout = ShardLayout(given["rank"], given["block_tokens"], regions, given["format"], vectors)
    return layout.fingerprint()


def _engine(given):
    return engine_digest({name: _plain(value) for name, value in given["fields"].items()})


def _fields(given):
    return field_digests({name: _plain(value) for name, value in given["fields"].items()})


def _namespace(given):
    return namespace_id(
        EngineDigest(bytes.fromhex(given["engine"])),
        layouts=[bytes.fromhex(layout) for layout in given["layouts"]],
        chunk_tokens=given["chunk_tokens"],
        fidelity=given["fidelity"],
        epoch=bytes.fromhex(given["epoch"]),
        part=tuple(given.get("part", (0, 1))),
    )


def _seed(given):
    return request_seed(
        NamespaceId(bytes.fromhex(given["namespace"])),
        adapter=_optional_bytes(given["adapter"]),
        cache_salt=given["cache_salt"],
    )


def _keys(given):
    items = [
        SpanItem(item["start"], item["length"], bytes.fromhex(item["identity"]), item["kind"])
        for item in given["items"]
    ]
    seed = RequestSeed(bytes.fromhex(given["seed"]))
    chain = ChunkChain(seed, chunk_tokens=given["chunk_tokens"], items=items)
    chain.extend(given["tokens"], token_count=len(given["tokens"]))
    return [chain.key(index).hex() for index in range(chain.count)]


def _group_keys(given):
    keys = group_keys(bytes.fromhex("".join(given["keys"])), given["group"]).hex()
    return [keys[at : at + 2 * KEY_BYTES] for at in range(0, len(keys), 2 * KEY_BYTES)]


KINDS = {
    "layout fingerprint": _layout,
    "engine digest": _engine,
    "field digests": _fields,
    "namespace": _namespace,
    "request seed": _seed,
    "chunk keys": _keys,
    "keys of a KV group": _group_keys,
}


def computed(vector):
    """Return what a vector's output must be, as it stands in JSON."""
    value = KINDS[vector["kind"]](vector["input"])
    return value.hex() if isinstance(value, bytes) else value


def main():
    """Print the file as it would be with the outputs that this process computes."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    lines = [
        json.dumps({**vector, "output": computed(vector)}) for vector in document.pop("vectors")
    ]
    head = json.dumps(document, indent=1)[:-2]
    sys.stdout.write(f'{head},\n "vectors": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
