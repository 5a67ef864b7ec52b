"""Requests and replies on one connection, whatever the other side does."""

import os
import socket
import threading
import time
from functools import partial

import pytest
from tests.client.double import silent
from tests.transport.open_files import open_fds

from kvcellar.client.session import PENDING_MAX, Session
from kvcellar.clock import SystemClock
from kvcellar.errors import (
    LimitError,
    NotRegisteredError,
    PeerClosedError,
    TimeoutExpiredError,
)
from kvcellar.protocol.frames import decode_request, encode
from kvcellar.protocol.limits import FRAME_MAX_BYTES
from kvcellar.protocol.messages import (
    ErrorReply,
    Lookup,
    LookupReply,
    Ok,
    Ping,
    Pong,
    Release,
    Status,
    Welcome,
)
from kvcellar.transport.deadline import Deadline
from kvcellar.transport.descriptors import recv_frame_with_fds


def lookup(size_bytes):
    return lambda request_id: Lookup(request_id, bytes(size_bytes))


def recv_frame(sock):
    return recv_frame_with_fds(sock, deadline=Deadline(SystemClock(), 20.0))[0]


def in_thread(function, *args, **kwargs):
    """Run a function on another thread; its result or error is given by the returned function."""
    outcome = []

    def go():
        try:
            outcome.append((function(*args, **kwargs), None))
        except BaseException as error:  # noqa: BLE001 - handed to the test.
            outcome.append((None, error))

    thread = threading.Thread(target=go)
    thread.start()

    def result():
        thread.join(10.0)
        assert outcome, "the thread still runs"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


def test_a_call_returns_its_reply(session, server):
    assert session.call(lookup(64), timeout_s=5.0) == LookupReply(2, 64, 2, b"")
    assert session.call(Ping, timeout_s=5.0) == Pong(3, server.boot_id)


def test_threads_get_their_own_replies(session):
    def many(size_bytes):
        return {session.call(lookup(size_bytes), timeout_s=5.0).count for _ in range(100)}

    results = [in_thread(many, size) for size in range(1, 7)]
    assert [result() for result in results] == [{size} for size in range(1, 7)]


def test_posted_requests_are_collected_in_any_order(session):
    first, second = session.post(lookup(1)), session.post(lookup(2))
    assert session.call(lookup(3), timeout_s=5.0).count == 3
    assert session.collect(second, timeout_s=5.0).count == 2
    assert session.collect(first, timeout_s=0.0).count == 1


def test_a_reply_that_is_not_there_yet_is_none_and_comes_later(session, server):
    server.answers[Lookup] = silent
    posted = session.post(lookup(1))
    assert session.collect(posted, timeout_s=0.0) is None
    assert session.collect(posted, timeout_s=0.02) is None
    server.say(LookupReply(posted, 7, 1, b""))
    assert session.collect(posted, timeout_s=5.0).count == 7


def test_a_reply_is_given_once(session):
    posted = session.post(Ping)
    session.collect(posted, timeout_s=5.0)
    with pytest.raises(AssertionError, match="no reply to collect"):
        session.collect(posted, timeout_s=0.0)


def test_a_silent_server_costs_the_deadline_and_no_more(session, server):
    server.answers[Lookup] = silent
    started = time.monotonic()
    with pytest.raises(TimeoutExpiredError, match=r"0\.05 s"):
        session.call(lookup(1), timeout_s=0.05)
    assert 0.05 <= time.monotonic() - started < 1.0
    assert session.is_open


def test_no_call_waits_longer_than_the_options_allow(connect, server):
    server.answers[Lookup] = silent
    session = connect(timeout_s=0.05)
    started = time.monotonic()
    with pytest.raises(TimeoutExpiredError):
        session.call(lookup(1), timeout_s=300.0)
    posted = session.post(lookup(1))
    assert session.collect(posted, timeout_s=300.0) is None
    assert time.monotonic() - started < 5.0


def test_a_late_reply_is_never_taken_for_another(session, server):
    server.answers[Lookup] = silent
    with pytest.raises(TimeoutExpiredError):
        session.call(lookup(1), timeout_s=0.01)
    server.say(LookupReply(2, 99, 99, b""))
    del server.answers[Lookup]
    assert session.call(lookup(5), timeout_s=5.0).count == 5
    assert session.seen() == 3


def test_a_late_reply_goes_to_whom_it_concerns_who_may_send(session, server):
    server.answers[Lookup] = silent
    posted = session.post(lookup(1))
    assert session.collect(posted, timeout_s=0.0) is None
    session.forget(posted, lambda reply: session.post(lambda i: Release(i, leases=(reply.lease,))))
    server.say(LookupReply(posted, 1, 4711, b""))
    session.call(Ping, timeout_s=5.0)
    (release,) = server.wait_for("release")
    assert release.leases == (4711,)


def test_a_reply_that_is_forgotten_after_it_came_is_handed_over_at_once(session):
    posted = session.post(lookup(3))
    session.call(Ping, timeout_s=5.0)
    late = []
    session.forget(posted, late.append)
    assert [reply.count for reply in late] == [3]
    assert session.seen() == 3


