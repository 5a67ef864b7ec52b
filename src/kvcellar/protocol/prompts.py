"""The messages about prompts that tools send: why one missed, and what is to be fetched for one.

Apart from `messages`, which gives them on, because no engine sends them. A tool that has tokens
asks for the namespaces of a model first, makes the keys, and sends those.
"""

from typing import Any

import msgspec

__all__ = [
    "AskPrefetch",
    "Explain",
    "ExplainPrompt",
    "Explained",
    "NamespaceList",
    "NamespaceNote",
    "Namespaces",
    "Prefetch",
    "PrefetchNews",
]


class Explain(msgspec.Struct, tag="explain", frozen=True, array_like=True):
    """Ask why requests did not hit. Reply: `Explained`.

    Attributes:
        request: what the ids of the requests begin with or contain; empty for the last ones.
        count: how many requests at most, the newest first.
    """

    id: int
    request: str = ""
    count: int = 10


class ExplainPrompt(msgspec.Struct, tag="explain_prompt", frozen=True, array_like=True):
    """Ask why a prompt would not hit that nobody has sent. Reply: `Explained`, with one.

    Attributes:
        namespace: of `NamespaceList`.
        tokens: of the prompt.
        keys: 32 bytes a chunk, in prefix order, at most `limits.KEYS_MAX`.
        salt: as in `LookupNote`.
        unit_tokens: as in `LookupNote`.
        sketch: as in `LookupNote`.
    """

    id: int
    namespace: bytes
    tokens: int
    keys: bytes
    salt: bytes = b""
    unit_tokens: int = 16
    sketch: bytes = b""


class Explained(msgspec.Struct, tag="explained", frozen=True, array_like=True):
    """Plain data for each request, newest first; the shape is in `server.misses`."""

    id: int
    # Any: see there; the wire only carries it.
    misses: tuple[dict[str, Any], ...]


class NamespaceNote(msgspec.Struct, frozen=True, array_like=True):
    """One namespace, as the instance that bound it last described it.

    Attributes:
        namespace: 32 bytes.
        instance: its instance id.
        model: its model.
        world_size: its ranks.
        chunk_tokens: tokens a chunk.
    """

    namespace: bytes
    instance: str
    model: str
    world_size: int
    chunk_tokens: int


class Namespaces(msgspec.Struct, tag="namespaces", frozen=True, array_like=True):
    """Ask for the namespaces of a model that were bound since the start. Reply: `NamespaceList`.

    Attributes:
        model: empty for all.
    """

    id: int
    model: str = ""


class NamespaceList(msgspec.Struct, tag="namespace_list", frozen=True, array_like=True):
    """The namespaces, the one that was bound last first."""

    id: int
    namespaces: tuple[NamespaceNote, ...]


class Prefetch(msgspec.Struct, tag="prefetch", frozen=True, array_like=True):
    """Fetch from the tiers what the arena lacks of a prefix. Reply: `PrefetchNews`.

    Attributes:
        namespace: of `NamespaceList`.
        keys: 32 bytes a chunk, in prefix order, at most `limits.KEYS_MAX`.
        tenant: on whose account the chunks go, see `kvcellar.tenancy.names`.
    """

    id: int
    namespace: bytes
    keys: bytes
    tenant: str = ""


class AskPrefetch(msgspec.Struct, tag="ask_prefetch", frozen=True, array_like=True):
    """Ask what has become of a prefetch. Reply: `PrefetchNews`.

    Attributes:
        prefetch: as `PrefetchNews` named it.
    """

    id: int
    prefetch: bytes


class PrefetchNews(msgspec.Struct, tag="prefetch_news", frozen=True, array_like=True):
    """What has become of a prefetch.

    Attributes:
        prefetch: 16 bytes that name it; empty where there is no such one, or none any more.
        is_over: nothing more will come.
        found: leading chunks that the arena had at the beginning, or has had at the end.
        total: chunks that were asked for.
    """

    id: int
    prefetch: bytes = b""
    is_over: bool = True
    found: int = 0
    total: int = 0
