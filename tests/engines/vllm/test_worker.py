"""The worker half over a real server: what lies in the slots, what comes back, what is found."""

import time

import pytest
import torch
from tests.engines.vllm.worker_rig import (
    LATENT,
    SHARD_BYTES,
    SPEC,
    WAIT_S,
    Gate,
    Rig,
    Scheduling,
    done,
    timeless,
    until,
)
from tests.server.running import RunningServer
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from kvcellar.engines.copy_cpu import page_kernels
from kvcellar.engines.vllm import copying
from kvcellar.engines.vllm.metadata import ConnectorMetadata, JobResult, WorkerReport
from kvcellar.errors import UnsupportedModelError
from kvcellar.protocol.messages import Role

pytestmark = pytest.mark.engine

FAILED = JobResult(ranks_done=0, ranks_failed=1)


@pytest.fixture(scope="module")
def server():
    page_kernels()  # Once in a process, and not in the time of the first test.
    with RunningServer() as running:
        yield running
        assert "Traceback" not in running.log()


@pytest.fixture
def closing():
    """A list of things that are closed at the end, the last one first."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def start(server, closing, request):
    """Return a function that starts worker halves of an instance with this test's name."""

    def begin(*, world_size=1, is_shared=False, **options):
        instance = f"{request.node.name} {len(closing)}"
        rigs = [
            Rig(
                server.port,
                rank=rank,
                world_size=world_size,
                instance=instance,
                spec=LATENT if is_shared else SPEC,
                **options,
            )
            for rank in range(world_size)
        ]
        closing.extend(rigs)
        for rig in rigs:
            rig.start()
        scheduling = Scheduling(
            server.port, world_size=world_size, instance=instance, is_shared=is_shared
        )
        closing.append(scheduling)
        scheduling.connect()
        for rig in rigs:
            rig.connected(scheduling.session.boot_id)
        return scheduling, *rigs

    return begin


@pytest.fixture
def arena(server):
    """The arena as another engine's worker maps it."""
    session = server.open(Role.WORKER, "another")
    yield session.arena.view
    session.close()
    session.arena.close()


@pytest.fixture
def numbers(request):
    """Chunk numbers that no other test of the module uses."""
    base = abs(hash(request.node.nodeid)) % 2**60 * 16
    return range(base, base + 16)


def stored(scheduling, rig, numbers, block_ids):
    """Store chunks, wait until they can be found, and return the job."""
    job = scheduling.store_job(numbers, block_ids)
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES * len(numbers))
    hit = until(lambda: (found := scheduling.lookup(*numbers)).count == len(numbers) and found)
    scheduling.release(hit.lease)
    return job


def offset_of(job, chunk, *, shard=0):
    start = (chunk * job.shard_count + shard) * 8
    return int.from_bytes(job.groups[0].offsets[start : start + 8], "little")


def test_a_store_puts_each_chunks_pages_in_layer_order_into_its_slot(start, arena, numbers):
    scheduling, rig = start()
    job = stored(scheduling, rig, numbers[:2], [9, 3, 5, 4])
    for chunk, blocks in enumerate([[9, 3], [5, 4]]):
        offset = offset_of(job, chunk)
        assert bytes(arena[offset : offset + SHARD_BYTES]) == rig.shard(blocks)


def test_a_load_fills_other_blocks_with_the_same_bytes_and_no_block_else(start, numbers):
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:3], range(1, 7))
    expected, before = rig.blocks(range(1, 7)), rig.blocks(range(24))
    job = scheduling.load_job(numbers[:3], [20, 11, 23, 8, 9, 10])
    rig.step(loads=[job])
    assert rig.received() == ({"load"}, set())
    assert timeless(rig.result(job.job_id)) == done(3 * SHARD_BYTES)
    assert rig.blocks([20, 11, 23, 8, 9, 10]) == expected
    untouched = [block for block in range(24) if block not in {20, 11, 23, 8, 9, 10}]
    assert rig.blocks(untouched) == [before[block] for block in untouched]


def test_another_instance_loads_what_one_stored(start, numbers):
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:2], range(1, 5))
    reader, other = start()
    other.step(loads=[reader.load_job(numbers[:2], [9, 8, 7, 6])])
    assert other.received() == ({"load"}, set())
    assert other.blocks([9, 8, 7, 6]) == rig.blocks(range(1, 5))


def test_blocks_that_the_engine_holds_already_are_not_written(start, numbers):
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:2], range(1, 5))
    before = rig.blocks(range(24))
    job = scheduling.load_job(numbers[:2], [11, 12, 13], skip=1)
    rig.step(loads=[job])
    assert rig.received() == ({"load"}, set())
    after = rig.blocks(range(24))
    assert after[11:14] == before[2:5]
    assert after[:11] + after[14:] == before[:11] + before[14:]


