"""Several servers for one engine: its ranks in equal parts, a server for each.

Rank r of W uses server r // (W / n), and each server sees an ordinary instance of W / n ranks,
numbered from 0. So a server knows nothing of the others; only the scheduler half speaks to all of
them, and one server is the case of one part. Used by both halves.
"""

from dataclasses import dataclass
from typing import Any

from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions
from kvcellar.client.session import Session
from kvcellar.engines.vllm.holdings import Holdings
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.engines.vllm.versions import optional
from kvcellar.errors import ConfigError

__all__ = ["Line", "Part", "Split"]

# Any: vLLM's configuration objects, see `versions`.


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One of the servers, as the scheduler half knows it.

    Attributes:
        index: from 0, in the order of the options.
        link: to it.
        holdings: what is held there.
    """

    index: int
    link: Link
    holdings: Holdings


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """A session with the server of a part; of no use once that is closed."""

    part: Part
    session: Session


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of an engine are divided among servers.

    Attributes:
        options: name the servers.
        rank_count: ranks of each part.
    """

    options: ConnectorOptions
    rank_count: int

    @classmethod
    def of(cls, vllm_config: Any, options: ConnectorOptions) -> "Split":
        """Return the split, checked.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        parallel, count = vllm_config.parallel_config, len(options.servers)
        ranks = int(parallel.world_size)
        if count == 1:
            return cls(options, ranks)
        named = f"kvcellar.server_urls names {count} servers"
        for what, flag, has_several in (
            (
                "data parallelism",
                "--data-parallel-size",
                # Engines of a dense model are told that they are alone, but not all are number 0.
                optional(parallel, "data_parallel_size", 1) > 1
                or optional(parallel, "data_parallel_index", 0) > 0,
            ),
            (
                "pipeline parallelism",
                "--pipeline-parallel-size",
                optional(parallel, "pipeline_parallel_size", 1) > 1,
            ),
        ):
            if has_several:
                raise ConfigError(
                    f"{named}, which {what} excludes: name one server, or start vLLM with {flag} 1"
                )
        if ranks % count:
            raise ConfigError(
                f"{named} for {ranks} ranks, which cannot be divided equally: name a number of "
                f"servers that divides {ranks}, or change --tensor-parallel-size"
            )
        return cls(options, ranks // count)

    @property
    def part_count(self) -> int:
        """Return how many parts there are."""
        return len(self.options.servers)

    def client_options(self, part: int) -> ClientOptions:
        """Return how the server of a part is reached."""
        server = self.options.servers[part]
        return ClientOptions(
            host=server.host,
            port=server.port,
            heartbeat_s=self.options.heartbeat_s,
            timeout_s=self.options.timeout_s,
        )

    def instance_id(self, vllm_config: Any, part: int) -> str:
        """Return the name under which a server knows its part of the engine."""
        name = str(vllm_config.kv_transfer_config.engine_id)
        return name if self.part_count == 1 else f"{name}:{part}/{self.part_count}"
