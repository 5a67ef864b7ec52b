"""The half of the connector that lives in each of vLLM's workers and copies.

vLLM's step may never wait for the cache: the step's thread only queues jobs and takes results,
and two threads of ours, one for loads and one for stores, copy between the engine's pages and the
arena. What a job needs to know was decided by the scheduler half. A load that cannot be done
becomes blocks that vLLM computes; a store that cannot be done becomes an abort. Made and called by
`connector` in the worker's process.
"""

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcellar.client.link import Link
from kvcellar.client.options import Identity
from kvcellar.client.session import Session
from kvcellar.clock import Clock, SystemClock
from kvcellar.engines.copy import instruction_set, open_copier
from kvcellar.engines.pages import Copier, PageRun
from kvcellar.engines.vllm.copying import Copying
from kvcellar.engines.vllm.metadata import ConnectorMetadata, LoadJob, StoreJob, WorkerReport
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.engines.vllm.parts import Split
from kvcellar.engines.vllm.regions import LayerTensor, find_runs, shard_layouts
from kvcellar.engines.vllm.support import require_supported
from kvcellar.engines.vllm.versions import software
from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.messages import Role
from kvcellar.telemetry.logs import EventLog

__all__ = ["WorkerHalf"]

log = EventLog("vllm.kvcellar.worker")

# Any: vLLM's configuration objects, see `versions`.


class WorkerHalf:
    """Copies for one rank; every method is for the step's thread and none of them waits."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Prepare; nothing runs before `register_kv_caches`.

        Args:
            vllm_config: for rank, world size and the instance's id.
            kv_cache_config: the worker's own; its group lists this rank's layers.
            options: see `ConnectorOptions`.
            clock: the machine's when None.

        Raises:
            UnsupportedModelError: see `support`; vLLM makes the workers first, so this is where a
                user reads it.
            ConfigError: see `Split`.
        """
        self._split = Split.of(vllm_config, options)
        require_supported(vllm_config, kv_cache_config)
        self._part, self._seat = divmod(
            int(vllm_config.parallel_config.rank), self._split.rank_count
        )
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._clock = clock or SystemClock()
        self._loads: list[LoadJob] = []
        self._stores: list[StoreJob] = []
        self._step = 0
        self._copying: Copying | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, LayerTensor]) -> None:
        """Learn where the engine's pages are, and begin to look for the server.

        Returns at once, whether there is a server or not.

        Args:
            kv_caches: layer name to tensor; the memory stays the engine's.

        Raises:
            UnsupportedModelError: a layer cannot be kept; the message names it.
        """
        self.close()
        groups = find_runs(self._kv_cache_config, kv_caches)
        layouts = shard_layouts(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            runs=groups,
            instruction_set=instruction_set(groups[0]),
        )
        # As the server of this part of the ranks counts them.
        layouts = tuple(msgspec.structs.replace(each, rank=self._seat) for each in layouts)
        link = self._make_link(layouts)
        self._copying = Copying(
            link,
            _open_copiers(groups, layouts),
            rank=layouts[0].rank,
            shard=layouts[0].shard(),
            delay_s=self._options.copy_delay_s,
            clock=self._clock,
        )
        link.start()
        # Registered after the link's own, so that it runs before it: copies end, then we leave.
        atexit.register(self.close)
        for group, (runs, layout) in enumerate(zip(groups, layouts, strict=True)):
            log.info(
                "pages registered",
                rank=int(self._vllm_config.parallel_config.rank),
                server=str(self._split.options.servers[self._part]),
                group=group,
                runs=len(runs),
                blocks=runs[0].block_count,
                block_bytes=layout.block_bytes(),
                layout=layout.fingerprint().hex()[:16],
            )

    def begin(self, metadata: ConnectorMetadata) -> None:
        """Take a step's jobs.

        Jobs of the step before that nobody started are started now: not every release runs every
        hook in every step, and the step that they waited for is over.
        """
        self.start_loads()
        self.start_stores()
        self._loads = [job for job in metadata.loads if job.part == self._part]
        self._stores = [job for job in metadata.stores if job.part == self._part]
        self._step = metadata.step

    def start_loads(self) -> None:
        """Start the step's loads, once; before or after its forward pass."""
        loads, self._loads = self._loads, []
        for job in loads:
            self._registered().load(job)

    def start_stores(self) -> None:
        """Start the step's stores, once; its forward pass must have been launched."""
        stores, self._stores = self._stores, []
        for job in stores:
            self._registered().store(job)

    def collect(self) -> set[str]:
        """Return the requests whose loads ended, well or not, since the last call."""
        return self._copying.outcomes.take_received() if self._copying else set()

    def finish_step(self) -> set[str]:
        """Start what is left of the step's jobs, and do as `collect`."""
        self.start_loads()
        self.start_stores()
        return self.collect()

    def failed_loads(self) -> set[str]:
        """Return those of the requests given by `collect` of whose loads nothing is of use."""
        return self._copying.outcomes.take_failed() if self._copying else set()

    def load_errors(self) -> set[int]:
        """Return the blocks that the loads given by `collect` did not fill, once."""
        return self._copying.outcomes.take_spoiled() if self._copying else set()

    def report(self) -> WorkerReport | None:
        """Return the results of jobs that ended since the last call, and that the step has ended.

        None when there is neither.
        """
        jobs = self._copying.outcomes.take_results() if self._copying else {}
        step, self._step = self._step, 0
        return WorkerReport(jobs, step) if jobs or step else None

    def leave_pages(self) -> None:
        """See `Copying.leave_pages`; called before an engine that falls asleep frees its pages."""
        if self._copying is not None:
            self._copying.leave_pages()

    def enter_pages(self) -> None:
        """See `Copying.enter_pages`; called when the pages are mapped again."""
        if self._copying is not None:
            self._copying.enter_pages()

    def close(self) -> None:
        """End all copies and the connection; idempotent; takes less than a second."""
        atexit.unregister(self.close)
        if self._copying is not None:
            self._copying.close()

    def _registered(self) -> Copying:
        assert self._copying is not None, "vLLM sent jobs before it registered its caches"
        return self._copying

    def _make_link(self, layouts: tuple[ShardLayout, ...]) -> Link:
        config = self._vllm_config
        return Link(
            self._split.client_options(self._part),
            Identity(
                role=Role.WORKER,
                instance_id=self._split.instance_id(config, self._part),
                software=software(),
                model=str(config.model_config.model),
                rank=layouts[0].rank,
                world_size=self._split.rank_count,
                layouts=layouts,
            ),
            clock=self._clock,
            on_session=self._meet,
        )

    def _meet(self, session: Session) -> None:
        if self._copying is not None:
            self._copying.meet(session)


def _open_copiers(
    groups: Sequence[Sequence[PageRun]], layouts: Sequence[ShardLayout]
) -> list[Copier]:
    """Return a copier for each KV group; they share what they have of the device."""
    copiers: list[Copier] = []
    for runs, layout in zip(groups, layouts, strict=True):
        beside = copiers[0] if copiers else None
        copiers.append(
            open_copier(
                runs, vectors=layout.vectors, block_tokens=layout.block_tokens, beside=beside
            )
        )
    return copiers
