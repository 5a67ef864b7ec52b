"""Real clients on the real server: who may ask what, who holds what, and who takes whose place."""

import contextlib
import os
import subprocess
import sys

import msgspec
import pytest
from tests.server.running import (
    CHUNK_TOKENS,
    SHARD_BYTES,
    SOURCE,
    WAIT_S,
    RunningServer,
    eventually,
    key,
    layout,
    namespace,
)

from kvcellar.errors import (
    LimitError,
    MalformedError,
    MismatchError,
    NotRegisteredError,
    PeerClosedError,
)
from kvcellar.protocol.limits import KEYS_MAX
from kvcellar.protocol.messages import (
    Abort,
    Bind,
    Cancel,
    ChunkState,
    Clear,
    CommitOutcome,
    Damaged,
    Goodbye,
    Heartbeat,
    Loaded,
    Locate,
    Lookup,
    Ping,
    Release,
    Reserve,
    Role,
)


def numbered(message):
    return lambda request_id: msgspec.structs.replace(message, id=request_id)


def held(server):
    own = server.status()["kvcellar"]
    return own["leases"], own["reservations"]


def test_what_one_instance_stores_another_finds(server):
    with server.engine("one") as one, server.engine("two") as two:
        assert one.store(1, 2, 3) == CommitOutcome.VISIBLE
        found = two.lookup(1, 2, 3, 4)
        assert found.count == 3
        assert len(found.refs) == 3 * 16
        assert held(server) == (1, 0)
        assert two.call(lambda i: Release(i, (found.lease,))).id > 0
        assert held(server) == (0, 0)
        page = server.status()
        assert page["storage_manager"]["l1_manager"]["total_object_count"] == 3
        names = {instance["name"] for instance in page["kvcellar"]["instances"]}
        assert {"one", "two"} <= names
        cleared = two.call(Clear)
        assert (cleared.chunks, cleared.size_bytes) == (3, 3 * SHARD_BYTES)
        assert one.lookup(1).count == 0


def test_a_chunk_of_two_ranks_is_visible_after_both(server):
    with server.engine("pair", world_size=2) as engine:
        reserved = engine.reserve(10, 11)
        assert reserved.states == bytes([ChunkState.RESERVED] * 2)
        assert len(reserved.offsets) == 2 * 2 * 8
        seals = bytes(16)
        assert engine.commit(reserved.reservation, seals).outcome == CommitOutcome.PENDING
        assert engine.lookup(10).count == 0
        last = engine.commit(reserved.reservation, seals, shard=1)
        assert last.outcome == CommitOutcome.VISIBLE
        assert engine.lookup(10, 11).count == 2
        objects = server.status()["storage_manager"]["l1_manager"]["total_object_count"]
        assert objects == 4


def test_every_layout_is_told_once_all_ranks_are_here(server):
    scheduler = server.open(Role.SCHEDULER, "ranks", world_size=2)
    server.open(Role.WORKER, "ranks", world_size=2)
    beat = scheduler.call(lambda i: Heartbeat(i, (), (), 0), timeout_s=WAIT_S)
    assert beat.layouts == ()
    server.open(Role.WORKER, "ranks", rank=1, world_size=2)
    beat = scheduler.call(lambda i: Heartbeat(i, (), (), 0), timeout_s=WAIT_S)
    assert beat.layouts == (layout(0), layout(1))
    assert beat.boot_id == scheduler.boot_id
    assert beat.steps_ready >= 0


