"""Process descriptors say whose they are and when that process ends."""

import os
import signal
import subprocess
import sys

import pytest

from kvcellar.transport.pidfd import has_ended, is_pidfd, open_own_pidfd, open_pidfd, pidfd_pid


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield child
    child.kill()
    child.wait()


def test_the_own_pidfd_is_of_this_process_and_closed_on_exec():
    fd = open_own_pidfd()
    assert fd is not None
    try:
        assert pidfd_pid(fd) == os.getpid()
        assert not os.get_inheritable(fd)
        assert not has_ended(fd)
    finally:
        os.close(fd)


def test_an_end_by_signal_is_seen_at_once(sleeper):
    fd = open_pidfd(sleeper.pid)
    try:
        assert pidfd_pid(fd) == sleeper.pid
        assert not has_ended(fd)
        sleeper.send_signal(signal.SIGKILL)
        assert has_ended(fd, timeout_s=5.0)
        sleeper.wait()
        assert is_pidfd(fd)
        assert pidfd_pid(fd) == -1
    finally:
        os.close(fd)


def test_a_pid_that_nobody_has_gives_none(sleeper):
    sleeper.kill()
    sleeper.wait()
    assert open_pidfd(sleeper.pid) is None


def test_other_descriptors_are_no_pidfds(tmp_path):
    memfd = os.memfd_create("kvcellar-test")
    fds = [memfd, *os.pipe(), os.open(tmp_path, os.O_RDONLY), os.eventfd(0)]
    try:
        assert [is_pidfd(fd) for fd in fds] == [False] * len(fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert not is_pidfd(memfd)
