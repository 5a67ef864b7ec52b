"""vLLM's real scheduler with a toy model behind it: an engine that runs anywhere, in milliseconds.

The scheduler, its block pool and the connector's scheduler half are the real ones, of whatever
vLLM can be imported; the server is a real one as well. Only the model and the copies are toys.
Everything that is read is compared with what it must be: each block of KV before each use, each
answer at its end.
"""

import collections
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
from tests.engines.vllm.toy_model import LAYER, answer, kv_of, next_token, register_model
from tests.engines.vllm.toy_worker import Delays, ToyWorker

from kvcellar.engines.vllm.connector import KVCellarConnector
from kvcellar.engines.vllm.metadata import ConnectorMetadata

WAIT_S = 20.0
BLOCK_TOKENS = 16
_numbers = itertools.count()


@dataclass
class _Row:
    """A request as the workers know it."""

    tokens: list
    blocks: list


@dataclass
class Asked:
    """A request as the client knows it."""

    prompt: list
    token_count: int
    said: list = field(default_factory=list)
    is_over: bool = False
    is_aborted: bool = False


class ToyEngine:
    """One engine: scheduler and ranks, stepped by the test."""

    def __init__(
        self,
        model,
        port,
        *,
        blocks=64,
        ranks=1,
        is_shared=False,
        is_async=False,
        is_second_runner=False,
        step_tokens=64,
        running_max=4,
        delays=None,
        connector=None,
        options=None,
        **settings,
    ):
        self.config = make_config(
            model, port, blocks=blocks, ranks=ranks, step_tokens=step_tokens,
            running_max=running_max, connector=connector, options=options or {}, **settings,
        )  # fmt: skip
        self.scheduler = make_scheduler(self.config, blocks=blocks, is_async=is_async)
        self.scheduler.use_v2_model_runner = is_second_runner
        # What vLLM itself does where several steps are in flight.
        self.scheduler.defer_block_free = is_async
        self.depth = 2 if is_async else 1
        self.flying = collections.deque()
        self.rows = {}
        self.asked = {}
        children = getattr(self.scheduler.connector, "_connectors", None)
        (own,) = [
            child
            for child in children or [self.scheduler.connector]
            if isinstance(child, KVCellarConnector)
        ]
        self.half = own._scheduler
        self.place = children.index(own) if children else None
        self.steps = 0
        self.preemptions = 0
        ports = port if isinstance(port, list) else [port]
        self.workers = [
            self._worker(rank, ports, ranks // len(ports), blocks, delays or Delays(), is_shared)
            for rank in range(ranks)
        ]
        self._received = collections.Counter()
        self._hasher = make_hasher(self.config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.close()

    def _worker(self, rank, ports, width, blocks, delays, is_shared):
        """Return a rank's worker; with several ports the ranks are divided among their servers."""
        name, part = self.config.kv_transfer_config.engine_id, rank // width
        return ToyWorker(
            ports[part],
            name if len(ports) == 1 else f"{name}:{part}/{len(ports)}",
            rank % width,
            width,
            blocks,
            BLOCK_TOKENS,
            delays,
            is_shared,
            part=part,
            kv_rank=0 if is_shared else rank,
        )

    # The client's side.

    def add(self, prompt, token_count=2, *, params=None, **more):
        """Send a request and return its id."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request_id = f"r{next(_numbers)}"
        sampling = SamplingParams(
            max_tokens=token_count,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        sampling.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.asked[request_id] = Asked(list(prompt), token_count)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id):
        from vllm.v1.request import RequestStatus

        if not self.asked[request_id].is_over:
            self.asked[request_id].is_aborted = self.asked[request_id].is_over = True
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def ask(self, prompt, token_count=2, **more):
        """Send a request, run until it is answered, and return (answer, tokens loaded for it)."""
        before = self.loaded_tokens
        request_id = self.add(prompt, token_count, **more)
        self.run_until(lambda: self.asked[request_id].is_over)
        return self.asked[request_id].said, self.loaded_tokens - before

    def keep(self, prompt):
        """Have a prompt's chunks stored and lost by the engine itself."""
        self.wait_bound()
        self.ask(prompt)
        self.settle()
        self.reset()

    def load_beside_a_store(self, kept, new):
        """Run until one request loads what is kept and another one's chunks are being stored."""
        self.add(kept)
        self.add(new, 20)
        self.run_until(lambda: len(self.half.loads) == 1 and len(self.half.stores) > 0)

    def held(self):
        """Return how many leases and how many unfinished reservations there are at all servers."""
        counts = [part.holdings.count() for part in self.half.parts]
        return tuple(map(sum, zip(*counts, strict=True)))

    @property
    def loaded_tokens(self):
        """Tokens whose KV was loaded so far, by every rank."""
        return min(worker.loaded_tokens for worker in self.workers)

    # The engine's loop.

    def step(self):
        """Schedule a step, and end the oldest when as many are in flight as may be."""
        if self.scheduler.has_requests():
            self.steps += 1
            self.flying.append(self.scheduler.schedule())
            self.preemptions += len(self.flying[-1].preempted_req_ids or ())
            if len(self.flying) >= self.depth:
                self._end_step(self.flying.popleft())
        elif self.flying:
            self._end_step(self.flying.popleft())

    def run_until(self, condition, *, timeout_s=WAIT_S, pace_s=0.0):
        """Step until something is true; with a pace, like a model that takes its time."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, self.describe()
            self.step()
            time.sleep(pace_s)
            if not self.scheduler.running:
                time.sleep(0.0005)  # As vLLM does in steps without tokens.

    def settle(self):
        """Run until nothing is left to do, and check that nothing is left behind."""
        self.run_until(lambda: all(asked.is_over for asked in self.asked.values()))
        self.run_until(lambda: not self.scheduler.has_requests() and not self.flying)
        half = self.half
        assert half.fuse.blown is None, half.fuse.blown
        assert (half.pins.count, len(half.stores), len(half.loads)) == (0, 0, 0)
        assert (len(half.lookups), half._states, half._reports) == (0, {}, {})
        assert self.held() == (0, 0)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        for asked in self.asked.values():
            if not asked.is_aborted:
                assert asked.said == answer(asked.prompt, asked.token_count)

    def reset(self, *, connector=False):
        """Reset vLLM's prefix cache until it says that it did."""

        def done():
            return self.scheduler.reset_prefix_cache(reset_connector=connector)

        if not done():
            self.run_until(done)

    def wait_bound(self):
        """Wait until the connector has its namespace, as it has long before real requests."""
        self.run_until(lambda: self.half._binder.current() is not None)

    def describe(self):
        return (
            f"stuck: {[(r.request_id, r.status.name) for r in self.scheduler.requests.values()]}, "
            f"pins {self.half.pins.count}, stores {len(self.half.stores)}, "
            f"loads {len(self.half.loads)}, "
            f"sessions {[part.link.session for part in self.half.parts]}"
        )

    def _end_step(self, output):
        result = self._compute(output)
        by_client = self.scheduler.update_from_output(output, result)
        for outputs in by_client.values():
            for one in outputs.outputs:
                asked = self.asked[one.request_id]
                asked.said += one.new_token_ids
                if one.finish_reason is not None:
                    assert one.finish_reason.name == "LENGTH", one
                    asked.is_over = True

    def _compute(self, output):
        """Run one step as the workers would."""
        from vllm.v1.outputs import ModelRunnerOutput

        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        self._follow(output)
        metadata = output.kv_connector_metadata
        for part in getattr(metadata, "metadata", (metadata,)):
            if isinstance(part, ConnectorMetadata):
                for worker in self.workers:
                    worker.begin(part)
            else:
                self._load_for_others(part.loads)
        ids = list(output.num_scheduled_tokens)
        computed = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            self._forward(self.rows[id_], computed[id_], output.num_scheduled_tokens[id_])
            for id_ in ids
        ]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id_: index for index, id_ in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self._collect(),
        )

    def _follow(self, output):
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.rows[new.req_id] = _Row(list(tokens), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for id_, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            row = self.rows[id_]
            if id_ in cached.resumed_req_ids:
                row.blocks = list(blocks[0])
                row.tokens = list(cached.all_token_ids.get(id_, row.tokens))
            elif blocks is not None:
                row.blocks += blocks[0]

    def _forward(self, row, computed, count):
        """Check the KV of all earlier positions, compute the next, and sample at the end."""
        stop = computed + count
        assert stop <= len(row.tokens), (computed, count, len(row.tokens))
        blocks = np.array(row.blocks[: -(-stop // BLOCK_TOKENS)])
        for worker in self.workers:
            truth = kv_of(row.tokens[:stop], rank=worker.kv_rank)
            pages = worker.pages[blocks].reshape(-1)
            np.testing.assert_array_equal(pages[:computed], truth[:computed], "KV read is wrong")
            pages[computed:stop] = truth[computed:]
            worker.pages[blocks] = pages.reshape(-1, BLOCK_TOKENS)
        if stop < len(row.tokens):
            return []
        token = next_token(kv_of(row.tokens[:stop])[-1])
        row.tokens.append(token)
        return [token]

    def _load_for_others(self, loads):
        """Fill the blocks that a connector beside ours claimed."""
        for request_id, (blocks, tokens) in loads.items():
            for worker in self.workers:
                kv = kv_of(tokens, rank=worker.kv_rank)
                worker.pages[blocks] = kv.reshape(-1, BLOCK_TOKENS)
                worker.received.add(request_id)

    def _collect(self):
        """Add up what the ranks report, as vLLM's executor does."""
        from vllm.v1.outputs import KVConnectorOutput

        spoiled, report, received = set(), None, set()
        for worker in self.workers:
            worker.tick()
            ended, bad, mine = worker.take()
            spoiled |= bad
            if mine is not None:
                report = mine if report is None else report.aggregate(mine)
            for request_id in ended:
                self._received[request_id] += 1
                if self._received[request_id] == len(self.workers):
                    del self._received[request_id]
                    received.add(request_id)
        if report is not None and self.place is not None:
            from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

            beside = [None] * len(self.scheduler.connector._connectors)
            beside[self.place] = report
            report = multi_connector.MultiKVConnectorWorkerMetadata(tuple(beside))
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=report,
            invalid_block_ids=spoiled,
        )


def make_config(
    model, port, *, blocks, ranks=1, step_tokens=64, running_max=4, connector=None, options=None,
    key_prefix="kvcellar.", **settings,
):  # fmt: skip
    """Return a complete VllmConfig for a toy model folder."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    from kvcellar.compat.vllm_plugin import register

    register()
    register_model()
    transfer = {
        "kv_connector": "KVCellarConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **(
                {f"{key_prefix}server_urls": [f"tcp://localhost:{each}" for each in port]}
                if isinstance(port, list)
                else {f"{key_prefix}port": port}
            ),
            "kvcellar.heartbeat_s": 0.2,
            # No time of a toy's steps or copies means anything.
            "kvcellar.gate": False,
            "kvcellar.lookup_timeout_s": WAIT_S,
            **(options or {}),
        },
        **(connector or {}),
    }
    cache = CacheConfig(
        block_size=BLOCK_TOKENS, enable_prefix_caching=settings.pop("prefix_caching", True)
    )
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=settings.pop("longest", 1024),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=running_max,
            max_num_batched_tokens=step_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )
    # Set afterwards, because a real configuration of several ranks wants several devices.
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.world_size = ranks
    assert settings == {}, settings
    return config


def make_groups(blocks, *specs):
    """Return a KVCacheConfig with a group for each spec; one of full attention without any."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    full = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=16, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([LAYER.replace("0", str(index))], spec)
            for index, spec in enumerate(specs or [full])
        ],
    )


def make_scheduler(config, *, blocks, is_async=False):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    kind = AsyncScheduler if is_async else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=make_groups(blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def make_hasher(config):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(BLOCK_TOKENS, function)
