"""The bounds of the protocol: how much one message may say.

Both sides check them, so that a lying length or a runaway list costs its sender the connection
and the server no memory.
"""

from kvcellar.units import MIB

__all__ = [
    "COUNTS_MAX",
    "FIELDS_MAX",
    "FRAME_MAX_BYTES",
    "GROUPS_MAX",
    "HANDLES_MAX",
    "HELLO_TIMEOUT_S",
    "KEYS_MAX",
    "LAYOUT_REGIONS_MAX",
    "PAGE_MAX",
    "SKETCH_MAX_BYTES",
    "TEXT_MAX",
    "WORLD_SIZE_MAX",
]

FRAME_MAX_BYTES = 32 * MIB
"""A frame's body; a lookup of `KEYS_MAX` keys answered for 16 shards fits."""
KEYS_MAX = 65_536
"""Keys of one request: 16 million tokens at 256 a chunk."""
HANDLES_MAX = 262_144
"""Handles of one heartbeat or release."""
TEXT_MAX = 4_096
"""Characters of a name in a hello."""
WORLD_SIZE_MAX = 1_024
"""Ranks of one instance."""
GROUPS_MAX = 64
"""KV groups of one model."""
LAYOUT_REGIONS_MAX = 4_096
"""Regions of one shard's layout."""
HELLO_TIMEOUT_S = 5.0
"""Seconds that a new connection may take to say hello."""
COUNTS_MAX = 64
"""Named counters of one heartbeat."""
FIELDS_MAX = 2_048
"""Named fields of one bind: a layout for each of a thousand ranks fits."""
SKETCH_MAX_BYTES = 32_768
"""A lookup note's sketch: 131,072 tokens of 16 a unit; what is beyond is not compared."""
PAGE_MAX = 5_000
"""Chunks of one page of a listing, as in LMCache."""
