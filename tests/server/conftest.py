"""One server for the tests of a module that leave it as they found it."""

import pytest
from tests.server.running import WAIT_S, RunningServer

from kvcellar.protocol.messages import Clear


@pytest.fixture(autouse=True)
def everybody_leaves(request):
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.leave()
        with server.tool() as session:
            session.call(Clear, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running
        assert running.process.poll() is None, running.log()
        assert "Traceback" not in running.log()
        assert "internal error" not in running.log()
