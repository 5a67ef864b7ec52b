"""The configuration of one cache server, and what its documentation says about each setting.

Made once, by `config.load`, and handed down by part; nothing below reads flags or the
environment. The annotations are the single source for `--help` and docs/configuration.md: what a
setting means, its unit, and when anybody should change it.
"""

import json
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

from kvcellar.units import GIB

__all__ = [
    "EVICTION_POLICIES",
    "L1_CODECS",
    "L2_PREFETCH_POLICIES",
    "L2_STORE_POLICIES",
    "LOG_LEVELS",
    "ServerConfig",
    "Setting",
    "settings",
]

EVICTION_POLICIES = ("LRU", "IsolatedLRU", "noop")
L1_CODECS = ("raw", "int8")
L2_STORE_POLICIES = ("default", "skip_l1")
L2_PREFETCH_POLICIES = ("default", "retain")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _meta(flag: str, value: str, description: str, *, change: str) -> Meta:
    return Meta(description=description, extra={"flag": flag, "value": value, "change": change})


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `kvcellar server` was told."""

    l1_bytes: Annotated[
        int,
        _meta(
            "--l1-size-gb",
            "GB",
            "Memory for the cache, in GB of 1024³ bytes. It is taken in the background, in steps; "
            "the server serves from the first second on.",
            change="Always: as much as the host can spare beside the engines.",
        ),
    ]
    eviction_policy: Annotated[
        str,
        _meta(
            "--eviction-policy",
            "{LRU,IsolatedLRU,noop}",
            "What leaves when memory is needed: LRU evicts the least recently used chunks, the "
            "tail of a prefix before its head; IsolatedLRU does so for each cache_salt apart, by "
            "quotas (docs/tenants.md); noop evicts nothing, so a full cache stays as it is.",
            change="IsolatedLRU when tenants share the server; noop when a fixed set of prompts "
            "is to stay for good; otherwise LRU.",
        ),
    ]
    eviction_watermark: Annotated[
        float | None,
        _meta(
            "--eviction-trigger-watermark",
            "FRACTION",
            "Evict in the background once so much of L1 is in use, from 0 to 1. Without it nothing "
            "leaves before its memory is needed, which keeps more and costs a store some 15 µs a "
            "chunk. With --eviction-ratio alone it is 0.8.",
            change="When L1 is to stay below a fill level; not for speed.",
        ),
    ] = None
    eviction_ratio: Annotated[
        float | None,
        _meta(
            "--eviction-ratio",
            "FRACTION",
            "How much of L1 is made free when the watermark is reached, from 0 to 1. With "
            "--eviction-trigger-watermark alone it is 0.2.",
            change="Together with --eviction-trigger-watermark.",
        ),
    ] = None
    host: Annotated[
        str,
        _meta(
            "--host",
            "HOST",
            "Address of the engines' port. Engines learn the server's Unix socket there, so it "
            "need be reachable from this host only.",
            change="When an engine runs in a container of this host with its own network.",
        ),
    ] = "localhost"
    port: Annotated[
        int,
        _meta(
            "--port",
            "PORT",
            "The engines' port (`lmcache.mp.port` in an engine's configuration). 0 takes any free "
            "one; the start line shows it.",
            change="When several servers share a host.",
        ),
    ] = 5555
    http_host: Annotated[
        str,
        _meta(
            "--http-host",
            "HOST",
            "Address of the HTTP pages. From other hosts they can be read; who may change "
            "anything says --admin-token-file.",
            change="0.0.0.0 when Prometheus or a probe calls from outside.",
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int,
        _meta(
            "--http-port",
            "PORT",
            "Port of /status, /metrics, /healthcheck and /cache/clear. 0 takes any free one.",
            change="When several servers share a host.",
        ),
    ] = 8080
    chunk_tokens: Annotated[
        int,
        _meta(
            "--chunk-size",
            "TOKENS",
            "Tokens a chunk: the unit of storing and finding. A wish: an engine whose blocks do "
            "not divide it uses the next multiple that they do divide.",
            change="Smaller finds more of short prompts and costs more bookkeeping.",
        ),
    ] = 256
    l1_codec: Annotated[
        str,
        _meta(
            "--l1-codec",
            "{raw,int8}",
            "How chunks are kept: raw gives back every bit; int8 keeps a byte an element and a "
            "scale for each token and head, so that half the memory and half of the link's time "
            "suffice, with an error of the size of bf16's own rounding. int8 needs engines on an "
            "accelerator with a bf16 or fp16 cache; others compute. The two never share chunks.",
            change="int8 when the link or the memory is what hits wait for; see "
            "docs/performance.md for what it does to answers.",
        ),
    ] = "raw"
    disk_path: Annotated[
        str | None,
        _meta(
            "--disk-path",
            "DIR",
            "Folder on a local disk for what memory cannot hold and what is to outlive the server: "
            "chunks are written there behind the engines' backs and fetched when a prompt needs "
            'them. Short for --l2-adapter \'{"type":"fs","base_path":DIR}\', as its first.',
            change="When there is a fast disk (NVMe) to spare.",
        ),
    ] = None
    disk_bytes: Annotated[
        int,
        _meta(
            "--disk-size-gb",
            "GB",
            "The most that the folder of --disk-path may occupy, in GB of 1024³ bytes. Without it "
            "5 % of the file system are left free.",
            change="When others use the disk as well.",
        ),
    ] = 0
    l2_adapters: Annotated[
        tuple[str, ...],
        _meta(
            "--l2-adapter",
            "JSON",
            'A tier behind memory, as in \'{"type":"fs","base_path":"/data"}\'; may be given '
            "several times, and the first that has a chunk is asked for it.",
            change="For tiers and options that --disk-path does not have.",
        ),
    ] = ()
    l2_store_policy: Annotated[
        str,
        _meta(
            "--l2-store-policy",
            "{default,skip_l1}",
            "What happens to a chunk in memory once a tier has it: default keeps it there until "
            "memory is needed, skip_l1 drops it at once.",
            change="skip_l1 when memory is to be a mere buffer in front of the tiers.",
        ),
    ] = "default"
    l2_prefetch_policy: Annotated[
        str,
        _meta(
            "--l2-prefetch-policy",
            "{default,retain}",
            "What happens to a chunk that was fetched from a tier: default lets it be the first to "
            "leave after it was read, unless it is used once more; retain treats it as any other.",
            change="retain when prompts that come back at all come back often.",
        ),
    ] = "default"
    l2_prefetches_max: Annotated[
        int,
        _meta(
            "--l2-prefetch-max-in-flight",
            "COUNT",
            "Prompts whose chunks are fetched from the tiers at once; others wait for their turn.",
            change="More for a tier with long delays.",
        ),
    ] = 8
    instance_id: Annotated[
        str,
        _meta(
            "--instance-id",
            "NAME",
            "The server's name in status pages and logs.",
            change="When a stable name helps; otherwise each start makes a UUID.",
        ),
    ] = ""
    socket_dir: Annotated[
        str | None,
        _meta(
            "--socket-dir",
            "DIR",
            "Folder for the Unix socket. Without it the socket is an abstract one, which every "
            "process in the same network namespace reaches and which leaves nothing behind.",
            change="When engines run in containers: mount the folder into them.",
        ),
    ] = None
    client_uids: Annotated[
        tuple[int, ...],
        _meta(
            "--client-uid",
            "UID",
            "Another user whose processes may connect; may be given several times. The server's "
            "own user and root always may.",
            change="When engines run as another user than the server.",
        ),
    ] = ()
    stop_when_unused_s: Annotated[
        float,
        _meta(
            "--stop-when-unused",
            "SECONDS",
            "Stop in order when no engine has been connected for so many seconds, counted from the "
            "start too. 0 never does. What an engine with `kvcellar.autostart` starts has 60.",
            change="When nobody else would stop the server, as in a batch job.",
        ),
    ] = 0.0
    admin_token_file: Annotated[
        str | None,
        _meta(
            "--admin-token-file",
            "FILE",
            "File whose one line is the token that changes over HTTP need (/quota, "
            "/cache/clear, /cache/prefetches, as `Authorization: Bearer TOKEN`), from this host as "
            "well; it is read anew each time. "
            "Without it programs of this host may change things, and nobody else. Commands that "
            "go through the engines' port need the server's user instead.",
            change="When quotas are set from elsewhere, or other users share the host.",
        ),
    ] = None
    quota_file: Annotated[
        str | None,
        _meta(
            "--quota-file",
            "FILE",
            "File in which quotas are kept over a restart; made when the first one is set, "
            "replaced with each change, for its owner's eyes only (docs/tenants.md). Without it "
            "quotas live as long as the server.",
            change="When nobody sets the quotas again after a restart. A file of its own for each "
            "server.",
        ),
    ] = None
    log_misses: Annotated[
        bool,
        _meta(
            "--log-misses",
            "",
            "Log a line for each request that did not find all of its prompt, with the reason that "
            "`kvcellar why-miss` gives.",
            change="While you look for the reason why prompts do not hit.",
        ),
    ] = False
    log_level: Annotated[
        str,
        _meta(
            "--log-level",
            "{DEBUG,INFO,WARNING,ERROR}",
            "The least important log lines that are written.",
            change="DEBUG to see each connection.",
        ),
    ] = "INFO"

    def tier_adapters(self) -> tuple[str, ...]:
        """Return a JSON object for each tier, in order; they may hold secrets."""
        if self.disk_path is None:
            return self.l2_adapters
        disk: dict[str, object] = {"type": "fs", "base_path": self.disk_path}
        if self.eviction_policy == "IsolatedLRU":
            disk |= {"eviction": {"eviction_policy": "IsolatedLRU"}}
        if self.disk_bytes:
            disk |= {"max_capacity_gb": self.disk_bytes / GIB}
        return (json.dumps(disk), *self.l2_adapters)


class Setting(msgspec.Struct, frozen=True):
    """One setting as people see it.

    Attributes:
        field: name in `ServerConfig`.
        flag: how it is written.
        value: placeholder or choices of its value; empty for a switch; with … at its end for
            several values.
        description: what it does, with unit.
        change: when to change it.
        required: it has no default.
        default: text of the default.
    """

    field: str
    flag: str
    value: str
    description: str
    change: str
    required: bool
    default: str


def settings() -> tuple[Setting, ...]:
    """Return all settings of `ServerConfig`, in order."""
    hints = get_type_hints(ServerConfig, include_extras=True)
    return tuple(
        _setting(field, hints[field.name].__metadata__[0])
        for field in msgspec.structs.fields(ServerConfig)
    )


def _setting(field: msgspec.structs.FieldInfo, meta: Meta) -> Setting:
    assert meta.extra is not None, field.name
    assert meta.description is not None, field.name
    has_default = not field.required and field.default not in (None, "", (), False)
    return Setting(
        field=field.name,
        flag=meta.extra["flag"],
        value=meta.extra["value"],
        description=meta.description,
        change=meta.extra["change"],
        required=field.required,
        default=str(field.default) if has_default else "",
    )
