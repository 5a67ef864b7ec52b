"""A worker half over plain torch tensors, and the scheduler's part of its jobs, played by hand."""

import contextlib
import itertools
import os
import threading
import time
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from kvcellar.client.handshake import open_session
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
from kvcellar.engines.pages import NOT_WRITTEN
from kvcellar.engines.vllm.metadata import (
    ConnectorMetadata,
    GroupLoad,
    GroupStore,
    JobResult,
    LoadJob,
    StoreJob,
)
from kvcellar.engines.vllm.options import ConnectorOptions
from kvcellar.engines.vllm.worker import WorkerHalf
from kvcellar.errors import KVCellarError
from kvcellar.protocol.messages import (
    Bind,
    ChunkState,
    Heartbeat,
    Lookup,
    Release,
    Reserve,
    Role,
    Status,
)
from kvcellar.transport.address import TcpAddress

WAIT_S = 20.0
BLOCK_TOKENS = 4
CHUNK_BLOCKS = 2
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float32)
LATENT = MLAAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
)
"""As large as `SPEC`, and the same on every rank."""
SHARD_BYTES = SPEC.page_size_bytes * CHUNK_BLOCKS * len(LAYERS)


def key(number):
    return number.to_bytes(32, "big")


def until(condition, timeout_s=WAIT_S):
    """Wait for what another thread or process does, and return what it came to."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.002)
    return value


class Rig:
    """One rank's worker half with `block_count` blocks of random KV, not yet started."""

    def __init__(
        self, port, *, block_count=24, rank=0, world_size=1, instance="rig", spec=SPEC, **options
    ):
        layer = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN")
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, world_size=world_size),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(LAYERS, layer)),
            kv_transfer_config=SimpleNamespace(engine_id=instance),
            model_config=SimpleNamespace(model="a model"),
            speculative_config=None,
        )
        self.kv_cache_config = KVCacheConfig(
            num_blocks=block_count,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        )
        # What the CPU platform registers: [blocks, heads, tokens, 2 * head size], one storage.
        shape = (2, BLOCK_TOKENS, 32) if spec is SPEC else (BLOCK_TOKENS, spec.head_size)
        storage = torch.randn(len(LAYERS), block_count, *shape)
        self.tensors = dict(zip(LAYERS, storage.unbind(0), strict=True))
        self.worker = WorkerHalf(
            self.vllm_config,
            self.kv_cache_config,
            ConnectorOptions(
                servers=tuple(
                    TcpAddress("127.0.0.1", each)
                    for each in (port if isinstance(port, list) else [port])
                ),
                heartbeat_s=0.5,
                **options,
            ),
        )

    def start(self):
        self.worker.register_kv_caches(self.tensors)
        return self

    @property
    def link(self):
        return self.worker._copying._link

    @property
    def boot_id(self):
        """The life of the server whose arena is the present one."""
        return self.worker._copying._shelf.boot_id

    @property
    def arena(self):
        """The present arena as this worker maps it."""
        return self.worker._copying._shelf._current.arena

    def connected(self, boot_id):
        """Wait until this life of the server is the worker's, too."""
        until(lambda: self.boot_id == boot_id and self.link.session is not None)

    def close(self):
        self.worker.close()

    def page(self, layer, block):
        return bytes(self.tensors[layer][block].contiguous().view(torch.uint8).flatten().numpy())

    def shard(self, block_ids):
        """The bytes that a chunk of these blocks must have in its slot."""
        return b"".join(self.page(layer, block) for layer in LAYERS for block in block_ids)

    def blocks(self, block_ids):
        """The bytes of each of these blocks."""
        return [self.shard([block]) for block in block_ids]

    def step(self, *, loads=(), stores=()):
        """Run a step's hooks in the order of a release that loads before the forward pass."""
        self.worker.begin(ConnectorMetadata(list(loads), list(stores)))
        self.worker.start_loads()
        self.worker.start_stores()

    def result(self, job_id):
        """Wait for a job's result, keeping those of others."""
        self.reported = getattr(self, "reported", {})

        def found():
            report = self.worker.report()
            for reported_id, result in (report.jobs if report else {}).items():
                assert reported_id not in self.reported, "a job is reported once"
                self.reported[reported_id] = result
            return self.reported.get(job_id)

        return until(found)

    def received(self):
        """Wait for requests whose loads ended; return them and the blocks that were spoiled."""
        requests = until(self.worker.collect)
        return requests, self.worker.load_errors()


