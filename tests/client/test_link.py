"""A link stays connected to whatever server is there, and never holds anybody up."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from tests.client.conftest import SCHEDULER, WORKER
from tests.client.double import ServerDouble, free_port, silent, until
from tests.transport.open_files import open_fds

from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions
from kvcellar.clock import SystemClock
from kvcellar.errors import PeerClosedError, RetryableError, TimeoutExpiredError
from kvcellar.protocol.messages import (
    ErrorReply,
    Heartbeat,
    HeartbeatReply,
    Lookup,
    LookupReply,
    Ping,
    Pong,
)

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def link(make_link):
    link = make_link()
    link.start()
    link.wait_ready(5.0)
    return link


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_link_connects_in_the_background(make_link, server):
    link = make_link()
    assert link.session is None
    link.start()
    session = link.wait_ready(5.0)
    assert link.session is session
    assert link.last_heartbeat == HeartbeatReply(2, server.boot_id, 0, 1)
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_an_absent_server_is_named_once_and_found_when_it_comes(make_link, caplog):
    port = free_port()
    link = make_link(port=port)
    link.start()
    with pytest.raises(TimeoutExpiredError, match=f"no server at tcp://127.0.0.1:{port}.*refused"):
        link.wait_ready(0.5)
    (warning,) = warnings_in(caplog)
    assert f"tcp://127.0.0.1:{port}" in warning
    with ServerDouble(port) as late:
        assert link.wait_ready(5.0).boot_id == late.boot_id
        link.close()


def test_heartbeats_say_what_is_in_use_and_come_at_once_when_poked(make_link, server):
    leases = {11, 12}
    link = make_link(held=lambda: (leases, (13,)))
    link.start()
    link.wait_ready(5.0)
    leases.clear()
    link.poke()
    first, second = server.wait_for("heartbeat", 2)
    assert (sorted(first.leases), first.reservations, first.seen) == ([11, 12], (13,), 1)
    assert (second.leases, second.reservations, second.seen) == ((), (13,), 2)


def test_heartbeats_say_what_the_client_counts(make_link, server):
    link = make_link()
    link.show_counts(lambda: {"stored": 3})
    link.start()
    link.wait_ready(5.0)
    (first,) = server.wait_for("heartbeat", 1)
    assert first.counts == {"stored": 3}


def test_heartbeats_come_at_their_interval(make_link, server):
    link = make_link(heartbeat_s=0.05)
    link.start()
    link.wait_ready(5.0)
    started = time.monotonic()
    server.wait_for("heartbeat", 6)
    assert 0.15 < time.monotonic() - started < 5.0


def test_a_worker_hears_soon_that_the_arena_has_grown(make_link, server):
    """Ten seconds lie between two heartbeats, but not while memory is still to come."""
    beats = []

    def grow(request, peer):
        beats.append(time.monotonic())
        peer.send(HeartbeatReply(request.id, server.boot_id, 0, int(len(beats) > 5)))

    server.answers[Heartbeat] = grow
    link = make_link(WORKER)
    link.start()
    link.wait_ready(5.0)
    until(lambda: link.last_heartbeat.steps_ready == 1)
    # An arena that stands still is asked about less and less often.
    assert len(beats) == 6
    assert 0.8 < beats[5] - beats[0] < 5.0
    link.poke()
    until(lambda: len(beats) == 7)


def test_nobody_else_beats_more_often_while_the_arena_grows(make_link, server):
    """A scheduler half has no arena: a worker beats four times and the scheduler half once."""
    server.answers[Heartbeat] = lambda request, peer: peer.send(
        HeartbeatReply(request.id, server.boot_id, 0, 0)
    )
    link = make_link(SCHEDULER, held=lambda: ((11,), ()))
    link.start()
    link.wait_ready(5.0)
    other = make_link(WORKER)
    other.start()
    beats = server.wait_for("heartbeat", 5)
    assert [beat.leases for beat in beats].count((11,)) == 1


def test_what_was_granted_but_not_recorded_yet_is_spared(make_link, server):
    """The heartbeat that passes between a reply and its recording must not claim to know it."""
    held = set()
    link = make_link(held=lambda: (held, ()))
    link.start()
    session = link.wait_ready(5.0)

    def record(reply):
        link.poke()
        server.wait_for("heartbeat", 2)
        held.add(reply.lease)

    reply = session.call(lambda i: Lookup(i, b"k"), timeout_s=5.0, record=record)
    link.poke()
    _, between, after = server.wait_for("heartbeat", 3)
    assert between.leases == ()
    assert between.seen < reply.id
    assert after.leases == (reply.lease,)
    assert after.seen >= reply.id


def test_a_restart_is_noticed_at_once_and_the_new_server_found(make_link, caplog):
    """Ten seconds lie between two heartbeats; the kernel says earlier that a server ended."""
    boots = []
    with ServerDouble() as first:
        link = make_link(port=first.port, on_session=lambda session: boots.append(session.boot_id))
        link.start()
        old = link.wait_ready(5.0)
        (first_hello,) = first.seen("hello")
    assert until(lambda: link.session is None) < 0.5
    with pytest.raises(PeerClosedError):
        old.call(Ping, timeout_s=5.0)
    with ServerDouble(first.port) as second:
        started = time.monotonic()
        assert link.wait_ready(5.0).boot_id == second.boot_id
        assert time.monotonic() - started < 1.5
        assert boots == [first.boot_id, second.boot_id]
        (second_hello,) = second.seen("hello")
        assert second_hello.client_id == first_hello.client_id
        losses = len(warnings_in(caplog))
    until(lambda: len(warnings_in(caplog)) > losses > 0)
    link.close()


def test_an_outage_that_took_long_does_not_slow_the_next_one_down(make_link, server):
    server.answers[Heartbeat] = lambda _request, peer: peer.hang_up()
    link = make_link()
    link.start()
    server.wait_for("hello", 5)
    del server.answers[Heartbeat]
    link.wait_ready(5.0)
    hellos = len(server.seen("hello"))
    started = time.monotonic()
    server.run(server.peers[-1].hang_up)
    server.wait_for("hello", hellos + 1)
    assert time.monotonic() - started < 0.55


def test_two_links_of_a_process_are_two_clients(make_link, server):
    for _ in range(2):
        link = make_link()
        link.start()
        link.wait_ready(5.0)
    first, second = server.wait_for("hello", 2)
    assert first.client_id != second.client_id


def test_a_frozen_server_never_makes_the_keeper_hold_up_a_caller(make_link, server):
    link = make_link(heartbeat_s=0.02)
    link.start()
    session = link.wait_ready(5.0)
    server.freeze()
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(TimeoutExpiredError):
            session.call(lambda i: Lookup(i, b"k"), timeout_s=0.005)
    assert time.monotonic() - started < 3.0
    server.thaw()
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_a_frozen_servers_full_socket_does_not_hold_the_keeper_either(make_link, server):
    link = make_link(heartbeat_s=0.02)
    link.start()
    session = link.wait_ready(5.0)
    server.freeze()
    post = partial(session.post, lambda i: Lookup(i, bytes(30_000)), timeout_s=0.0)
    with pytest.raises(TimeoutExpiredError):
        list(iter(post, None))
    time.sleep(0.05)
    for _ in range(20):
        with pytest.raises(TimeoutExpiredError, match="takes no requests"):
            session.call(Ping, timeout_s=0.002)
    server.thaw()
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_three_silent_deadlines_hide_the_session_until_the_server_answers(link, server, caplog):
    session = link.session
    server.freeze()
    for expected in (session, session, None):
        link.note_silence()
        assert link.session is expected
    time.sleep(0.3)
    assert link.session is None
    server.thaw()
    assert until(lambda: link.session is session) < 2.0
    text = [record.getMessage().split(" address")[0] for record in caplog.records]
    assert "server does not answer, going on without it" in text


def test_an_answer_between_silences_keeps_the_session(link):
    for _ in range(6):
        link.note_silence()
        link.note_silence()
        link.note_answer()
    assert link.session is not None


def test_the_breaker_of_one_server_is_not_held_against_the_next(make_link):
    with ServerDouble() as first:
        link = make_link(port=first.port)
        link.start()
        old = link.wait_ready(5.0)
        first.freeze()
        for _ in range(3):
            link.note_silence()
    until(lambda: not old.is_open)
    with ServerDouble(first.port) as second:
        assert link.wait_ready(5.0).boot_id == second.boot_id
        assert link.session is not None
        link.close()


def test_closing_says_goodbye_and_may_be_done_twice(link, server):
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 1.0
    server.wait_for("goodbye")
    server.wait_for("lost")
    assert link.session is None
    link.close()
    link.poke()
    with pytest.raises(PeerClosedError):
        link.wait_ready(5.0)


def test_closing_is_quick_while_a_call_waits_on_a_frozen_server(link, server):
    session = link.session
    server.freeze()
    caught = []

    def wait():
        try:
            session.call(lambda i: Lookup(i, b"k"), timeout_s=60.0)
        except RetryableError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: len(session._pending) > 0)
    started = time.monotonic()
    link.close()
    thread.join(5.0)
    assert time.monotonic() - started < 1.0
    assert [type(error) for error in caught] == [PeerClosedError]
    server.thaw()


def test_closing_is_quick_while_the_keeper_is_held_up(make_link, server):
    let_go = threading.Event()
    calls = []

    def held():
        calls.append(1)
        if len(calls) == 2:
            let_go.wait(10.0)
        return (), ()

    link = make_link(held=held)
    link.start()
    session = link.wait_ready(5.0)
    link.poke()
    until(lambda: len(calls) == 2)
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 1.0
    assert not session.is_open
    let_go.set()
    server.wait_for("lost")


def test_closing_is_quick_while_the_server_is_absent_or_silent(make_link, server):
    absent = make_link(port=free_port())
    absent.start()
    server.freeze()
    silent_one = make_link()
    silent_one.start()
    for link in (absent, silent_one):
        started = time.monotonic()
        link.close()
        assert time.monotonic() - started < 1.0
    server.thaw()


def test_a_link_that_never_started_closes(make_link):
    make_link().close()


def test_a_link_may_be_closed_by_its_own_callback(make_link, server, caplog):
    links = []
    links.append(make_link(on_session=lambda _session: links[0].close()))
    links[0].start()
    server.wait_for("lost")
    until(lambda: links[0].session is None)
    assert caplog.records == []


def dials_within(server, seconds):
    time.sleep(seconds)
    return len(server.seen("locate"))


def test_a_server_that_hangs_up_after_each_welcome_is_not_stormed(make_link, server, caplog):
    server.answers[Heartbeat] = lambda _request, peer: peer.hang_up()
    make_link().start()
    # 0.05, 0.1, 0.2, 0.4 and 0.8 s lie between them, shortened by at most a quarter.
    assert 3 <= dials_within(server, 1.2) <= 7
    assert len(caplog.records) <= 2


def test_a_server_that_refuses_is_not_stormed(make_link, server, caplog):
    server.welcome = lambda hello: ErrorReply(hello.id, "mismatch", "rank 0 is taken")
    link = make_link()
    link.start()
    assert 3 <= dials_within(server, 1.2) <= 7
    assert len(caplog.records) == 1
    with pytest.raises(TimeoutExpiredError, match="rank 0 is taken"):
        link.wait_ready(0.0)


def test_a_refused_heartbeat_means_saying_hello_again(make_link, server):
    server.answers[Heartbeat] = lambda request, peer: peer.send(
        ErrorReply(request.id, "not_registered", "say hello")
    )
    link = make_link()
    link.start()
    server.wait_for("hello", 2)
    del server.answers[Heartbeat]
    link.wait_ready(5.0)


def test_a_heartbeat_from_another_boot_ends_the_session(make_link, server):
    server.answers[Heartbeat] = lambda request, peer: peer.send(
        HeartbeatReply(request.id, b"another boot id!", 0, 1)
    )
    link = make_link()
    link.start()
    server.wait_for("hello", 2)
    assert link.last_heartbeat is None


@pytest.mark.parametrize("error", [PeerClosedError("gone"), ValueError("a bug")])
def test_a_callback_that_fails_is_tried_again(make_link, server, error):
    calls = []

    def on_session(session):
        calls.append(session)
        assert link.session is None, "nobody uses a session that is not prepared"
        if len(calls) == 1:
            raise error

    link = make_link(on_session=on_session)
    link.start()
    assert link.wait_ready(5.0) is calls[1]
    assert not calls[0].is_open


def test_a_callback_that_always_fails_fills_no_log(make_link, server, caplog):
    def on_session(_session):
        raise ValueError("a bug")

    make_link(on_session=on_session).start()
    server.wait_for("hello", 4)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_callback_may_call_the_session(make_link):
    replies = []
    link = make_link(
        on_session=lambda session: replies.append(
            session.call(lambda i: Lookup(i, b"kk"), timeout_s=5.0)
        )
    )
    link.start()
    link.wait_ready(5.0)
    assert replies == [LookupReply(2, 2, 2, b"")]


def test_a_session_that_its_user_closes_is_replaced(link, server):
    old = link.session
    old.close()
    server.wait_for("hello", 2)
    until(lambda: link.session is not None)
    assert link.session is not old


def test_a_silent_heartbeat_is_not_repeated_before_its_answer(make_link, server):
    server.answers[Heartbeat] = silent
    link = make_link(heartbeat_s=0.02)
    link.start()
    server.wait_for("heartbeat")
    time.sleep(0.2)
    assert len(server.seen("heartbeat")) == 1
    assert link.session is not None


class CountingClock(SystemClock):
    looks = 0

    def monotonic_s(self):
        self.looks += 1
        return super().monotonic_s()


def test_a_poked_keeper_comes_to_rest(server):
    """It looks at the clock in every turn; a descriptor left unread would make it spin."""
    clock = CountingClock()
    link = Link(ClientOptions(host="127.0.0.1", port=server.port), SCHEDULER, clock=clock)
    link.start()
    link.wait_ready(5.0)
    for count in range(2, 5):
        link.poke()
        server.wait_for("heartbeat", count)
    time.sleep(0.1)
    looks = clock.looks
    time.sleep(0.2)
    assert clock.looks - looks < 10
    link.close()


def test_a_link_that_nobody_prepares_sessions_for_unmaps_their_arenas(make_link, server):
    link = make_link(WORKER)
    link.start()
    arena = link.wait_ready(5.0).arena
    assert arena.view[:1] == b"\0"
    link.close()
    assert arena.is_closed


def test_an_arena_belongs_to_the_callback_that_was_given_it(make_link, server):
    sessions = []
    link = make_link(WORKER, on_session=sessions.append)
    link.start()
    link.wait_ready(5.0)
    link.close()
    server.wait_for("lost")
    (session,) = sessions
    assert not session.arena.is_closed
    session.arena.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_session_and_does_the_parent_no_harm(link):
    session = link.session
    is_locked, let_go = threading.Event(), threading.Event()

    def be_busy():
        with link._changed:
            is_locked.set()
            let_go.wait(10.0)

    busy = threading.Thread(target=be_busy)
    busy.start()
    assert is_locked.wait(5.0)
    pid = os.fork()
    if pid == 0:
        # Locks that another thread held are held for ever here.
        signal.alarm(5)
        outcome = link.session is not None
        link.poke()
        try:
            link.wait_ready(1.0)
        except PeerClosedError:
            outcome += 10
        link.close()
        os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    let_go.set()
    busy.join()
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)
    assert link.session is session


PROGRAM = """
import sys
from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
link = Link(ClientOptions(host="127.0.0.1", port=sys.argv[1]), Identity("scheduler", "i", "s"),
            clock=SystemClock())