def test_a_heartbeat_gives_back_what_it_does_not_list(server):
    with server.engine("beats") as engine:
        engine.store(20)
        kept, lost = engine.lookup(20), engine.lookup(20)
        reserved = engine.reserve(21)
        assert held(server) == (2, 1)
        seen = engine.scheduler.seen()
        engine.call(lambda i: Heartbeat(i, (kept.lease,), (reserved.reservation,), seen))
        assert held(server) == (1, 1)
        late = engine.lookup(20)
        engine.call(lambda i: Heartbeat(i, (), (), seen))
        assert held(server) == (1, 0), "what came after `seen` may not have arrived yet"
        engine.call(lambda i: Release(i, (late.lease, lost.lease)))


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (Role.TOOL, Lookup(0, key(1))),
        (Role.WORKER, Lookup(0, key(1))),
        (Role.WORKER, Reserve(0, key(1), b"")),
        (Role.WORKER, Bind(0, namespace(), 16, (4096,))),
        (Role.WORKER, Clear(0)),
        (Role.SCHEDULER, Loaded(0, 1, 1, 1.0, True)),
        (Role.SCHEDULER, Abort(0, 1, 0)),
        (Role.TOOL, Cancel(0, 1)),
    ],
)
def test_a_role_may_not_do_anothers_work(server, role, message):
    with server.open(role, "roles") as session:
        with pytest.raises(MismatchError, match=f"a {role} may not send"):
            session.call(numbered(message), timeout_s=WAIT_S)
        session.call(Ping, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Lookup(0, key(1)), "bind"),
        (Reserve(0, key(1), b""), "bind"),
        (Bind(0, namespace(), 16, (4096,) * 2), "2 ranks"),
    ],
)
def test_what_comes_too_early_is_answered_and_ends_nothing(server, message, said):
    with server.open(Role.SCHEDULER, "early") as session:
        with pytest.raises((NotRegisteredError, MismatchError), match=said):
            session.call(numbered(message), timeout_s=WAIT_S)
        session.call(Ping, timeout_s=WAIT_S)


def test_a_store_without_all_ranks_is_answered_with_the_missing_one(server):
    with server.open(Role.SCHEDULER, "lonely") as session:
        session.call(lambda i: Bind(i, namespace(), CHUNK_TOKENS, (SHARD_BYTES,)), timeout_s=WAIT_S)
        with pytest.raises(NotRegisteredError, match="rank 0 of instance 'lonely'"):
            session.call(lambda i: Reserve(i, key(1), b""), timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Lookup(0, b"x"), MalformedError),
        (Reserve(0, key(1), b"x"), MalformedError),
        (Clear(0, b"x"), MalformedError),
        (Damaged(0, b"x", 0, 0), MalformedError),
        (Bind(0, b"x", 16, (4096,)), MalformedError),
        (Bind(0, namespace(), 0, (4096,)), MalformedError),
        (Bind(0, namespace(9), 16, (0,)), MalformedError),
        (Bind(0, namespace(9), 16, (4096,), held=(1,)), MalformedError),
        (Locate(0, 1), MalformedError),
    ],
)
def test_what_is_no_message_is_answered_and_costs_the_connection(server, message, error):
    with server.engine("sloppy") as engine, server.tool() as bystander:
        with pytest.raises(error):
            engine.call(numbered(message))
        with pytest.raises(PeerClosedError):
            engine.call(Ping)
        bystander.call(Ping, timeout_s=WAIT_S)
    eventually(lambda: held(server) == (0, 0))


def test_too_many_keys_are_answered_with_the_bound(server):
    with server.engine("greedy") as engine:
        with pytest.raises(LimitError, match=str(KEYS_MAX)):
            engine.call(lambda i: Lookup(i, bytes(32 * (KEYS_MAX + 1))))
        assert engine.lookup(*range(1000, 1100)).count == 0


def test_a_namespace_cannot_be_bound_with_other_sizes(server):
    with server.engine("sizes") as engine, pytest.raises(MismatchError, match="4096"):
        engine.call(lambda i: Bind(i, namespace(), CHUNK_TOKENS, (8192,)))


def test_a_damaged_chunk_is_removed_only_where_it_was_found(server):
    with server.engine("damage") as engine:
        engine.store(30, 31)
        found = engine.lookup(30, 31)
        offset = int.from_bytes(found.refs[:8], "little")
        worker = engine.workers[0]
        worker.call(lambda i: Damaged(i, key(30), 0, offset + 4096), timeout_s=WAIT_S)
        assert engine.lookup(30, 31).count == 2
        worker.call(lambda i: Damaged(i, key(30), 0, offset), timeout_s=WAIT_S)
        assert engine.lookup(30, 31).count == 0
        server.wait_for_line("damaged chunk removed")