class Gate:
    """Stops a worker's copies before they begin, until it opens."""

    def __init__(self, rig, closing):
        self.reached = threading.Event()
        self.opened = threading.Event()
        copies = rig.worker._copying._copies
        copies.load, copies.store = self._gated(copies.load), self._gated(copies.store)
        closing.append(self)

    def _gated(self, copy):
        def wait_and_copy(*args, **options):
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            return copy(*args, **options)

        return wait_and_copy

    def open(self):
        self.opened.set()

    def close(self):
        """Open, so that a test which fails leaves no thread behind."""
        self.opened.set()


class Scheduling:
    """What a scheduler half would do: bind, reserve, look up, and make jobs of the answers."""

    def __init__(self, port, *, world_size=1, instance="rig", is_shared=False):
        self.port = port
        self.world_size = world_size
        self.held = (0,) * world_size if is_shared else tuple(range(world_size))
        self.instance = instance
        self.job_ids = itertools.count(1)
        self.session = None

    def connect(self):
        """Connect, and bind once the workers and the first memory are there, as the real one."""
        self.close()
        self.session = until(self._open)
        until(self._is_ready)
        sizes, tokens = (SHARD_BYTES,) * len({*self.held}), BLOCK_TOKENS * CHUNK_BLOCKS
        namespace = bytes([self.world_size, *self.held]).ljust(32)
        self.call(lambda i: Bind(i, namespace, tokens, sizes, held=self.held))
        return self

    def _open(self):
        identity = Identity(
            Role.SCHEDULER, self.instance, "test", rank=0, world_size=self.world_size
        )
        options = ClientOptions(host="127.0.0.1", port=self.port)
        with contextlib.suppress(KVCellarError):
            return open_session(options, identity, client_id=os.urandom(16), clock=SystemClock())

    def _is_ready(self):
        beat = self.call(lambda i: Heartbeat(i, (), (), 0))
        return beat.layouts and beat.steps_ready

    def close(self):
        if self.session is not None:
            self.session.close()
            self.session = None

    def call(self, make):
        return self.session.call(make, timeout_s=WAIT_S)

    def reserve(self, *numbers, turn=0):
        return self.call(lambda i: Reserve(i, b"".join(map(key, numbers)), b"", turn))

    def store_job(self, numbers, block_ids, *, turn=0):
        """Reserve chunks, all of which must be new, and make the job that fills them."""
        reply = self.reserve(*numbers, turn=turn)
        assert reply.states == bytes([ChunkState.RESERVED]) * len(numbers), reply
        return StoreJob(
            job_id=next(self.job_ids),
            request_id=f"store-{numbers[0]}",
            boot_id=self.session.boot_id,
            reservation=reply.reservation,
            writers=tuple(self.writers(turn)),
            groups=(
                GroupStore(
                    group=0,
                    keys=b"".join(map(key, numbers)),
                    offsets=reply.offsets,
                    block_ids=list(block_ids),
                    places=list(range(len(numbers))),
                ),
            ),
        )

    def writers(self, turn):
        """Yield the rank whose turn it is to write each shard."""
        for shard in sorted({*self.held}):
            holders = [rank for rank, held in enumerate(self.held) if held == shard]
            yield holders[turn % len(holders)]

    def lookup(self, *numbers):
        return self.call(lambda i: Lookup(i, b"".join(map(key, numbers))))

    def load_job(self, numbers, block_ids, *, skip=0, request="load"):
        """Look chunks up, all of which must be there, and make the job that fetches them."""
        reply = self.lookup(*numbers)
        assert reply.count == len(numbers), reply
        return LoadJob(
            job_id=next(self.job_ids),
            request_id=request,
            boot_id=self.session.boot_id,
            shard_count=len({*self.held}),
            groups=(
                GroupLoad(
                    group=0,
                    keys=b"".join(map(key, numbers)),
                    refs=reply.refs,
                    block_ids=[NOT_WRITTEN] * skip + list(block_ids),
                ),
            ),
        )

    def release(self, *leases):
        self.call(lambda i: Release(i, leases))

    def status(self):
        return self.call(Status).status


def done(size_bytes):
    """A whole job's result, whatever time it took."""
    return JobResult(ranks_done=1, ranks_failed=0, size_bytes=size_bytes, copy_s=0.0)


def timeless(result):
    assert result.copy_s >= 0.0
    return JobResult(result.ranks_done, result.ranks_failed, result.size_bytes, 0.0)
