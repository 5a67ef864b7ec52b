"""The kernel names the peer."""

import os
import socket
import subprocess
import sys
import uuid

from kvcellar.transport.credentials import Credentials, peer_credentials
from kvcellar.transport.sockets import listen_unix

DIAL = """
import socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect("\\0" + sys.argv[1])
    s.recv(1)
"""


def test_a_socketpair_names_this_process():
    left, right = socket.socketpair()
    with left, right:
        assert peer_credentials(left) == Credentials(os.getpid(), os.getuid(), os.getgid())


def test_the_process_that_connected_is_named():
    name = f"kvcellar-test/{uuid.uuid4().hex}"
    with listen_unix("@" + name) as listener:
        listener.setblocking(True)
        child = subprocess.Popen([sys.executable, "-c", DIAL, name])
        connection, _ = listener.accept()
        with connection:
            assert peer_credentials(connection).pid == child.pid
        assert child.wait() == 0