def test_a_late_reply_that_cannot_be_returned_disturbs_nobody(session, server):
    server.answers[Lookup] = silent

    def give_up(_reply):
        raise PeerClosedError("gone")

    posted = session.post(lookup(1))
    session.forget(posted, give_up)
    server.say(LookupReply(posted, 1, 1, b""))
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_handing_back_at_once_may_fail_too(session):
    posted = session.post(lookup(3))
    session.call(Ping, timeout_s=5.0)

    def give_up(_reply):
        raise PeerClosedError("gone")

    session.forget(posted, give_up)
    assert session.seen() == 3


def test_a_refusal_is_raised_as_its_class(session, server):
    server.answers[Lookup] = lambda request, peer: peer.send(
        ErrorReply(request.id, "not_registered", "say hello")
    )
    with pytest.raises(NotRegisteredError, match="say hello"):
        session.call(lookup(1), timeout_s=5.0)
    posted = session.post(lookup(1))
    with pytest.raises(NotRegisteredError, match="say hello"):
        session.collect(posted, timeout_s=5.0)
    assert session.seen() == 3
    assert session.is_open


def test_a_caller_waits_for_another_threads_call_only_as_long_as_it_wants(session, server):
    server.answers[Lookup] = silent
    slow = in_thread(session.call, lookup(1), timeout_s=60.0)
    server.wait_for("lookup")
    started = time.monotonic()
    with pytest.raises(TimeoutExpiredError):
        session.call(Ping, timeout_s=0.05)
    with pytest.raises(TimeoutExpiredError):
        session.post(Ping)
    assert time.monotonic() - started < 5.0
    server.say(LookupReply(2, 7, 1, b""))
    assert slow().count == 7
    assert server.seen("ping") == []


def test_a_reply_that_another_thread_read_is_found(session, server):
    server.answers[Lookup] = silent
    posted = session.post(lookup(1))
    hanging = in_thread(session.call, lookup(2), timeout_s=30.0)
    server.wait_for("lookup", 2)
    collecting = in_thread(session.collect, posted, timeout_s=0.6)
    server.say(LookupReply(posted, 8, 1, b""))
    assert collecting().count == 8
    server.say(LookupReply(posted + 1, 9, 1, b""))
    assert hanging().count == 9


@pytest.mark.parametrize("parting", [b"", b"\x05", b"\xff\x00\x00\x00half"])
def test_a_server_that_ends_mid_frame_is_noticed_at_once(session, server, parting):
    def end(_request, peer):
        peer.send_raw(parting)
        peer.hang_up()

    server.answers[Lookup] = end
    started = time.monotonic()
    with pytest.raises(PeerClosedError, match="closed it, or ended"):
        session.call(lookup(1), timeout_s=5.0)
    assert time.monotonic() - started < 1.0
    assert not session.is_open
    with pytest.raises(PeerClosedError):
        session.call(Ping, timeout_s=5.0)
    with pytest.raises(PeerClosedError):
        session.post(Ping)


