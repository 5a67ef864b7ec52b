"""The keys under which the KV groups of a model keep their parts of a chunk.

A chunk has one key in the chain. Each KV group of the model keeps something else of it, in bytes of
another size, so each needs a key of its own: the chain's, with a constant of the group laid over
it. The chain's keys are hashes, so what differs there differs here, and the keys of a whole lookup
cost one operation. Used by the connector's scheduler half. Pure.
"""

import functools

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

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
    rows = np.frombuffer(chain_keys, np.uint8).reshape(-1, KEY_BYTES)
    return bytes((rows ^ _mask(group)).tobytes())


@functools.lru_cache(maxsize=64)
def _mask(group: int) -> NDArray[np.uint8]:
    digest = blake3(_CONTEXT + group.to_bytes(4, "little")).digest()
    return np.frombuffer(digest, np.uint8)
