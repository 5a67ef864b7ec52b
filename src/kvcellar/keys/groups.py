"""The keys under which the KV groups of a model keep their parts of a chunk.

A chunk has one key in the chain. Each KV group of the model keeps something else of it, in bytes of
another size, so each needs a key of its own: the chain's, with a constant of the group laid over
it. The chain's keys are hashes, so what differs there differs here, and the keys of a whole lookup
cost one operation. Used by the connector's
scheduler half, and by the server where a tool names chunks. Pure.
"""

import functools

from blake3 import blake3

from kvcellar.keys.digest import KEY_BYTES

__all__ = ["group_keys"]

_CONTEXT = b"kvcellar-kv-group-1\x00"


def group_keys(chain_keys: bytes, group: int) -> bytes:
    """Return the keys of one KV group's parts of chunks.

    Args:
        chain_keys: `KEY_BYTES` a chunk.
        group: its index in the engine, from 0; those of the first are the chain's own.
    """
    if not group:
        return chain_keys
    count = len(chain_keys) // KEY_BYTES
    mask = int.from_bytes(_mask(group) * count)
    return (int.from_bytes(chain_keys) ^ mask).to_bytes(len(chain_keys))


@functools.lru_cache(maxsize=64)
def _mask(group: int) -> bytes:
    return blake3(_CONTEXT + group.to_bytes(4, "little")).digest()