def test_each_rank_copies_its_own_shard_and_the_last_commit_shows_the_chunks(start, numbers):
    scheduling, first, second = start(world_size=2)
    job = scheduling.store_job(numbers[:2], range(1, 5))
    first.step(stores=[job])
    assert timeless(first.result(job.job_id)) == done(2 * SHARD_BYTES)
    assert scheduling.lookup(*numbers[:2]).count == 0
    second.step(stores=[job])
    assert timeless(second.result(job.job_id)) == done(2 * SHARD_BYTES)
    until(lambda: scheduling.lookup(*numbers[:2]).count == 2)
    load = scheduling.load_job(numbers[:2], range(11, 15))
    for rig in (first, second):
        expected = rig.blocks(range(1, 5))
        rig.step(loads=[load])
        assert rig.received() == ({"load"}, set())
        assert rig.blocks(range(11, 15)) == expected
    assert first.blocks([11]) != second.blocks([11])


def test_what_all_ranks_hold_is_written_by_one_and_read_by_all(start, numbers):
    scheduling, *rigs = start(world_size=2, is_shared=True)
    for turn, writer in enumerate(rigs):
        chunks, blocks = numbers[2 * turn : 2 * turn + 2], range(1, 5)
        idle = rigs[1 - turn]
        job = scheduling.store_job(chunks, blocks, turn=turn)
        assert len(job.groups[0].offsets) == 2 * 8, "one slot a chunk"
        idle.step(stores=[job])
        assert timeless(idle.result(job.job_id)) == done(0)
        assert scheduling.lookup(*chunks).count == 0
        writer.step(stores=[job])
        assert timeless(writer.result(job.job_id)) == done(2 * SHARD_BYTES)
        until(lambda chunks=chunks: scheduling.lookup(*chunks).count == 2)
        load = scheduling.load_job(chunks, range(11, 15))
        for rig in rigs:
            rig.step(loads=[load])
            assert rig.received() == ({"load"}, set())
            assert rig.blocks(range(11, 15)) == writer.blocks(blocks)


def flip_a_bit(arena, offsets):
    arena[offsets[1] + SHARD_BYTES - 1] ^= 0x10


def swap_two_slots(arena, offsets):
    first, second = (bytes(arena[offset : offset + SHARD_BYTES]) for offset in offsets[1:3])
    arena[offsets[1] : offsets[1] + SHARD_BYTES] = second
    arena[offsets[2] : offsets[2] + SHARD_BYTES] = first


def put_an_older_chunk_back(arena, offsets):
    arena[offsets[1] : offsets[1] + SHARD_BYTES] = bytes(
        arena[offsets[0] : offsets[0] + SHARD_BYTES]
    )


def cut_the_end_off(arena, offsets):
    arena[offsets[1] + SHARD_BYTES // 2 : offsets[1] + SHARD_BYTES] = bytes(SHARD_BYTES // 2)


def shift_by_a_word(arena, offsets):
    slot = bytes(arena[offsets[1] : offsets[1] + SHARD_BYTES])
    arena[offsets[1] : offsets[1] + SHARD_BYTES] = slot[4:] + slot[:4]


def fill_with_nans(arena, offsets):
    arena[offsets[1] : offsets[1] + SHARD_BYTES] = b"\xff" * SHARD_BYTES


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        swap_two_slots,
        put_an_older_chunk_back,
        cut_the_end_off,
        shift_by_a_word,
        fill_with_nans,
    ],
)
def test_damage_is_found_and_only_what_lies_before_it_is_used(start, arena, numbers, damage):
    scheduling, rig = start()
    job = stored(scheduling, rig, numbers[:3], range(1, 7))
    failed = scheduling.status()["metrics"]["kvcellar_loads_total"]["failed"]
    load = scheduling.load_job(numbers[:3], range(11, 17))
    damage(arena, [offset_of(job, chunk) for chunk in range(3)])
    before = rig.blocks(range(24))
    rig.step(loads=[load])

    assert rig.received() == ({"load"}, {13, 14, 15, 16})
    assert rig.worker.load_errors() == set()
    assert timeless(rig.result(load.job_id)) == JobResult(0, 1, SHARD_BYTES, 0.0)
    after = rig.blocks(range(24))
    assert after[11:13] == before[1:3]
    # No byte that failed its seal stays in the engine, where it could be a NaN.
    assert after[13:15] in (before[13:15], [bytes(len(before[0]))] * 2)
    assert after[15:17] == before[15:17]
    # The chunk is gone, the one before it stays, and the load was counted as a failure.
    until(lambda: scheduling.lookup(*numbers[:3]).count == 1)
    metrics = scheduling.status()["metrics"]
    assert metrics["kvcellar_loads_total"]["failed"] == failed + 1


