"""A server double for each test, and connections to it that are closed at its end."""

import os

import pytest
from tests.client.double import ServerDouble

from kvcellar.client.handshake import open_session
from kvcellar.client.link import Link
from kvcellar.client.options import ClientOptions, Identity
from kvcellar.clock import SystemClock
from kvcellar.layout.shard import PageRegion, ShardLayout
from kvcellar.protocol.messages import Role

LAYOUT = ShardLayout(0, 16, (PageRegion("layer.0", 4096),), "test")
SCHEDULER = Identity(Role.SCHEDULER, "instance", "test")
WORKER = Identity(Role.WORKER, "instance", "test", layouts=(LAYOUT,))


@pytest.fixture
def server():
    with ServerDouble() as double:
        yield double


@pytest.fixture
def connect(server):
    """Return a function that opens a session to the double."""
    sessions = []

    def open_one(identity=SCHEDULER, **options):
        session = open_session(
            ClientOptions(host="127.0.0.1", port=server.port, **options),
            identity,
            client_id=os.urandom(16),
            clock=SystemClock(),
        )
        sessions.append(session)
        return session

    yield open_one
    for session in sessions:
        session.close()
        if session.arena is not None:
            session.arena.close()


@pytest.fixture
def session(connect):
    return connect()


@pytest.fixture
def make_link(server):
    """Return a function that makes a link to the double's port; it is not started."""
    links = []

    def make(identity=SCHEDULER, *, port=None, heartbeat_s=10.0, **parts):
        link = Link(
            ClientOptions(
                host="127.0.0.1", port=port or server.port, heartbeat_s=heartbeat_s,
                connect_timeout_s=1.0,
            ),
            identity,
            clock=SystemClock(),
            **parts,
        )  # fmt: skip
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()
