"""Descriptors arrive with their frame, and never outlive an error."""

import fcntl
import os
import socket
import threading

import pytest
from tests.transport.open_files import open_fds

from kvcellar.clock import FakeClock, SystemClock
from kvcellar.errors import LimitError, MalformedError, PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.limits import FRAME_MAX_BYTES
from kvcellar.transport.deadline import Deadline
from kvcellar.transport.descriptors import (
    FDS_MAX,
    recv_fds,
    recv_frame_with_fds,
    send_with_fds,
)


def frame(body):
    return len(body).to_bytes(4, "little") + body


def soon(seconds=5.0):
    return Deadline(SystemClock(), seconds)


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


@pytest.fixture
def memfd():
    fd = os.memfd_create("kvcellar-test")
    yield fd
    os.close(fd)


def test_a_frame_and_its_descriptor_arrive(pair, memfd):
    left, right = pair
    os.write(memfd, b"arena")
    send_with_fds(left, frame(b"welcome"), [memfd])
    body, fds = recv_frame_with_fds(right, deadline=soon())
    assert body == b"welcome"
    (received,) = fds
    assert received != memfd
    assert os.pread(received, 5, 0) == b"arena"
    assert fcntl.fcntl(received, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(received)


def test_descriptors_keep_their_order(pair, memfd):
    left, right = pair
    fds = [os.memfd_create(f"kvcellar-test-{index}") for index in range(FDS_MAX)]
    for index, fd in enumerate(fds):
        os.write(fd, bytes([index]))
    send_with_fds(left, frame(b"x"), fds)
    _, received = recv_frame_with_fds(right, deadline=soon())
    assert [os.pread(fd, 1, 0) for fd in received] == [bytes([i]) for i in range(FDS_MAX)]
    for fd in fds + received:
        os.close(fd)


def test_not_a_byte_beyond_the_frame_is_read(pair):
    left, right = pair
    left.sendall(frame(b"one") + frame(b"") + frame(b"three"))
    assert recv_frame_with_fds(right, deadline=soon()) == (b"one", [])
    assert recv_frame_with_fds(right, deadline=soon()) == (b"", [])
    assert recv_frame_with_fds(right, deadline=soon()) == (b"three", [])


def test_a_frame_larger_than_the_sockets_buffer_arrives(pair, memfd):
    left, right = pair
    # A socket with a timeout takes what fits and leaves the rest to the caller.
    left.settimeout(30.0)
    body = os.urandom(3_000_000)
    sender = threading.Thread(target=send_with_fds, args=(left, frame(body), [memfd]))
    sender.start()
    received, fds = recv_frame_with_fds(right, deadline=soon(30.0))
    sender.join()
    assert received == body
    (fd,) = fds
    os.close(fd)


@pytest.mark.parametrize("sent", [b"", b"\x05", frame(b"hello")[:6]])
def test_a_frame_that_never_ends_times_out_and_closes_what_came(pair, memfd, sent):
    left, right = pair
    if sent:
        send_with_fds(left, sent, [memfd])
    before = open_fds()
    with pytest.raises(TimeoutExpiredError):
        recv_frame_with_fds(right, deadline=soon(0.02))
    assert open_fds() == before


@pytest.mark.parametrize("sent", [b"\x05", frame(b"hello")[:6]])
def test_a_peer_that_closes_mid_frame_leaves_no_descriptor(pair, memfd, sent):
    left, right = pair
    send_with_fds(left, sent, [memfd])
    left.close()
    before = open_fds()
    with pytest.raises(PeerClosedError):
        recv_frame_with_fds(right, deadline=soon())
    assert open_fds() == before


def test_a_frame_that_announces_too_much_leaves_no_descriptor(pair, memfd):
    left, right = pair
    send_with_fds(left, (FRAME_MAX_BYTES + 1).to_bytes(4, "little"), [memfd])
    before = open_fds()
    with pytest.raises(LimitError, match=str(FRAME_MAX_BYTES)):
        recv_frame_with_fds(right, deadline=soon())
    assert open_fds() == before


@pytest.mark.parametrize("count", [FDS_MAX + 1, 100])
def test_a_flood_of_descriptors_is_refused_and_closed(pair, memfd, count):
    left, right = pair
    send_with_fds(left, frame(b"x"), [memfd] * count)
    before = open_fds()
    with pytest.raises(MalformedError, match=str(FDS_MAX)):
        recv_frame_with_fds(right, deadline=soon())
    assert open_fds() == before


def test_descriptors_trickling_in_with_every_byte_are_bounded(pair, memfd):
    left, right = pair
    for byte in frame(b"0123456789"):
        send_with_fds(left, bytes([byte]), [memfd])
    before = open_fds()
    with pytest.raises(MalformedError, match=str(FDS_MAX)):
        recv_frame_with_fds(right, deadline=soon())
    assert open_fds() == before


def test_the_deadline_is_one_for_the_whole_frame(pair):
    """A peer that sends a byte now and then cannot stretch the wait."""
    left, right = pair
    clock = FakeClock()
    deadline = Deadline(clock, 10.0)
    left.sendall(frame(b"hello")[:6])
    clock.advance(11.0)
    with pytest.raises(TimeoutExpiredError):
        recv_frame_with_fds(right, deadline=deadline)


def test_sending_to_a_closed_peer_is_a_closed_peer_and_no_signal(pair, memfd):
    left, right = pair
    right.close()
    with pytest.raises(PeerClosedError):
        send_with_fds(left, b"x", [memfd])


def test_the_raw_piece_for_event_loops_says_when_nothing_is_there(pair, memfd):
    left, right = pair
    right.setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_fds(right, 4096)
    send_with_fds(left, b"hello", [memfd])
    data, fds = recv_fds(right, 4096)
    assert (data, len(fds)) == (b"hello", 1)
    os.close(fds[0])
    left.close()
    assert recv_fds(right, 4096) == (b"", [])