def test_damage_in_the_first_chunk_spoils_no_block_that_the_engine_holds(start, arena, numbers):
    scheduling, rig = start()
    job = stored(scheduling, rig, numbers[:2], range(1, 5))
    load = scheduling.load_job(numbers[:2], [11, 12, 13], skip=1)
    flip_a_bit(arena, [0, offset_of(job, 0)])
    rig.step(loads=[load])
    assert rig.received() == ({"load"}, {11, 12, 13})


def test_damage_behind_a_chunk_that_is_partly_held_spoils_all_its_blocks(start, arena, numbers):
    scheduling, rig = start()
    job = stored(scheduling, rig, numbers[:2], range(1, 5))
    load = scheduling.load_job(numbers[:2], [11, 12, 13], skip=1)
    flip_a_bit(arena, [0, offset_of(job, 1)])
    rig.step(loads=[load])
    assert rig.received() == ({"load"}, {12, 13})
    assert rig.blocks([11]) == rig.blocks([2])


def test_damage_in_a_part_that_is_not_copied_is_found_too(start, arena, numbers):
    scheduling, rig = start()
    job = stored(scheduling, rig, numbers[:1], [1, 2])
    load = scheduling.load_job(numbers[:1], [11], skip=1)
    arena[offset_of(job, 0)] ^= 1
    rig.step(loads=[load])
    assert rig.received() == ({"load"}, {11})


def test_another_ranks_shard_is_damage(start, arena, numbers):
    scheduling, first, second = start(world_size=2)
    job = scheduling.store_job(numbers[:1], [1, 2])
    for rig in (first, second):
        rig.step(stores=[job])
        rig.result(job.job_id)
    until(lambda: scheduling.lookup(*numbers[:1]).count == 1)
    load = scheduling.load_job(numbers[:1], [11, 12])
    mine, theirs = (offset_of(job, 0, shard=shard) for shard in range(2))
    arena[mine : mine + SHARD_BYTES] = bytes(arena[theirs : theirs + SHARD_BYTES])
    first.step(loads=[load])
    assert first.received() == ({"load"}, {11, 12})
    second.step(loads=[load])
    assert second.received() == ({"load"}, set())


def test_jobs_of_another_life_of_the_server_end_at_once_without_a_copy(start, numbers):
    scheduling, rig = start()
    store = stored(scheduling, rig, numbers[:1], [1, 2])
    load = scheduling.load_job(numbers[:1], [11, 12])
    before = rig.blocks(range(24))
    for job in (store, load):
        object.__setattr__(job, "boot_id", bytes(16))
        object.__setattr__(job, "job_id", job.job_id + 1000)
    rig.step(loads=[load], stores=[store])
    assert rig.worker.collect() == {"load"}
    assert rig.worker.load_errors() == {11, 12}
    assert rig.worker.report().jobs == {load.job_id: FAILED, store.job_id: FAILED}
    assert rig.blocks(range(24)) == before


def test_a_slot_outside_the_arena_is_a_failed_load(start, numbers):
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:1], [1, 2])
    load = scheduling.load_job(numbers[:1], [11, 12])
    (part,) = load.groups
    object.__setattr__(part, "refs", (1 << 40).to_bytes(8, "little") + part.refs[8:])
    rig.step(loads=[load])
    assert rig.received() == ({"load"}, {11, 12})
    assert timeless(rig.result(load.job_id)) == FAILED


def test_a_block_that_does_not_exist_fails_the_store_and_frees_its_slots(start, numbers):
    scheduling, rig = start()
    job = scheduling.store_job(numbers[:2], [1, 2, 3, 24])
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == FAILED
    until(lambda: scheduling.status()["kvcellar"]["reservations"] == 0)
    assert scheduling.lookup(*numbers[:2]).count == 0


def test_one_ranks_failure_frees_the_slots_of_all(start, numbers):
    scheduling, first, second = start(world_size=2)
    job = scheduling.store_job(numbers[:1], [1, 2])
    first.step(stores=[job])
    assert timeless(first.result(job.job_id)) == done(SHARD_BYTES)
    object.__setattr__(job.groups[0], "block_ids", [1, 99])
    second.step(stores=[job])
    assert timeless(second.result(job.job_id)) == FAILED
    until(lambda: scheduling.status()["kvcellar"]["reservations"] == 0)
    assert scheduling.lookup(*numbers[:1]).count == 0


def test_a_step_never_waits_for_a_copy(start, closing, numbers):
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:1], [1, 2])
    store, load = (
        scheduling.store_job(numbers[1:2], [3, 4]),
        scheduling.load_job(numbers[:1], [7, 8]),
    )
    gate = Gate(rig, closing)
    rig.step(loads=[load], stores=[store])
    assert gate.reached.wait(WAIT_S)
    rig.step()
    assert rig.worker.collect() == set()
    assert rig.worker.report() is None
    gate.open()
    assert rig.received() == ({"load"}, set())
    assert timeless(rig.result(store.job_id)) == done(SHARD_BYTES)
    assert timeless(rig.result(load.job_id)) == done(SHARD_BYTES)


