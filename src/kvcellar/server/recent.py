"""What the server remembers of the last lookups and of the namespaces that were bound.

A bounded ring of what clients said about their lookups, and the digests of each namespace's
fields. `misses` explains from these; nothing else reads them. There is no token in here: a sketch
is a 32-bit hash for each 16 tokens, a salt and an adapter are eight bytes of a digest.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

from kvcellar.keys.digest import NamespaceId
from kvcellar.units import MIB

__all__ = ["LookupRecord", "NamespaceFacts", "Recent"]

RECORDS_MAX = 1_024
SKETCHES_MAX_BYTES = 16 * MIB
NAMESPACES_MAX = 256


class LookupRecord(msgspec.Struct, frozen=True):
    """One lookup, as its client described it; see `LookupNote` for the fields not named here.

    Attributes:
        when_s: on the server's clock.
        instance: the client's instance id.
        namespace: bound at that moment; empty where none was.
        is_written: somebody was storing the missing chunk at that moment.
        broken: what was wrong with the server then, a text a part.
    """

    when_s: float
    instance: str
    namespace: bytes
    request: str
    outcome: str
    tokens: int
    keys: int
    found: int
    missing: bytes
    salt: bytes
    adapter: bytes
    items: bytes
    item_start: int
    unit_tokens: int
    sketch: bytes
    is_written: bool
    broken: tuple[str, ...]


class NamespaceFacts(msgspec.Struct, frozen=True):
    """A namespace as the last instance that bound it described it.

    Attributes:
        instance: its instance id.
        model: as its processes named it.
        world_size: its ranks.
        chunk_tokens: tokens a chunk.
        shard_bytes: see `Bind.shard_bytes`.
        spans: see `Bind.spans`.
        fields: by name, the first hex digits of each field's digest.
    """

    instance: str
    model: str
    world_size: int
    chunk_tokens: int
    shard_bytes: tuple[int, ...]
    spans: tuple[int, ...]
    fields: Mapping[str, str]


class Recent:
    """The last lookups and namespaces; the newest is the last."""

    def __init__(
        self, records_max: int = RECORDS_MAX, sketches_max_bytes: int = SKETCHES_MAX_BYTES
    ) -> None:
        self._records: OrderedDict[tuple[str, str], LookupRecord] = OrderedDict()
        self._records_max = records_max
        self._sketches_max_bytes = sketches_max_bytes
        self._sketch_bytes = 0
        self._namespaces: dict[bytes, NamespaceFacts] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: LookupRecord) -> LookupRecord | None:
        """Keep a record in place of the same request's older one, and return that; the oldest go.

        A request is looked up again after it was preempted, or when a tier has answered.
        """
        name = (record.instance, record.request)
        older = self._records.pop(name, None)
        if older is not None:
            self._sketch_bytes -= len(older.sketch)
        self._records[name] = record
        self._sketch_bytes += len(record.sketch)
        while len(self._records) > self._records_max or (
            self._sketch_bytes > self._sketches_max_bytes
        ):
            _, gone = self._records.popitem(last=False)
            self._sketch_bytes -= len(gone.sketch)
        return older

    def newest_first(self) -> Iterator[LookupRecord]:
        """Yield the records, the newest first."""
        return reversed(self._records.values())

    def note_namespace(self, namespace: NamespaceId, facts: NamespaceFacts) -> None:
        """Keep what a namespace is made of."""
        self._namespaces.pop(namespace, None)
        self._namespaces[namespace] = facts
        if len(self._namespaces) > NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]

    def namespace(self, namespace: bytes) -> NamespaceFacts | None:
        """Return what is known of a namespace."""
        return self._namespaces.get(namespace)

    def namespaces_of(self, model: str) -> dict[NamespaceId, NamespaceFacts]:
        """Return the namespaces that instances of a model have bound; the newest is the last.

        Args:
            model: empty for all.
        """
        return {
            NamespaceId(name): facts
            for name, facts in self._namespaces.items()
            if model in {"", facts.model}
        }
