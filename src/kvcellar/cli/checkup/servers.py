"""The servers of this host: who has the ports, whether one that runs is healthy, what it refused.

Asked as an engine would ask, so that what stands in an engine's way (another program on the port,
a socket that cannot be reached, a server that is frozen) is seen here. Used by `kvcellar doctor`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcellar import __version__
from kvcellar.cli.asking import Asking, connect
from kvcellar.cli.checkup.findings import Finding, note, ok, problem
from kvcellar.client.web import ask
from kvcellar.errors import KVCellarError, PeerClosedError, TimeoutExpiredError
from kvcellar.protocol.messages import Status, StatusReply
from kvcellar.transport.holders import Holder, port_holder

__all__ = ["examine_servers"]

_SOCKET = re.compile(r"@kvcellar/(\d+)/([0-9a-f]+)")
_HTTP_TIMEOUT_S = 2.0


def examine_servers(
    asking: Asking, http_port: int, proc: Path = Path("/proc")
) -> Iterator[Finding]:
    """Yield what was found.

    Args:
        asking: where a server is, or is to be.
        http_port: its `--http-port`.
        proc: of this host.
    """
    yield _sockets(proc)
    holder = port_holder(int(asking.port), proc)
    try:
        with connect(asking) as session:
            reply = session.call(Status, timeout_s=asking.timeout_s)
    except KVCellarError as error:
        yield from _not_there(asking, holder, error)
        yield _free_http(http_port, proc)
        return
    assert isinstance(reply, StatusReply), reply
    yield ok(f"port {asking.port}", f"kvcellar's{_who(holder)}")
    yield from _health(reply.status)
    yield _http(asking, http_port, proc)


def _sockets(proc: Path) -> Finding:
    try:
        text = (proc / "net" / "unix").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return note("sockets", "cannot be seen here")
    servers = sorted({f"port {port} (boot {boot})" for port, boot in _SOCKET.findall(text)})
    shown = ", ".join(servers) or "no server with an abstract socket"
    return ok("sockets", f"{shown} in this network namespace")


def _not_there(asking: Asking, holder: Holder | None, error: KVCellarError) -> Iterator[Finding]:
    name = f"port {asking.port}"
    if isinstance(error, TimeoutExpiredError):
        yield problem(
            name, f"taken{_who(holder)}, which does not answer: {error}", _stop(holder, "--port")
        )
    elif holder is not None:
        yield problem(name, f"taken{_who(holder)}: {error}", _stop(holder, "--port"))
    elif isinstance(error, PeerClosedError):
        yield note(
            name,
            "free: no server runs there",
            "kvcellar server --l1-size-gb 20 --eviction-policy LRU",
        )
    else:
        yield problem(name, str(error), "see the message")


# Any: the page's shape is documented in `telemetry.status`.
def _health(page: dict[str, Any]) -> Iterator[Finding]:
    own = page["kvcellar"]
    broken = [f"{name}: {reason}" for name, reason in own["parts"].items() if reason]
    if broken:
        yield problem("server", "; ".join(broken), "look at its log; restart it if it stays so")
    else:
        yield ok("server", f"node {own['node']}, kvcellar {own['version']}, healthy")
    if own["version"] != __version__:
        yield problem(
            "server release",
            f"{own['version']} runs, this Python has {__version__}",
            "install the same release on both sides and restart the server",
        )
    for name, reason in own.get("degraded", {}).items():
        yield problem(f"server {name}", f"{reason}; it costs misses only", "look at its log")
    waits_bytes = own["arena"]["waits_for_bytes"]
    if waits_bytes:
        yield problem(
            "server memory",
            f"L1 waits until {waits_bytes} more bytes are free",
            "stop what else uses memory, or restart it with a smaller --l1-size-gb",
        )
    for instance in own["instances"]:
        yield _instance(instance)


def _instance(instance: dict[str, Any]) -> Finding:
    name = f"engine {instance['name']}"
    if instance.get("refusal"):
        return problem(name, f"nothing is cached for it: {instance['refusal']}", "see the message")
    missing = instance["world_size"] - len(instance["ranks"])
    if missing or not instance["scheduler"]:
        half = "" if instance["scheduler"] else " and its scheduler half"
        return note(name, f"{missing} of {instance['world_size']} ranks{half} not registered (yet)")
    return ok(name, f"{instance['model']}, {instance['software']}")


def _http(asking: Asking, http_port: int, proc: Path) -> Finding:
    url = f"http://localhost:{http_port}"
    name = f"port {http_port}"
    try:
        ask(f"{url}/healthcheck", timeout_s=min(asking.timeout_s, _HTTP_TIMEOUT_S))
    except PeerClosedError as error:
        holder = port_holder(http_port, proc)
        return problem(
            name,
            f"the server's pages do not answer{_who(holder)}: {error}",
            "write its --http-port as --http-port here, or restart the server",
        )
    except KVCellarError as error:
        return problem(name, str(error), "look at the server's log")
    return ok(name, f"{url} answers and is healthy")


def _free_http(http_port: int, proc: Path) -> Finding:
    holder = port_holder(http_port, proc)
    name = f"port {http_port}"
    if holder is None:
        return ok(name, "free for a server's pages")
    return problem(name, f"taken{_who(holder)}", _stop(holder, "--http-port"))


def _who(holder: Holder | None) -> str:
    return f" by pid {holder.pid} ({holder.command})" if holder is not None else ""


def _stop(holder: Holder | None, flag: str) -> str:
    stop = f"kill {holder.pid}, or " if holder is not None else ""
    return f"{stop}start the server with another {flag}"
