"""Dial and listen, and what the operating system's refusals become."""

import socket
import uuid

import pytest
from tests.transport.open_files import open_fds

from kvcellar.errors import ConfigError, PeerClosedError
from kvcellar.transport.address import TcpAddress
from kvcellar.transport.sockets import dial_tcp, dial_unix, listen_tcp, listen_unix


@pytest.fixture
def abstract():
    return f"@kvcellar-test/{uuid.uuid4().hex}"


@pytest.fixture(params=["path", "abstract"])
def address(request, tmp_path, abstract):
    return str(tmp_path / "5555.sock") if request.param == "path" else abstract


def exchanged(listener, connection):
    """Return whether a byte gets from a dialled connection to its listener."""
    listener.setblocking(True)
    peer, _ = listener.accept()
    with peer, connection:
        connection.sendall(b"x")
        return peer.recv(1) == b"x"


def test_a_dialled_unix_socket_reaches_its_listener(address):
    with listen_unix(address) as listener:
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        connection = dial_unix(address, timeout_s=1.0)
        assert connection.gettimeout() is None
        assert exchanged(listener, connection)


def test_an_abstract_address_leaves_nothing_behind(abstract):
    listen_unix(abstract).close()
    with pytest.raises(PeerClosedError, match=abstract):
        dial_unix(abstract, timeout_s=1.0)
    listen_unix(abstract).close()


def test_a_dead_owners_path_is_taken_over(tmp_path):
    path = str(tmp_path / "s")
    listen_unix(path).close()
    with pytest.raises(PeerClosedError, match="refused"):
        dial_unix(path, timeout_s=1.0)
    with listen_unix(path) as listener:
        assert exchanged(listener, dial_unix(path, timeout_s=1.0))


def test_a_living_owners_address_is_left_to_it(address):
    with listen_unix(address) as listener:
        with pytest.raises(ConfigError, match=r"another server answers|is taken"):
            listen_unix(address)
        if not address.startswith("@"):
            # The newcomer's question whether anybody answers is still in the queue.
            listener.accept()[0].close()
        assert exchanged(listener, dial_unix(address, timeout_s=1.0))


def test_a_file_in_the_way_is_not_removed(tmp_path):
    path = tmp_path / "precious"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        listen_unix(str(path))
    assert path.read_text() == "mine"


def test_a_missing_folder_is_named(tmp_path):
    path = str(tmp_path / "absent" / "s")
    with pytest.raises(ConfigError, match="absent"):
        listen_unix(path)
    with pytest.raises(PeerClosedError, match="absent"):
        dial_unix(path, timeout_s=1.0)


@pytest.mark.parametrize("address", ["", "@", "/" + "x" * 107, "@" + "x" * 107, "a\0b"])
def test_an_impossible_unix_address_names_the_folder_flag(address):
    with pytest.raises(ConfigError, match="--socket-dir"):
        dial_unix(address, timeout_s=1.0)
    with pytest.raises(ConfigError, match="--socket-dir"):
        listen_unix(address)


def test_the_longest_unix_address_works():
    address = "@" + uuid.uuid4().hex.ljust(106, "x")
    with listen_unix(address) as listener:
        assert exchanged(listener, dial_unix(address, timeout_s=1.0))


def test_a_full_queue_is_a_peer_that_is_not_there(abstract):
    """A frozen server accepts nobody; the dialler must not wait for it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + abstract[1:])
        listener.listen(0)
        with dial_unix(abstract, timeout_s=1.0), pytest.raises(PeerClosedError):
            dial_unix(abstract, timeout_s=1.0)


def test_a_frozen_owners_path_is_left_to_it(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with dial_unix(path, timeout_s=1.0) as waiting:
            with pytest.raises(ConfigError, match="another server"):
                listen_unix(path)
            assert exchanged(listener, waiting)


@pytest.fixture
def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def families(listeners):
    return {listener.family for listener in listeners}


@pytest.mark.parametrize("host", ["localhost", "::"])
def test_both_families_are_listened_on(host, has_ipv6):
    port = free_port()
    listeners = listen_tcp(TcpAddress(host, port))
    try:
        wanted = {socket.AF_INET, socket.AF_INET6} if has_ipv6 else {socket.AF_INET}
        assert families(listeners) == wanted
        assert [listener.getsockname()[1] for listener in listeners] == [port] * len(wanted)
        for listener in listeners:
            host_name = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
            assert exchanged(listener, dial_tcp(TcpAddress(host_name, port), timeout_s=1.0))
    finally:
        for listener in listeners:
            listener.close()


def test_localhost_is_found_on_whichever_family_answers(has_ipv6):
    hosts = ["127.0.0.1", "::1"] if has_ipv6 else ["127.0.0.1"]
    for host in hosts:
        (listener,) = listen_tcp(TcpAddress(host, 0))
        with listener:
            port = listener.getsockname()[1]
            assert exchanged(listener, dial_tcp(TcpAddress("localhost", port), timeout_s=1.0))


def test_a_taken_port_is_named_and_nothing_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        before = open_fds()
        for host in ("localhost", "127.0.0.1", "::"):
            with pytest.raises(ConfigError, match=f"port {port} on {host} is taken"):
                listen_tcp(TcpAddress(host, port))
        assert open_fds() == before


def test_a_restarted_server_gets_its_port_back_at_once():
    """Connections of the life before linger in TIME_WAIT on that port."""
    (listener,) = listen_tcp(TcpAddress("127.0.0.1", 0))
    port = listener.getsockname()[1]
    connection = dial_tcp(TcpAddress("127.0.0.1", port), timeout_s=1.0)
    listener.setblocking(True)
    peer, _ = listener.accept()
    peer.close()
    connection.close()
    listener.close()
    for again in listen_tcp(TcpAddress("127.0.0.1", port)):
        again.close()


def test_a_host_of_another_machine_cannot_be_listened_on():
    with pytest.raises(ConfigError, match="--host of this machine"):
        listen_tcp(TcpAddress("192.0.2.1", 5555))


def test_nobody_at_the_address_is_said_with_the_address():
    port = free_port()
    with pytest.raises(PeerClosedError, match=f"tcp://localhost:{port}.*refused"):
        dial_tcp(TcpAddress("localhost", port), timeout_s=1.0)


def test_a_name_that_does_not_resolve_is_said():
    with pytest.raises(PeerClosedError, match="cannot resolve"):
        dial_tcp(TcpAddress("nowhere.invalid", 5555), timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        listen_tcp(TcpAddress("nowhere.invalid", 5555))
