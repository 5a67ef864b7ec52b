"""What heartbeats list: leases end with their session, reservations only with their boot."""

import pytest
from tests.server.running import (
    CHUNK_TOKENS,
    SHARD_BYTES,
    WAIT_S,
    RunningServer,
    eventually,
    keys,
    namespace,
)

from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import FakeClock, SystemClock
from kvcellar.engines.vllm.holdings import ENDED_LISTED_S, Holdings
from kvcellar.protocol.messages import (
    Bind,
    ChunkState,
    Commit,
    CommitOutcome,
    Lookup,
    LookupReply,
    Reserve,
    ReserveReply,
    Role,
)

pytestmark = pytest.mark.engine


class Session:
    def __init__(self, boot_id):
        self.boot_id = boot_id
        self.is_open = True


def granted(handle):
    return ReserveReply(1, handle, bytes([ChunkState.RESERVED]), bytes(8))


def test_a_reservation_is_listed_after_its_session_and_a_lease_is_not():
    holdings, session = Holdings(FakeClock()), Session(b"a")
    holdings.note(session, LookupReply(1, 1, 7, bytes(16)))
    holdings.note(session, granted(3))
    assert holdings.listed() == ((7,), (3,))
    session.is_open = False
    assert holdings.listed() == ((), (3,))
    assert holdings.count() == (0, 1)


def test_an_ended_reservation_is_listed_for_a_while_also_over_a_reconnect():
    clock = FakeClock()
    holdings, session = Holdings(clock), Session(b"a")
    holdings.note(session, granted(3))
    session.is_open = False
    holdings.end_reservation(Session(b"a"), 3)
    assert (holdings.listed(), holdings.count()) == (((), (3,)), (0, 0))
    clock.advance(ENDED_LISTED_S)
    assert holdings.listed() == ((), ())


def test_another_boots_handles_are_others():
    holdings = Holdings(FakeClock())
    holdings.note(Session(b"a"), granted(3))
    holdings.note(Session(b"b"), granted(4))
    assert holdings.listed() == ((), (4,))
    holdings.note(Session(b"b"), granted(3))
    holdings.drop_reservation(Session(b"a"), 3)
    assert set(holdings.listed()[1]) == {3, 4}
    holdings.drop_reservation(Session(b"b"), 3)
    assert holdings.listed() == ((), (4,))


def test_slots_stay_a_writers_when_the_scheduler_half_reconnects():
    """A rank copies while the connection breaks: nobody else gets its slots, and it may commit."""
    holdings = Holdings(SystemClock())
    with RunningServer() as server:
        link = Link(
            ClientOptions(host="localhost", port=server.port, heartbeat_s=0.1),
            Identity(Role.SCHEDULER, instance_id="reconnects", software="test"),
            clock=SystemClock(),
            held=holdings.listed,
        )
        link.start()
        try:
            session = link.wait_ready(WAIT_S)
            worker = server.open(Role.WORKER, "reconnects", rank=0, world_size=1)
            eventually(lambda: link.last_heartbeat.layouts and link.last_heartbeat.steps_ready)
            bind = (namespace(), CHUNK_TOKENS, (SHARD_BYTES,))
            session.call(lambda id_: Bind(id_, *bind), timeout_s=WAIT_S)
            reserved = session.call(
                lambda id_: Reserve(id_, keys(1), b""),
                timeout_s=WAIT_S,
                record=lambda reply: holdings.note(session, reply),
            )
            session.close()
            again = eventually(lambda: link.session is not session and link.session)
            assert again.boot_id == session.boot_id
            # Ready means that a heartbeat of the new session was answered.
            link.wait_ready(WAIT_S)
            done = worker.call(
                lambda id_: Commit(id_, reserved.reservation, 0, bytes(8), 0.001),
                timeout_s=WAIT_S,
            )
            assert done.outcome == CommitOutcome.VISIBLE
            again.call(lambda id_: Bind(id_, *bind), timeout_s=WAIT_S)
            hit = again.call(lambda id_: Lookup(id_, keys(1)), timeout_s=WAIT_S)
            assert hit.count == 1
        finally:
            link.close()