LIES = {
    "unasked": encode(Pong(999, b"x" * 16)),
    "twice": encode(Ok(2)) * 2,
    "not msgpack": b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1",
    "a request": encode(Ping(2)),
    "too large": (FRAME_MAX_BYTES + 1).to_bytes(4, "little"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lying_server_costs_the_connection(session, server, lie):
    server.answers[Status] = lambda _request, peer: peer.send_raw(lie)
    posted = session.post(Status)
    with pytest.raises(PeerClosedError, match="what is no reply"):
        session.call(Ping, timeout_s=5.0)
    assert not session.is_open
    assert posted == 2


def test_what_a_server_says_before_it_hangs_up_is_passed_on(session, server):
    def refuse(_request, peer):
        peer.send(ErrorReply(0, "malformed", "that was no message"))
        peer.hang_up()

    server.answers[Ping] = refuse
    with pytest.raises(PeerClosedError, match="that was no message"):
        session.call(Ping, timeout_s=5.0)


def test_a_reply_that_came_before_the_end_is_still_given(session, server):
    def answer_and_end(request, peer):
        peer.send(Pong(request.id, server.boot_id))
        peer.hang_up()

    server.answers[Ping] = answer_and_end
    posted = session.post(Ping)
    server.wait_for("lost")
    server.settle()
    session.drain()
    assert not session.is_open
    assert session.collect(posted, timeout_s=0.0) == Pong(posted, server.boot_id)


def test_large_requests_and_replies_pass_each_other(session, server):
    """Each side's socket is full while it writes; whoever only wrote would wait for ever."""
    size = 4_000_000
    server.answers[Lookup] = lambda request, peer: peer.send(
        LookupReply(request.id, 1, 1, bytes(size))
    )
    posted = [session.post(lookup(size), timeout_s=20.0) for _ in range(4)]
    assert [len(session.collect(i, timeout_s=20.0).refs) for i in posted] == [size] * 4


def test_a_server_that_writes_before_it_reads_on_is_read_meanwhile(server):
    """Both sides' sockets are full then, and one of them has to give way."""
    ours, theirs = socket.socketpair()
    size = 4_000_000

    def serve():
        for request in (decode_request(recv_frame(theirs)) for _ in range(2)):
            theirs.sendall(encode(LookupReply(request.id, 1, 1, bytes(size))))

    serving = in_thread(serve)
    welcome = Welcome(1, 1, bytes(16), "node", 256, "exact", 0, 0)
    with (
        theirs,
        Session(ours, welcome, arena=None, clock=SystemClock(), timeout_max_s=20.0) as session,
    ):
        first = session.post(lookup(1))
        assert len(session.call(lookup(size), timeout_s=20.0).refs) == size
        assert len(session.collect(first, timeout_s=0.0).refs) == size
        serving()


def test_an_oversized_request_is_refused_and_nothing_is_sent(session):
    with pytest.raises(LimitError):
        session.call(lookup(FRAME_MAX_BYTES), timeout_s=5.0)
    assert session.call(lookup(5), timeout_s=5.0) == LookupReply(2, 5, 2, b"")


def test_a_frozen_servers_full_socket_blocks_nobody_and_breaks_no_frame(session, server):
    server.freeze()
    posted = []
    started = time.monotonic()
    post = partial(session.post, lookup(30_000), timeout_s=0.0)
    with pytest.raises(TimeoutExpiredError, match="takes no requests"):
        posted.extend(iter(post, None))
    with pytest.raises(TimeoutExpiredError):
        session.call(Ping, timeout_s=0.01)
    assert time.monotonic() - started < 2.0
    server.thaw()
    assert [session.collect(i, timeout_s=5.0).count for i in posted] == [30_000] * len(posted)
    ping = session.call(Ping, timeout_s=5.0)
    assert len(server.seen("lookup")) == len(posted)
    assert session.seen() == ping.id, "what was never sent is not waited for"


def test_unanswered_requests_are_bounded(session, server):
    server.answers[Ping] = silent
    for _ in range(PENDING_MAX):
        session.forget(session.post(Ping, timeout_s=5.0))
    with pytest.raises(TimeoutExpiredError, match=str(PENDING_MAX)):
        session.post(Ping)


def test_replies_that_nobody_reads_do_not_add_up(session, server):
    """A worker half only tells; it may ask nothing for a long time."""
    for count in range(1, PENDING_MAX + 100):
        session.forget(session.post(Ping, timeout_s=5.0))
        if count % 100 == 0:
            # The socket never fills, which would make the session read by the way.
            server.wait_for("ping", count)
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_seen_stops_before_the_first_reply_that_is_out(session):
    assert session.seen() == 1
    first = session.post(Ping)
    session.call(Ping, timeout_s=5.0)
    assert session.seen() == first - 1
    session.collect(first, timeout_s=5.0)
    assert session.seen() == 3


def test_a_forgotten_reply_counts_as_seen_only_when_it_came(session, server):
    server.answers[Lookup] = silent
    posted = session.post(lookup(1))
    session.forget(posted)
    session.call(Ping, timeout_s=5.0)
    assert session.seen() == posted - 1
    server.say(LookupReply(posted, 1, 1, b""))
    session.call(Ping, timeout_s=5.0)
    assert session.seen() == 4


@pytest.mark.parametrize("way", ["call", "collect"])
def test_a_reply_is_recorded_before_it_counts_as_seen(session, way):
    """Else a heartbeat between the two would give the lease back that was just granted."""
    seen_meanwhile = []

    def record(_reply):
        seen_meanwhile.append(session.seen())

    if way == "call":
        session.call(lookup(1), timeout_s=5.0, record=record)
    else:
        session.collect(session.post(lookup(1)), timeout_s=5.0, record=record)
    assert seen_meanwhile == [1]
    assert session.seen() == 2


def test_closing_wakes_the_thread_that_waits(session, server):
    server.answers[Lookup] = silent
    waiting = in_thread(session.call, lookup(1), timeout_s=60.0)
    server.wait_for("lookup")
    started = time.monotonic()
    session.close()
    with pytest.raises(PeerClosedError, match="on this side"):
        waiting()
    assert time.monotonic() - started < 0.5
    assert session.fileno() == -1
    session.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_neither_use_nor_end_the_parents_session(session):
    pid = os.fork()
    if pid == 0:
        failures = 0
        for use in (lambda: session.call(Ping, timeout_s=1.0), lambda: session.post(Ping)):
            try:
                use()
            except PeerClosedError as error:
                failures += "fork" in str(error)
        session.close()
        os._exit(10 * failures + session.is_open)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 20
    assert isinstance(session.call(Ping, timeout_s=5.0), Pong)


def test_sessions_leave_no_descriptors(connect, server):
    connect().close()
    server.wait_for("lost")
    server.settle()
    before = open_fds()
    for _ in range(10):
        with connect() as session:
            session.call(Ping, timeout_s=5.0)
    server.wait_for("lost", 11)
    server.settle()
    assert open_fds() == before
