"""The stand-in for an engine stores and finds chunks of a real server."""

import pytest
from tests.server.running import RunningServer

from kvcellar.bench.programs import BenchError
from kvcellar.bench.stand_in import StandIn, random_keys

SHARD_BYTES = 8192


@pytest.fixture
def engine():
    with RunningServer() as server, StandIn(server.port, name="x", shard_bytes=SHARD_BYTES) as made:
        made.wait_for_memory(1 << 20)
        yield made


def test_what_it_stores_it_finds(engine):
    keys = random_keys(20)
    assert engine.store(keys[: 10 * 32]) == 10
    assert engine.store(keys[10 * 32 :], parent=keys[9 * 32 : 10 * 32]) == 10
    assert engine.store(keys) == 0
    reply = engine.lookup(keys + random_keys(1))
    assert reply.count == 20
    engine.release(reply.lease)


def test_it_writes_the_slots_that_it_was_given(engine):
    written = []

    def fill(view, offsets):
        for offset in offsets:
            view[offset : offset + SHARD_BYTES] = b"k" * SHARD_BYTES
        written.extend(offsets)
        return bytes(8 * len(offsets))

    keys = random_keys(3)
    engine.store(keys, fill=fill)
    refs = engine.lookup(keys).refs
    assert [int.from_bytes(refs[at : at + 8], "little") for at in (0, 16, 32)] == written
    assert engine.worker.arena.view[written[2]] == ord("k")


def test_a_prefix_that_it_keeps_is_not_evicted(engine):
    kept = random_keys(4)
    engine.store(kept)
    engine.keep(kept)
    # More than the server's 64 MiB hold.
    for _ in range(10):
        engine.store(random_keys(1000))
    assert engine.lookup(kept).count == 4


def test_a_store_without_room_is_an_error(engine):
    with pytest.raises(BenchError, match="no room"):
        engine.store(random_keys(20_000))
