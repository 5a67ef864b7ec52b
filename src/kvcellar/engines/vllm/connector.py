"""The class that vLLM loads: `KVCellarConnector`, one object in the scheduler, one in each worker.

It says to vLLM what kind of connector this is and passes each hook on to the half that lives in
its process; it decides nothing. `compat.vllm` derives the class under LMCache's name from it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvcellar.engines.vllm.metadata import ConnectorMetadata, WorkerReport
from kvcellar.engines.vllm.options import ConnectorOptions, read_options
from kvcellar.engines.vllm.receipts import Receipt
from kvcellar.engines.vllm.scheduler import SchedulerHalf
from kvcellar.engines.vllm.versions import cache_hit_source, transfer_results
from kvcellar.engines.vllm.worker import WorkerHalf
from kvcellar.telemetry.logs import speak_through

__all__ = ["KVCellarConnector"]

# Any: vLLM's objects, see `versions`.


class KVCellarConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped base
    """vLLM's view of kvcellar."""

    wish_prefixes: ClassVar[tuple[str, ...]] = ("kvcellar.",)
    """Prefixes under which requests may say what they want in `kv_transfer_params`."""

    if cache_hit_source() is not None:
        _cache_hit_source = cache_hit_source()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make the half for a role.

        Args:
            vllm_config: vLLM's configuration.
            role: scheduler or worker.
            kv_cache_config: as seen from that side.

        Raises:
            ConfigError: an option is wrong.
            UnsupportedModelError: the model or a setting cannot be kept safely.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        speak_through("vllm")
        options = self.read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                vllm_config,
                kv_cache_config,
                options,
                wish_prefixes=self.wish_prefixes,
                hand_out=self.receipt_log(),
            )
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, options)

    @classmethod
    def read_options(cls, extra_config: Mapping[str, object]) -> ConnectorOptions:
        """Return the options; a `ConfigError` names the key that is wrong."""
        return read_options(extra_config)

    def receipt_log(self) -> Callable[[Receipt], None] | None:
        """Return what is given each ended request's receipt; None: nobody."""
        return None

    @property
    def _deciding(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a hook of the scheduler was called in a worker"
        return self._scheduler

    @property
    def _copying(self) -> WorkerHalf:
        assert self._worker is not None, "a hook of a worker was called in the scheduler"
        return self._worker

    # What kind of connector this is.

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Return that pages are taken as the engine lays them out (asked up to 0.25.1)."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Return that a save which does not happen is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return that no hook runs inside a layer; vLLM asks early, so options are checked here."""
        cls.read_options(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return that any layout will do."""
        return None

    def get_finished_count(self) -> int | None:
        """Return that every rank reports every load."""
        return None

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Ignore what workers of a connector beside us tell its scheduler."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Ignore what workers of a connector beside us tell its scheduler."""

    def shutdown(self) -> None:
        """End copies and connections; idempotent; takes less than a second."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # Hooks of the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool whose blocks stores pin."""
        self._deciding.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerHalf.on_new_request`."""
        self._deciding.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `SchedulerHalf.matched_tokens`."""
        return self._deciding.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerHalf.on_allocated`."""
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._deciding.on_allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `SchedulerHalf.build_metadata`."""
        return self._deciding.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerHalf.on_worker_output`."""
        self._deciding.on_worker_output(connector_output)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may go, for what is being stored is pinned."""
        self._deciding.on_finished(request)
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as `request_finished` does."""
        self._deciding.on_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """See `SchedulerHalf.is_awaited`."""
        return self._deciding.is_awaited()

    def reset_cache(self) -> bool | None:
        """See `SchedulerHalf.reset_cache`."""
        return self._deciding.reset_cache()

    def take_events(self) -> Iterable[Any]:
        """Return no KV events."""
        return ()

    # Hooks of a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See `WorkerHalf.register_kv_caches`."""
        self._copying.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """See `WorkerHalf.leave_pages`; asked by releases that tell connectors of sleep."""
        self._copying.leave_pages()

    def restore_kv_caches(self) -> None:
        """See `WorkerHalf.enter_pages`."""
        self._copying.enter_pages()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's jobs."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ConnectorMetadata), type(connector_metadata)
        self._copying.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads; some releases call this before the forward pass, some after."""
        self._copying.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after its load has ended."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied whole, after the step."""

    def wait_for_save(self) -> None:
        """Start the step's stores, behind the forward pass that was launched."""
        self._copying.start_stores()

    def get_finished(
        self,
        finished_req_ids: set[str],
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return no sent request, and those whose loads have ended.

        Steps without a forward pass do not reach `wait_for_save` in every release, so whatever is
        left of the step's jobs is started here.
        """
        return None, self._copying.finish_step() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same with the requests whose loads failed; asked where vLLM has such a word.

        Failed are those of which no part is of use; what is lost of others is told by its blocks.
        """
        received = self._copying.finish_step()
        return transfer_results(received=received, failed=self._copying.failed_loads())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads which ended did not fill."""
        return self._copying.load_errors()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the results of jobs that ended."""
        return self._copying.report()