def test_a_closed_connection_ends_leases_and_keeps_reservations(server):
    client_id = os.urandom(16)
    with server.engine("away") as engine:
        engine.store(40)
        other = server.open(Role.SCHEDULER, "later", client_id=client_id)
        worker = server.open(Role.WORKER, "later")
        other.call(lambda i: Bind(i, namespace(), CHUNK_TOKENS, (SHARD_BYTES,)), timeout_s=WAIT_S)
        assert other.call(lambda i: Lookup(i, key(40)), timeout_s=WAIT_S).count == 1
        reserved = other.call(lambda i: Reserve(i, key(41), b""), timeout_s=WAIT_S)
        assert held(server) == (1, 1)
        other.close()
        eventually(lambda: held(server) == (0, 1))
        # The same client comes again: its seat, its namespace and its reservation are still there.
        again = server.open(Role.SCHEDULER, "later", client_id=client_id)
        again.call(
            lambda i: Heartbeat(i, (), (reserved.reservation,), again.seen()), timeout_s=WAIT_S
        )
        assert held(server) == (0, 1)
        assert again.call(lambda i: Lookup(i, key(40)), timeout_s=WAIT_S).count == 1
        again.call(lambda i: Cancel(i, reserved.reservation), timeout_s=WAIT_S)
        again.call(Goodbye, timeout_s=WAIT_S)
        worker.call(Goodbye, timeout_s=WAIT_S)
        assert held(server) == (0, 0)


def test_of_two_connections_of_a_client_the_newer_wins(server):
    client_id = os.urandom(16)
    old = server.open(Role.SCHEDULER, "twice", client_id=client_id)
    new = server.open(Role.SCHEDULER, "twice", client_id=client_id)
    with pytest.raises(PeerClosedError):
        old.call(Ping, timeout_s=WAIT_S)
    new.call(Ping, timeout_s=WAIT_S)


def test_a_goodbye_frees_everything_at_once(server):
    with server.engine("polite") as engine:
        engine.store(50)
        engine.lookup(50)
        engine.reserve(51)
        assert held(server) == (1, 1)
        for session in (engine.scheduler, *engine.workers):
            session.call(Goodbye, timeout_s=WAIT_S)
        assert held(server) == (0, 0)
        names = {i["name"] for i in server.status()["kvcellar"]["instances"]}
        assert "polite" not in names


def test_the_newest_engine_of_a_name_takes_all_seats_of_the_old_one(server):
    old = server.engine("name", world_size=2)
    old.store(60)
    old.lookup(60)
    assert held(server) == (1, 0)
    # One rank of the new generation is enough: ranks of both must never write one chunk.
    server.open(Role.WORKER, "name", world_size=2)
    for session in (old.scheduler, *old.workers):
        with pytest.raises(PeerClosedError):
            session.call(Ping, timeout_s=WAIT_S)
    assert held(server) == (0, 0)
    server.wait_for_line("seat taken over")
    server.open(Role.WORKER, "name", rank=1, world_size=2)
    scheduler = server.open(Role.SCHEDULER, "name", world_size=2)
    with pytest.raises(NotRegisteredError, match="bind"):
        scheduler.call(lambda i: Lookup(i, key(60)), timeout_s=WAIT_S)
    bind = Bind(0, namespace(2), CHUNK_TOKENS, (SHARD_BYTES,) * 2)
    scheduler.call(numbered(bind), timeout_s=WAIT_S)
    assert scheduler.call(lambda i: Lookup(i, key(60)), timeout_s=WAIT_S).count == 1


def test_a_new_scheduler_half_inherits_no_namespace(server):
    old = server.open(Role.SCHEDULER, "heir")
    server.open(Role.WORKER, "heir")
    old.call(numbered(Bind(0, namespace(), CHUNK_TOKENS, (SHARD_BYTES,))), timeout_s=WAIT_S)
    old.call(Goodbye, timeout_s=WAIT_S)
    new = server.open(Role.SCHEDULER, "heir")
    with pytest.raises(NotRegisteredError, match="bind"):
        new.call(numbered(Lookup(0, key(1))), timeout_s=WAIT_S)


def test_the_one_that_lost_its_seat_is_told_by_whom_and_what_to_do(server):
    client_id = os.urandom(16)
    server.open(Role.SCHEDULER, "shared", client_id=client_id).close()
    server.open(Role.SCHEDULER, "shared")
    with pytest.raises(MismatchError, match=f"newer process {os.getpid()} .* engine_id"):
        server.open(Role.SCHEDULER, "shared", client_id=client_id)


def test_a_client_id_cannot_change_its_part(server):
    client_id = os.urandom(16)
    with server.open(Role.SCHEDULER, "part", client_id=client_id) as first:
        with pytest.raises(MismatchError, match="said hello as"):
            server.open(Role.WORKER, "part", client_id=client_id)
        first.call(Ping, timeout_s=WAIT_S)