link.start()
if sys.argv[2] == "connected":
    link.wait_ready(5.0)
"""


@pytest.mark.parametrize("state", ["connected", "away"])
def test_a_program_that_forgets_to_close_its_link_ends_in_order(server, state):
    port = server.port if state == "connected" else free_port()
    program = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(port), state],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (program.returncode, program.stdout) == (0, b"")
    assert b"Traceback" not in program.stderr
    if state == "connected":
        server.wait_for("goodbye")


def test_outages_leave_no_descriptors_and_no_threads(make_link, server):
    link = make_link(WORKER)
    link.start()
    link.wait_ready(5.0)
    server.settle()
    before, threads = open_fds(), threading.active_count()
    for count in range(2, 8):
        server.run(server.peers[-1].hang_up)
        server.wait_for("heartbeat", count)
        link.wait_ready(5.0)
    until(lambda: open_fds() == before)
    assert threading.active_count() == threads
    link.close()
    server.settle()
    assert len(open_fds()) < len(before)


def test_a_closed_link_leaves_no_descriptor(server):
    server.settle()
    before = open_fds()
    options = ClientOptions(host="127.0.0.1", port=server.port)
    for count in range(1, 4):
        link = Link(options, SCHEDULER, clock=SystemClock())
        link.start()
        link.wait_ready(5.0)
        link.close()
        server.wait_for("lost", count)
    until(lambda: open_fds() == before)


def test_a_half_closed_connection_counts_as_ended(link, server):
    (peer,) = server.wait_for("peer")
    server.run(lambda: peer.transport.get_extra_info("socket").shutdown(socket.SHUT_WR))
    server.wait_for("hello", 2)
