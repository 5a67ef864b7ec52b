"""A worker half of a model of two KV groups that lie over the same memory, before a real server."""

import dataclasses
import os

import pytest
import torch
from tests.engines.vllm.test_worker import FAILED
from tests.engines.vllm.worker_rig import (
    BLOCK_TOKENS,
    CHUNK_BLOCKS,
    LAYERS,
    SHARD_BYTES,
    SPEC,
    Rig,
    Scheduling,
    done,
    timeless,
    until,
)
from tests.server.running import RunningServer, eventually
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvcellar.engines.pages import NOT_WRITTEN
from kvcellar.engines.vllm.groups import KVGroup
from kvcellar.engines.vllm.metadata import GroupLoad, GroupStore, LoadJob, StoreJob
from kvcellar.engines.vllm.support import require_supported
from kvcellar.engines.vllm.versions import can_fail_whole_loads
from kvcellar.engines.vllm.worker import WorkerHalf
from kvcellar.protocol.messages import OFFSET_BYTES, REF_BYTES, Bind, Lookup, Reserve

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not can_fail_whole_loads(), reason="this vLLM keeps no windows"),
]

WINDOWED = ("model.layers.3.attn", "model.layers.4.attn")
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.float32,
    sliding_window=BLOCK_TOKENS,
)
WINDOW_BYTES = WINDOW.page_size_bytes * len(WINDOWED)
SPACE = b"groups".ljust(32, b".")


class GroupRig(Rig):
    """The window's two layers lie where the first two others do; a block is that of one group."""

    def __init__(self, port):
        super().__init__(port)
        context = self.vllm_config.compilation_config.static_forward_context
        context.update(dict.fromkeys(WINDOWED, context[LAYERS[0]]))
        self.tensors |= {name: self.tensors[LAYERS[at]] for at, name in enumerate(WINDOWED)}
        self.kv_cache_config = KVCacheConfig(
            num_blocks=24,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(list(LAYERS), SPEC),
                KVCacheGroupSpec(list(WINDOWED), WINDOW),
            ],
        )
        self.worker = WorkerHalf(self.vllm_config, self.kv_cache_config, self.worker._options)

    def tail(self, block):
        return b"".join(self.page(layer, block) for layer in WINDOWED)


@pytest.fixture(scope="module")
def server():
    with RunningServer() as one:
        eventually(lambda: one.status()["kvcellar"]["arena"]["ready_bytes"])
        yield one


@pytest.fixture
def rig(server):
    one = GroupRig(server.port).start()
    yield one
    one.close()


@pytest.fixture
def scheduling(server, rig):
    one = Scheduling(server.port)
    one.session = until(one._open)
    until(one._is_ready)
    sizes, tokens = (SHARD_BYTES, WINDOW_BYTES), BLOCK_TOKENS * CHUNK_BLOCKS
    one.call(lambda i: Bind(i, SPACE, tokens, sizes, spans=(0, 1)))
    rig.connected(one.session.boot_id)
    yield one
    one.close()


def store(rig, scheduling, *, whole, tails):
    """Store two chunks: blocks of the whole group, and one block each of the window."""
    keys = [os.urandom(32) for _ in range(4)]
    # Chunk after chunk, so that neither group's chunks lie together in the reservation.
    reply = scheduling.call(lambda i: Reserve(i, b"".join(keys), b"", groups=b"\0\1\0\1"))
    assert reply.states == b"\1" * 4
    offsets = [reply.offsets[at : at + OFFSET_BYTES] for at in range(0, 4 * OFFSET_BYTES, 8)]
    job = StoreJob(
        job_id=next(scheduling.job_ids),
        request_id="store",
        boot_id=scheduling.session.boot_id,
        reservation=reply.reservation,
        writers=(0,),
        groups=(
            GroupStore(0, keys[0] + keys[2], offsets[0] + offsets[2], whole, [0, 2]),
            GroupStore(1, keys[1] + keys[3], offsets[1] + offsets[3], tails, [1, 3]),
        ),
    )
    rig.step(stores=[job])
    result = rig.result(job.job_id)
    assert timeless(result) == done(2 * (SHARD_BYTES + WINDOW_BYTES))
    asked = keys[0] + keys[2] + keys[1] + keys[3]
    hit = until(lambda: (found := scheduling.call(lambda i: Lookup(i, asked))).count == 2 and found)
    assert len(hit.refs) == 3 * REF_BYTES, "all of the whole group, the window's last"
    return keys, hit


def load(scheduling, keys, hit, *, whole, tail):
    return LoadJob(
        job_id=next(scheduling.job_ids),
        request_id="load",
        boot_id=scheduling.session.boot_id,
        shard_count=1,
        groups=(
            GroupLoad(0, keys[0] + keys[2], hit.refs[: 2 * REF_BYTES], whole),
            GroupLoad(1, keys[3], hit.refs[2 * REF_BYTES :], tail),
        ),
        is_divisible=False,
    )


def test_the_groups_of_the_rig_are_what_the_engine_would_keep(rig):
    found = require_supported(rig.vllm_config, rig.kv_cache_config)
    assert found == (KVGroup(0, BLOCK_TOKENS), KVGroup(1, BLOCK_TOKENS, window=BLOCK_TOKENS))


def test_each_groups_blocks_come_back_as_they_were(rig, scheduling):
    keys, hit = store(rig, scheduling, whole=[1, 2, 3, 4], tails=[5, 6])
    whole, tail = rig.shard([1, 2, 3, 4]), rig.tail(6)
    others = {block: rig.shard([block]) for block in (9, 15, 16)}
    job = load(scheduling, keys, hit, whole=[NOT_WRITTEN, 11, 12, 13], tail=[14])
    rig.step(loads=[job])
    assert rig.received() == ({"load"}, set())
    assert rig.worker.failed_loads() == set()
    assert rig.shard([1, 11, 12, 13]) == whole
    assert rig.tail(14) == tail
    assert {block: rig.shard([block]) for block in others} == others
    assert timeless(rig.result(job.job_id)) == done(2 * SHARD_BYTES + WINDOW_BYTES)


def test_damage_in_one_group_fails_the_load_as_a_whole(rig, scheduling):
    keys, hit = store(rig, scheduling, whole=[1, 2, 3, 4], tails=[5, 6])
    at = int.from_bytes(hit.refs[2 * REF_BYTES :][:OFFSET_BYTES], "little")
    rig.arena.view[at + 9] ^= 4
    job = load(scheduling, keys, hit, whole=[10, 11, 12, 13], tail=[14])
    rig.step(loads=[job])
    assert rig.received() == ({"load"}, set())
    assert rig.worker.failed_loads() == {"load"}
    assert rig.worker.failed_loads() == set()
    failed = rig.result(job.job_id)
    assert (failed.ranks_done, failed.ranks_failed) == (0, 1)
    # The server removed it, so the hit ends where a window is left.
    asked = keys[0] + keys[2] + keys[1] + keys[3]
    until(lambda: scheduling.call(lambda i: Lookup(i, asked)).count == 1)


def test_a_load_of_another_life_fails_as_a_whole(rig, scheduling):
    keys, hit = store(rig, scheduling, whole=[1, 2, 3, 4], tails=[5, 6])
    job = load(scheduling, keys, hit, whole=[10, 11, 12, 13], tail=[14])
    rig.step(loads=[dataclasses.replace(job, boot_id=b"")])
    assert rig.received() == ({"load"}, set())
    assert rig.worker.failed_loads() == {"load"}
    assert timeless(rig.result(job.job_id)) == FAILED
