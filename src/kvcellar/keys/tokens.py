"""The keys of a prompt that is nothing but tokens, for programs that load no numpy.

What `keys.chain` does for an engine, without what an engine has beside tokens. Used by the HTTP
process, which is told tokens and not keys.
"""

import struct
from collections.abc import Sequence

from kvcellar.keys.digest import RequestSeed, next_key

__all__ = ["token_keys"]


def token_keys(seed: RequestSeed, token_ids: Sequence[int], *, chunk_tokens: int) -> bytes:
    """Return the keys of a prompt's full chunks, one after the other.

    Args:
        seed: see `keys.digest.request_seed`.
        token_ids: all tokens of the prompt, each in [0, 2³²).
        chunk_tokens: tokens a chunk, above 0.
    """
    assert chunk_tokens > 0, chunk_tokens
    count = len(token_ids) // chunk_tokens
    width = 4 * chunk_tokens
    packed = struct.pack(f"<{count * chunk_tokens}I", *token_ids[: count * chunk_tokens])
    keys = bytearray()
    last: bytes = seed
    for at in range(0, len(packed), width):
        last = next_key(last, packed[at : at + width])
        keys += last
    return bytes(keys)
