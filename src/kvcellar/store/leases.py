"""A read lease: the promise that some chunks' slots keep their bytes until it ends.

One lookup grants one lease over all chunks that it found; it ends by handle, by a heartbeat that
does not list it, or with its owner, and never by a clock. Kept in `Holdings`, ended by the store.
"""

from kvcellar.store.entries import Entry

__all__ = ["Lease"]


class Lease:
    """What one lookup holds.

    Attributes:
        request: id of the request that granted it, in its owner's count.
        entries: the leased entries; each counts this lease in its `leases`.
    """

    __slots__ = ("entries", "request")

    def __init__(self, request: int, entries: list[Entry]) -> None:
        self.request = request
        self.entries = entries