def test_copies_wait_as_long_as_a_test_asks_for(start, numbers):
    scheduling, rig = start(copy_delay_s=0.3)
    job = scheduling.store_job(numbers[:1], [1, 2])
    started_s = time.monotonic()
    rig.step(stores=[job])
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)
    assert time.monotonic() - started_s >= 0.3


def test_a_store_that_finds_the_queue_full_ends_at_once_and_frees_its_slots(
    start, closing, numbers, monkeypatch
):
    monkeypatch.setattr(copying, "STORES_MAX", 1)
    scheduling, rig = start()
    jobs = [scheduling.store_job([number], [1, 2]) for number in numbers[:4]]
    gate = Gate(rig, closing)
    rig.step(stores=jobs[:1])
    assert gate.reached.wait(WAIT_S)
    rig.step(stores=jobs[1:])
    assert rig.worker.report().jobs == {job.job_id: FAILED for job in jobs[2:]}
    gate.open()
    for job in jobs[:2]:
        assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)
    until(lambda: scheduling.status()["kvcellar"]["reservations"] == 0)
    assert [scheduling.lookup(number).count for number in numbers[:4]] == [1, 1, 0, 0]


def test_a_load_that_finds_the_queue_full_is_computed(start, closing, numbers, monkeypatch):
    monkeypatch.setattr(copying, "LOADS_MAX", 1)
    scheduling, rig = start()
    stored(scheduling, rig, numbers[:1], [1, 2])
    jobs = [
        scheduling.load_job(numbers[:1], [8 + 2 * n, 9 + 2 * n], request=f"r{n}") for n in range(4)
    ]
    gate = Gate(rig, closing)
    rig.step(loads=jobs[:1])
    assert gate.reached.wait(WAIT_S)
    rig.step(loads=jobs[1:])
    assert rig.worker.collect() == {"r2", "r3"}
    assert rig.worker.load_errors() == {12, 13, 14, 15}
    gate.open()
    received = set()
    while received != {"r0", "r1"}:
        requests, spoiled = rig.received()
        assert spoiled == set()
        received |= requests


def test_stores_that_a_step_did_not_start_begin_with_the_next(start, numbers):
    scheduling, rig = start()
    job = scheduling.store_job(numbers[:1], [1, 2])
    rig.worker.begin(ConnectorMetadata(stores=[job]))
    rig.worker.start_loads()
    assert rig.worker.report() is None
    rig.step()
    assert timeless(rig.result(job.job_id)) == done(SHARD_BYTES)


def test_closing_ends_everything_within_a_second_and_says_goodbye(start, numbers):
    scheduling, rig = start(copy_delay_s=30.0)
    jobs = [scheduling.store_job([number], [1, 2]) for number in numbers[:3]]
    rig.step(stores=jobs)
    started_s = time.monotonic()
    rig.close()
    rig.close()
    assert time.monotonic() - started_s < 1.0
    until(lambda: scheduling.status()["kvcellar"]["reservations"] == 0)
    assert scheduling.lookup(numbers[0]).count == 0


def test_a_model_that_cannot_be_kept_is_refused_by_the_workers_which_come_first(server):
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match="CrossAttentionSpec"):
        Rig(server.port, spec=cross)


def test_a_layer_that_cannot_be_kept_is_refused_at_registration(server):
    rig = Rig(server.port)
    rig.tensors["model.layers.1.attn"] = rig.tensors["model.layers.1.attn"].transpose(0, 1)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.attn"):
        rig.start()
    rig.close()


def test_a_report_tells_the_step_that_it_ends_and_how_long_loads_waited(start, closing, numbers):
    scheduling, rig = start()
    store = scheduling.store_job(numbers[:1], [1, 2])
    rig.step(stores=[store])
    rig.result(store.job_id)
    gate = Gate(rig, closing)
    jobs = [scheduling.load_job(numbers[:1], [3, 4]) for _ in range(2)]
    rig.worker.begin(ConnectorMetadata(jobs, step=9))
    rig.worker.start_loads()
    assert rig.worker.report() == WorkerReport(step=9)
    assert gate.reached.wait(WAIT_S)
    queued_s = time.monotonic()
    until(lambda: time.monotonic() - queued_s > 0.05)
    gate.opened.set()
    # Both were queued by then, and the second one stood behind the first.
    assert rig.result(jobs[1].job_id).wait_s > 0.05
    assert rig.worker.report() is None
