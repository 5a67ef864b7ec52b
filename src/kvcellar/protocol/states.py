"""The words of the protocol that are numbers or names on the wire: roles, states, outcomes.

Apart from `messages`, which gives them on, because their meaning is longer than their fields.
"""

__all__ = ["ChunkState", "CommitOutcome", "Role"]


class Role:
    """What a client is; decides what it may ask and whether it gets the arena."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    TOOL = "tool"


class ChunkState:
    """One byte for each key of a `Reserve`."""

    PRESENT = 0
    """Stored already, complete: nothing to do."""
    RESERVED = 1
    """Slots are reserved: copy, then commit."""
    BUSY = 2
    """Another writer is storing it: nothing to do."""
    FULL = 3
    """No memory can be had now: not stored, and neither is what follows."""


class CommitOutcome:
    """What a `Commit` or `Abort` of one shard came to."""

    PENDING = 0
    """Noted; other shards are still out."""
    VISIBLE = 1
    """That was the last shard: the chunks can be found now."""
    DROPPED = 2
    """The chunks will not become visible: another shard failed, the cache was cleared meanwhile,
    or another writer was first. The slots are the server's again."""
