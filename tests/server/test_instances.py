"""Who has which seat of an instance, through restarts that overlap."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.running import layout

from kvcellar.errors import LimitError, MismatchError, NotRegisteredError
from kvcellar.protocol.messages import PROTOCOL_VERSION, Hello, Role
from kvcellar.server.instances import Roster


def hello(role, *, instance="engine", rank=0, world_size=2, pid=1):
    return Hello(
        1,
        protocol_version=PROTOCOL_VERSION,
        role=role,
        client_id=os.urandom(16),
        instance_id=instance,
        pid=pid,
        software="test",
        rank=rank,
        world_size=world_size,
        layouts=(layout(rank),) if role == Role.WORKER else (),
    )


def join(roster, said):
    client = roster.add(said, None)
    return client, roster.seat(client, said)


def generation(roster, pid):
    """Return the scheduler and both workers of one engine process group."""
    said = [hello(Role.SCHEDULER, pid=pid)]
    said += [hello(Role.WORKER, rank=rank, pid=pid) for rank in range(2)]
    return [join(roster, one)[0] for one in said]


def test_an_instance_is_complete_when_every_seat_is_taken():
    roster = Roster()
    scheduler, _ = join(roster, hello(Role.SCHEDULER))
    first, _ = join(roster, hello(Role.WORKER, rank=1))
    instance = scheduler.instance
    assert instance.layouts() == ()
    with pytest.raises(NotRegisteredError, match="rank 0 of instance 'engine'"):
        instance.writers(0)
    second, lost = join(roster, hello(Role.WORKER, rank=0))
    assert lost == []
    assert instance.layouts() == (layout(0), layout(1))
    assert instance.writers(0) == (second.owner, first.owner)


def test_ranks_that_hold_the_same_shard_write_it_by_turns():
    roster = Roster()
    _, *workers = generation(roster, pid=1)
    instance = roster.instances["engine"]
    instance.holders = [[0, 1]]
    written = [instance.writers(turn) for turn in range(3)]
    assert written == [(workers[turn % 2].owner,) for turn in range(3)]


def test_owners_are_never_reused():
    roster = Roster()
    first, _ = join(roster, hello(Role.TOOL))
    roster.remove(first)
    second, _ = join(roster, hello(Role.TOOL))
    assert second.owner > first.owner


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dead", [(), (0,), (1,), (1, 2), (0, 1), (0, 1, 2)], ids=str)
def test_a_restart_ends_with_exactly_the_new_generation_whoever_of_the_old_still_lives(order, dead):
    roster = Roster()
    old = generation(roster, pid=1)
    for index in dead:
        roster.remove(old[index])
    said = [hello(Role.SCHEDULER, pid=2)]
    said += [hello(Role.WORKER, rank=rank, pid=2) for rank in range(2)]
    new = [roster.add(one, None) for one in said]
    lost = [member for index in order for member in roster.seat(new[index], said[index])]
    instance = roster.instances["engine"]
    assert instance.scheduler is new[0]
    assert [instance.workers[rank] for rank in range(2)] == new[1:]
    alive = [client for index, client in enumerate(old) if index not in dead]
    assert sorted(c.owner for c in lost) == sorted(c.owner for c in alive), "each old one, once"
    assert [client.newer for client in alive] == [2] * len(alive)
    assert [client.newer for client in new] == [0] * 3


def test_another_world_size_is_another_generation():
    roster = Roster()
    old = generation(roster, pid=1)
    new, lost = join(roster, hello(Role.WORKER, world_size=1, pid=2))
    assert lost == old
    assert roster.instances["engine"].writers(0) == (new.owner,)


def test_who_lost_its_seat_stays_out():
    roster = Roster()
    old = generation(roster, pid=1)
    generation(roster, pid=2)
    with pytest.raises(MismatchError, match="newer process 2"):
        roster.seat(old[0], old[0].hello)


def test_a_reconnect_keeps_seat_and_namespace():
    roster = Roster()
    scheduler, *_ = generation(roster, pid=1)
    scheduler.instance.namespace = b"n" * 32
    assert roster.seat(scheduler, scheduler.hello) == []
    assert scheduler.instance.namespace == b"n" * 32


def test_an_instance_is_gone_with_its_last_member():
    roster = Roster()
    members = generation(roster, pid=1)
    for client in members:
        assert "engine" in roster.instances
        roster.remove(client)
    assert roster.instances == {}
    assert len(roster) == 0


def test_the_number_of_clients_is_bounded():
    roster = Roster(clients_max=2)
    for _ in range(2):
        join(roster, hello(Role.TOOL))
    with pytest.raises(LimitError, match="2 client processes"):
        join(roster, hello(Role.TOOL))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "again"]),
            st.sampled_from([Role.SCHEDULER, Role.WORKER]),
            st.integers(0, 1),
            st.integers(0, 20),
        ),
        max_size=40,
    )
)
def test_every_seat_has_one_holder_who_knows_it(steps):
    roster, known = Roster(), []
    for step, role, rank, index in steps:
        if step == "join":
            known.append(join(roster, hello(role, rank=rank, pid=len(known) + 1))[0])
        elif known:
            client = known[index % len(known)]
            if step == "leave":
                known.remove(client)
                roster.remove(client)
            elif not client.newer:
                assert roster.seat(client, client.hello) == []
        seated = [c for i in roster.instances.values() for c in i.members()]
        assert len(seated) == len(set(seated))
        assert {c for c in known if c.instance} == set(seated)
        assert all((c.instance is None) == bool(c.newer) for c in known)
        assert all(any(i.members()) for i in roster.instances.values())