DIES = """
import os, sys, time
sys.path[:0] = [{root!r}, {source!r}]
from tests.server.running import RunningServer, keys
server = RunningServer.__new__(RunningServer)
server.port, server.opened = {port}, []
engine = server.engine("doomed", world_size=2)
engine.store(70)
engine.lookup(70)
reserved = engine.reserve(71, 72)
engine.commit(reserved.reservation, bytes(16), shard=0)
if {fork}:
    if os.fork() == 0:
        time.sleep(60)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True])
def test_nothing_is_left_of_a_killed_engine_even_if_a_child_holds_its_sockets(server, fork):
    code = DIES.format(root=str(SOURCE.parent), source=str(SOURCE), port=server.port, fork=fork)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        assert held(server) == (1, 1)
        used = server.status()["storage_manager"]["l1_manager"]["memory_used_bytes"]
        process.kill()
        process.wait()
        eventually(lambda: held(server) == (0, 0))
        l1 = server.status()["storage_manager"]["l1_manager"]
        assert l1["memory_used_bytes"] == used - 4 * SHARD_BYTES
        assert l1["total_object_count"] == 2, "what was complete stays"
        names = {i["name"] for i in server.status()["kvcellar"]["instances"]}
        assert "doomed" not in names
        server.wait_for_line("client died role=scheduler instance=doomed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def test_a_frozen_client_loses_nothing(server):
    """No timer decides: only a release, a heartbeat, a closed socket or a death ends a lease."""
    with server.engine("frozen") as engine:
        engine.store(80)
        engine.lookup(80)
        with server.engine("busy") as busy:
            for number in range(200):
                busy.lookup(number)
        assert engine.lookup(80).count == 1


def test_the_counters_and_histograms_move(server):
    with server.engine("counted") as engine:
        before = server.status_metrics()
        engine.store(90, 91)
        engine.lookup(90, 91, 92)
        worker = engine.workers[0]
        worker.call(lambda i: Loaded(i, 2, 8192, 0.002, True), timeout_s=WAIT_S)
        worker.call(lambda i: Loaded(i, 0, 0, 0.0, False), timeout_s=WAIT_S)
        after = server.status_metrics()

    def moved(name):
        return after[f"kvcellar_{name}"] - before[f"kvcellar_{name}"]

    def observed(name):
        return sum(after[f"kvcellar_{name}_seconds"]["counts"]) - sum(
            before[f"kvcellar_{name}_seconds"]["counts"]
        )

    assert moved("stored_chunks_total") == 2
    assert moved("lookups_total") == 1
    assert moved("lookup_chunks_total") == 3
    assert moved("lookup_hit_chunks_total") == 2
    assert moved("loaded_chunks_total") == 2
    assert moved("loaded_bytes_total") == 8192
    loads = {
        result: after["kvcellar_loads_total"][result] - before["kvcellar_loads_total"][result]
        for result in ("ok", "failed")
    }
    assert loads == {"ok": 1, "failed": 1}
    assert [observed(n) for n in ("lookup", "reserve", "commit", "store", "load")] == [1] * 5


def test_only_allowed_users_may_connect(tmp_path):
    if os.getuid() != 0:
        pytest.skip("another user can be tried by root only")
    folder = tmp_path / "run"
    with RunningServer("--socket-dir", str(folder)) as server:
        for path in (tmp_path, folder, *folder.iterdir()):
            path.chmod(0o777)
        for parent in tmp_path.parents:
            if str(parent).startswith("/tmp/"):
                parent.chmod(0o755)
        said = as_user(12345, server.port)
        assert "MismatchError" in said
        assert "--client-uid 12345" in said
    with RunningServer("--client-uid", "12345") as server:
        assert as_user(12345, server.port) == "Pong"


def as_user(uid, port):
    """Ping a server as another user; return what came of it."""
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(SOURCE)!r})\n"
        "from kvcellar.client.tool import connect_tool\n"
        "from kvcellar.protocol.messages import Ping\n"
        f"os.setuid({uid})\n"
        "try:\n"
        f"    with connect_tool('localhost', {port}) as session:\n"
        "        print(type(session.call(Ping, timeout_s=5)).__name__)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout.strip() or answer.stderr
