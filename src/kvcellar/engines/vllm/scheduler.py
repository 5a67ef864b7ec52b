"""The scheduler half: decides what is loaded and stored, and never stands in the engine's way.

It lives in vLLM's scheduler, is called in every step, and waits a millisecond a step at most.
Block tables are read only from what a step schedules, because nothing else is the same in all of
vLLM's releases and under MultiConnector. A job's blocks and leases are held until every rank has
reported it. What goes wrong inside ends caching, not the engine: see `fuse`. Made and called by
`connector`.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvcellar.client.link import Link
from kvcellar.client.options import Identity
from kvcellar.clock import Clock, SystemClock
from kvcellar.engines.vllm.adapters import Adapters
from kvcellar.engines.vllm.autostart import ensure_server
from kvcellar.engines.vllm.binding import Binder, Bound, BoundPart
from kvcellar.engines.vllm.exchange import Exchange
from kvcellar.engines.vllm.fuse import Fuse
from kvcellar.engines.vllm.gate import Gate
from kvcellar.engines.vllm.gatekeeping import Gatekeeper
from kvcellar.engines.vllm.groups import KVGroup, block_multiple
from kvcellar.engines.vllm.headroom import Headroom
from kvcellar.engines.vllm.holdings import Holdings
from kvcellar.engines.vllm.identity import engine_fields
from kvcellar.engines.vllm.loads import Loads
from kvcellar.engines.vllm.lookups import Lookups
from kvcellar.engines.vllm.metadata import ConnectorMetadata, JobResult, WorkerReport
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.engines.vllm.parts import Part, Split
from kvcellar.engines.vllm.pins import Pins
from kvcellar.engines.vllm.receipts import Receipt
from kvcellar.engines.vllm.requests import RequestState, read_wishes
from kvcellar.engines.vllm.stores import Stores
from kvcellar.engines.vllm.support import require_supported
from kvcellar.engines.vllm.versions import (
    is_inside_multi_connector,
    optional,
    scheduled_tables,
    software,
)
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.keys.digest import FieldValue, engine_digest, field_digests
from kvcellar.protocol.messages import Clear, GateReport, Role
from kvcellar.telemetry.logs import EventLog, OncePer

__all__ = ["SchedulerHalf"]

# Any: vLLM's objects, see `versions`.

log = EventLog("vllm.kvcellar.scheduler")

EPOCH_BYTES = 16
CLEAR_TIMEOUT_S = 0.5
NO_END = 1 << 62
WISH_LOG_INTERVAL_S = 60.0


class SchedulerHalf:
    """One engine's decisions; used by the thread of vLLM's scheduler alone.

    Attributes:
        fuse: blown once something of ours failed.
        parts: the servers, and what is held there.
        pins: blocks that are kept from reuse.
        lookups: requests' questions and answers.
        loads: what the workers are to read.
        stores: what the workers are to write.
        gatekeeper: decides whether a hit is loaded.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        *,
        wish_prefixes: tuple[str, ...] = ("kvcellar.",),
        hand_out: Callable[[Receipt], None] | None = None,
    ) -> None:
        """Check what the engine is, name it, and begin to look for the servers.

        Args:
            vllm_config: vLLM's configuration, complete; its load failure policy is set here.
            kv_cache_config: the scheduler's own (its groups are flattened).
            options: see `ConnectorOptions`.
            wish_prefixes: prefixes under which requests may say what they want.
            hand_out: is given the receipt of every request that has ended.

        Raises:
            UnsupportedModelError: see `support`.
            ConfigError: a weight file cannot be read, `autostart` cannot be done, or the ranks
                cannot be divided among the servers.
        """
        split = Split.of(vllm_config, options)
        self._groups = require_supported(vllm_config, kv_cache_config)
        self._block_tokens = block_multiple(self._groups)
        fields = _engine_fields(vllm_config, self._groups)
        transfer = vllm_config.kv_transfer_config
        _settle_failure_policy(transfer, options.load_failure_policy)
        self._may_load = bool(transfer.is_kv_consumer)
        self._may_save = bool(transfer.is_kv_producer)
        self._options = options
        self._ranks = int(vllm_config.parallel_config.world_size)
        self._wish_prefixes = wish_prefixes
        self._hand_out = hand_out
        self._clock = SystemClock()
        step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.gatekeeper = Gatekeeper(
            Gate(step_tokens=step_tokens, clock=self._clock),
            is_on=options.gate,
            clock=self._clock,
        )
        self._wish_log = OncePer(self._clock, WISH_LOG_INTERVAL_S)
        self._states: dict[str, RequestState] = {}
        self._reports: dict[int, JobResult] = {}
        self._job_ids = itertools.count(1)
        self._adapters = Adapters()
        self.fuse = Fuse()
        self.pins = Pins()
        self._headroom = Headroom(
            self._groups, step_tokens=step_tokens, pins=self.pins, clock=self._clock
        )
        self._server = ensure_server(options, clock=self._clock)
        self.parts = [
            _make_part(vllm_config, split, index, self._clock) for index in range(split.part_count)
        ]
        self._wire(fields, split)
        for part in self.parts:
            part.link.start()

    def _wire(self, engine: dict[str, FieldValue], split: Split) -> None:
        clock = self._clock
        self._exchange = Exchange(clock=clock)
        self._binder = Binder(
            self.parts,
            self._exchange,
            engine=engine,
            groups=self._groups,
            ranks=split.rank_count,
            clock=clock,
        )
        self.lookups = Lookups(
            self._binder,
            self._exchange,
            adapters=self._adapters,
            timeout_s=self._options.lookup_timeout_s,
            fetch_timeout_s=self._options.fetch_timeout_s,
            clock=clock,
        )
        self.loads = Loads(self._exchange)
        self.stores = Stores(
            self._binder,
            self._exchange,
            pins=self.pins,
            new_job_id=lambda: next(self._job_ids),
            clock=clock,
        )
        for part in self.parts:
            part.link.show_counts(lambda: asdict(self.stores.counts))

    def bind_block_pool(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self.pins.bind(pool)

    def on_new_request(self, request: Any) -> None:
        """Note a request's arrival, and look it up already if the user wants that."""
        with self.fuse:
            state = self._state(request)
            self.gatekeeper.arrive(state.request_id)
            if self._options.eager_prefetch and self._is_loadable(state):
                self.lookups.start(state)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond vLLM's own can be loaded, and that a load is asynchronous.

        Args:
            request: vLLM's request; may be asked about any number of times.
            computed_tokens: tokens that vLLM has itself.

        Returns:
            (None, False) while the answer may still come, for a bounded time.
        """
        with self.fuse:
            state = self._state(request)
            if self._is_loadable(state) and computed_tokens % self._block_tokens == 0:
                tokens = self.lookups.matched_tokens(state, computed_tokens)
                if tokens:
                    tokens = self._choose(state, computed_tokens, tokens)
                if tokens:
                    tokens = self._headroom.admit(
                        state.request_id,
                        computed_tokens=computed_tokens,
                        found_tokens=tokens,
                        prompt_tokens=int(request.num_tokens),
                    )
                state.load_stop = computed_tokens + (tokens or 0)
                return tokens, bool(tokens)
        return 0, False

    def on_allocated(self, request: Any, tables: Sequence[list[int]], external_tokens: int) -> None:
        """Plan the load that vLLM made room for; without one, give back what was found.

        Args:
            request: vLLM's request.
            tables: its whole block table in each KV group.
            external_tokens: what `matched_tokens` said, or 0: nothing is to be loaded (by us).
        """
        state = self._state(request)
        with self.fuse:
            verdict = self.gatekeeper.admit(state.request_id, loads=external_tokens > 0)
            if external_tokens == 0:
                if verdict is not None:
                    self.lookups.note_refusal(state)
                self.lookups.drop(state)
        if external_tokens == 0:
            return
        # Outside of the fuse: a load that vLLM waits for and nobody runs would never end.
        answer, job_id = self.lookups.take(state), next(self._job_ids)
        chunk_tokens = answer.bound.chunk_tokens
        self.loads.plan(
            job_id,
            state,
            answer,
            tables=tables,
            chunk_stop=state.load_stop // chunk_tokens,
            token_count=external_tokens,
        )
        with self.fuse:
            rest_tokens = int(request.num_tokens) - state.load_stop
            self._headroom.begin(state.request_id, rest_tokens=rest_tokens)
            chunks = -(-external_tokens // chunk_tokens)
            self.gatekeeper.begin_load(job_id, chunks * chunk_tokens)

    def build_metadata(self, scheduler_output: Any) -> ConnectorMetadata:
        """Return the step's jobs; called at the end of every step, also of an empty one."""
        metadata = ConnectorMetadata(loads=self.loads.take_planned())
        with self.fuse:
            bound = self._binder.current()
            is_storing = self._may_save and self.fuse.blown is None
            self._follow(scheduler_output, bound if is_storing else None)
            metadata.stores = self.stores.collect()
            metadata.chunk_tokens = bound.chunk_tokens if bound is not None else 0
            for job in metadata.stores:
                self.gatekeeper.begin_store(job.job_id, job.chunk_count * metadata.chunk_tokens)
            metadata.step = self.gatekeeper.begin_step(scheduler_output.total_num_scheduled_tokens)
            self._report(bound)
        self._exchange.start_step(is_idle=not scheduler_output.total_num_scheduled_tokens)
        return metadata

    def on_worker_output(self, connector_output: Any) -> None:
        """Account for what the workers report; a job is over when every rank has reported it."""
        with self.fuse:
            report = connector_output.kv_connector_worker_meta
            if not isinstance(report, WorkerReport):
                return
            known = WorkerReport(self._reports).aggregate(report).jobs
            over = {
                job_id: result
                for job_id, result in known.items()
                if result.ranks_done + result.ranks_failed >= self._ranks
            }
            self._reports = {id_: known[id_] for id_ in known.keys() - over.keys()}
            for job_id, result in over.items():
                if not self.loads.end(job_id, result):
                    self.stores.end(job_id, result)
            # Last: whatever happens to it, the jobs are accounted for.
            self.gatekeeper.learn(report.step, over)

    def on_finished(self, request: Any) -> None:
        """Forget a request that ended in whatever way; its copies run on."""
        with self.fuse:
            self.gatekeeper.leave(request.request_id)
            self._headroom.end(request.request_id)
            state = self._states.pop(request.request_id, None)
            if state is not None:
                self.lookups.drop(state)
                state.receipt.finish()

    def is_awaited(self) -> bool:
        """Return whether an engine without requests should go on stepping, for a bounded time."""
        return self.stores.is_awaited()

    def reset_cache(self) -> bool:
        """Make every chunk stored so far unreachable for this engine, and clear it at the servers.

        Returns:
            True: from now on all keys are others, whatever the server does. What runs at this
            moment stores nothing any more, because it was computed before.

        Blocks for at most half a second.
        """
        with self.fuse:
            self.lookups.drop_all()
            self.stores.drop_offers()
            for state in self._states.values():
                state.may_save = False
            left = self._binder.renew(secrets.token_bytes(EPOCH_BYTES))
            log.info("cache reset; chunks stored before are not used any more")
            self._clear(left)
            return True
        return False

    def close(self) -> None:
        """Say goodbye to the servers; idempotent; takes less than a second for each."""
        for part in self.parts:
            part.link.close()

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            wishes = read_wishes(request.kv_transfer_params, self._wish_prefixes)
            if wishes.problem and self._wish_log.admit("wish") is not None:
                log.warning("kv_transfer_params not understood", problem=wishes.problem)
            receipt = Receipt(request.request_id, self._hand_out)
            state = RequestState(request, wishes, receipt, may_save=wishes.may_save)
            self._states[request.request_id] = state
        return state

    def _is_loadable(self, state: RequestState) -> bool:
        request = state.request
        params = request.kv_transfer_params or {}
        return (
            self._may_load
            and state.may_load
            and self.fuse.blown is None
            and not optional(request, "skip_reading_prefix_cache", False)
            and not params.get("do_remote_prefill")
        )

    def _choose(self, state: RequestState, computed_tokens: int, found_tokens: int) -> int:
        bound = self._binder.current()
        if bound is None:
            return found_tokens
        return self.gatekeeper.choose(
            state,
            computed_tokens=computed_tokens,
            found_tokens=found_tokens,
            chunk_tokens=bound.chunk_tokens,
            is_divisible=bound.is_divisible,
        )

    def _follow(self, scheduler_output: Any, bound: Bound | None) -> None:
        """Keep block tables as the step left them, and offer the chunks that it completes."""
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._states:
                self._states[request_id].tables = []
                self.gatekeeper.leave(request_id)
                self.gatekeeper.arrive(request_id)
        scheduled = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        is_measured = self.gatekeeper.measures(tokens=total, requests=len(scheduled))
        for request_id, block_ids, is_whole, computed in scheduled_tables(scheduler_output):
            state = self._states.get(request_id)
            if state is None:
                continue
            state.follow(block_ids, is_whole=is_whole, computed=computed)
            if is_whole:
                self._headroom.end(request_id)
                state.tokens_end = self._tokens_end(state)
            if is_measured:
                self.gatekeeper.schedule(state, computed=computed, count=scheduled[request_id])
            if bound is not None and state.may_save:
                count = min(computed + scheduled[request_id], state.tokens_end)
                # Of hundreds of requests that decode, this is all that a step looks at.
                if state.has_new_chunks(bound, token_count=count):
                    self._offer(state, bound, computed_tokens=count)

    def _report(self, bound: Bound | None) -> None:
        """Tell the servers what the gate has decided, if there is something new."""
        if bound is not None and self.gatekeeper.has_news(bound):
            figures = self.gatekeeper.figures()
            for line in bound.lines:
                self._exchange.tell(line, lambda id_: GateReport(id_, figures))

    def _offer(self, state: RequestState, bound: Bound, *, computed_tokens: int) -> None:
        # Steps that are scheduled ahead count tokens that nobody has sampled yet.
        count = min(computed_tokens, state.request.num_tokens)
        chain = state.keys(bound, self._adapters, token_count=count)
        if chain is not None:
            # A chunk with a token that is not known yet has no key.
            chunk_count = min(count // bound.chunk_tokens, chain.count)
            if chunk_count > state.next_chunk:
                self.stores.offer(state, bound, chunk_count=chunk_count)

    def _tokens_end(self, state: RequestState) -> int:
        """Return how many leading tokens of a request are to be kept at most."""
        end = NO_END if self._options.save_decode_cache else int(state.request.num_prompt_tokens)
        wished = state.wishes.tokens_max
        return end if wished is None else min(end, wished)

    def _clear(self, left: Sequence[BoundPart]) -> None:
        spaces = {part.line.part.index: bytes(part.namespace) for part in left}
        try:
            self._exchange.insist(
                [part.line for part in left],
                lambda part, id_: Clear(id_, spaces[part]),
                timeout_s=CLEAR_TIMEOUT_S,
            )
        except KVCellarError as error:
            log.warning("a server may hold chunks of before the reset", reason=str(error))


def _engine_fields(vllm_config: Any, groups: Sequence[KVGroup]) -> dict[str, FieldValue]:
    try:
        fields = engine_fields(vllm_config, groups=groups)
    except OSError as error:
        raise ConfigError(f"a file of the model cannot be read: {error}") from error
    log.info("engine named", engine=engine_digest(fields).hex()[:16], **field_digests(fields))
    return fields


def _settle_failure_policy(transfer: Any, policy: str) -> None:
    """Have requests recomputed whose load failed; vLLM would end them, which no cache is worth."""
    if not is_inside_multi_connector():
        transfer.kv_load_failure_policy = policy
    elif policy == "recompute":
        log.warning(
            "as a child of MultiConnector the load failure policy cannot be set from here: a "
            "request whose load fails ends with an error unless the outer configuration says so",
            set='"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"',
        )


def _make_part(vllm_config: Any, split: Split, index: int, clock: Clock) -> Part:
    holdings = Holdings(clock)
    identity = Identity(
        role=Role.SCHEDULER,
        instance_id=split.instance_id(vllm_config, index),
        software=software(),
        model=str(vllm_config.model_config.model),
        world_size=split.rank_count,
    )
    link = Link(split.client_options(index), identity, clock=clock, held=holdings.listed)
    return Part(index, link, holdings)
