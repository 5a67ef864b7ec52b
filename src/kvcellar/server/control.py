"""The control process: everything wired together, started, and stopped without a trace.

`run` is what the commands call. What can be wrong (the size, a taken port, the folder) is found
before anything is started and answered with the flag to change. Then sockets first, memory in the
background, HTTP in its own process: the first client is served while the arena still grows.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcellar import __version__
from kvcellar.clock import Clock, SystemClock
from kvcellar.config.server import ServerConfig
from kvcellar.config.shown import config_page
from kvcellar.errors import ConfigError
from kvcellar.memory.arena import Arena, ArenaGrower
from kvcellar.memory.limits import check_l1_size
from kvcellar.memory.slots import SlotAllocator, step_size_bytes
from kvcellar.protocol.messages import PROTOCOL_VERSION, Hello, Role
from kvcellar.server.child import ChildProcess, Program
from kvcellar.server.deaths import DeathWatch
from kvcellar.server.door import Door
from kvcellar.server.http_watch import HttpWatch
from kvcellar.server.listener import UnixListener
from kvcellar.server.node import ArenaShape, Node
from kvcellar.server.strangers import Strangers
from kvcellar.server.taken import named
from kvcellar.server.tiers import Tiers
from kvcellar.server.unused import UnusedWatch
from kvcellar.server.watermark import Watermark
from kvcellar.store.limits import StoreLimits
from kvcellar.store.machine import Store
from kvcellar.store.policies import policy_from_name
from kvcellar.telemetry.aliases import Alias
from kvcellar.telemetry.logs import EventLog, setup_logging
from kvcellar.transport.address import TcpAddress
from kvcellar.transport.sockets import listen_tcp, listen_unix
from kvcellar.units import format_bytes

__all__ = ["ControlServer", "run"]

_DESCRIPTORS_WANTED = 65_536
_HTTP_PORT_WAIT_S = 1.0
_HTTP_PORT_POLL_S = 0.02

_log = EventLog("kvcellar.server")


def run(config: ServerConfig, notes: Sequence[str] = (), aliases: Sequence[Alias] = ()) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: checked by `config.load`.
        notes: lines to log first, about flags that mean nothing here.
        aliases: other names under which metrics are shown as well.

    Raises:
        ConfigError: the server cannot start; the message says what to change.
    """
    setup_logging(config.log_level)
    for note in notes:
        _log.warning("flag without effect", note=note)
    check_l1_size(config.l1_bytes)
    _raise_descriptor_limit()
    asyncio.run(_serve(config, aliases))


async def _serve(config: ServerConfig, aliases: Sequence[Alias]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = ControlServer(config, SystemClock(), aliases)
    unused = UnusedWatch(
        config.stop_when_unused_s,
        lambda: bool(server.node.roster.instances),
        stopping.set,
        clock=server.node.awake,
    )
    try:
        await server.start()
        unused.start()
        _keep_collections_short()
        await stopping.wait()
        _log.info("stopping", boot_id=server.node.boot_id.hex()[:8])
    finally:
        unused.stop()
        server.stop()
    _log.info("stopped", boot_id=server.node.boot_id.hex()[:8])


class ControlServer:
    """One server of a node, on the running loop."""

    def __init__(self, config: ServerConfig, clock: Clock, aliases: Sequence[Alias] = ()) -> None:
        """Make the parts; nothing is opened but the arena's empty file.

        Raises:
            ArenaMapError: the kernel gives no shared memory.
        """
        self._config = config
        self._aliases = aliases
        self._clock = clock
        shape = ArenaShape(config.l1_bytes, step_size_bytes(config.l1_bytes))
        self._arena = Arena.create(shape.size_bytes, shape.step_bytes)
        store = Store(
            SlotAllocator(shape.step_bytes),
            policy_from_name(config.eviction_policy),
            limits=StoreLimits(arena_bytes=shape.size_bytes),
        )
        self.node = Node(config, store, arena=shape, deaths=DeathWatch(), clock=clock)
        self._strangers = Strangers(self.node.meters, clock)
        self._door = Door(self.node, self._strangers)
        self._listener: UnixListener | None = None
        self._http: ChildProcess | None = None
        self._http_watch: HttpWatch | None = None
        self._http_sockets: list[socket.socket] = []
        self._socket_path: Path | None = None
        self._watermark = _watermark(self.node)
        loop = asyncio.get_running_loop()
        self._grower = ArenaGrower(
            self._arena,
            lambda offset, size: _from_thread(loop, self.node.step_arrived, offset, size),
        )

    async def start(self) -> None:
        """Open the sockets, then start the HTTP process and the arena's growth.

        Raises:
            ConfigError: a port or folder cannot be used.
        """
        config = self._config
        tcp = _listen(TcpAddress(config.host, config.port))
        port = int(tcp[0].getsockname()[1])
        opened = [*tcp]
        try:
            self._http_sockets = await self._listen_http()
            if config.tier_adapters():
                self.node.tiers = self._make_tiers()
            self.node.address = self._unix_address(port)
            unix = listen_unix(self.node.address)
            opened.append(unix)
            if config.socket_dir is not None:
                self._socket_path = Path(self.node.address)
            self._listener = UnixListener(
                unix,
                self.node,
                self._strangers,
                arena_fd=self._arena.fd,
                allowed_uids=frozenset({os.getuid(), 0, *config.client_uids}),
            )
        except BaseException:
            for sock in opened:
                sock.close()
            raise
        await self._door.open(tcp)
        self.node.awake.start()
        if self.node.tiers is not None:
            self.node.tiers.start()
        self._http = self._make_http()
        self._http_watch = HttpWatch(self._http, self.node.awake)
        self._set_checks(self._listener, self._http_watch)
        self._http.start()
        self._http_watch.start()
        self._grower.start()
        if self.node.tiers is not None:
            await self.node.tiers.wait()
        if self._watermark is not None:
            self._watermark.start()
        self._log_start(port, int(self._http_sockets[0].getsockname()[1]))

    def stop(self) -> None:
        """Close everything; blocks for well under a second. May be called after a failed start."""
        self._door.close()
        self.node.awake.stop()
        if self._watermark is not None:
            self._watermark.stop()
        if self._listener is not None:
            self._listener.close()
        for sock in self._http_sockets:
            sock.close()
        if self._http_watch is not None:
            self._http_watch.stop()
        if self._http is not None:
            self._http.stop()
        if self.node.tiers is not None:
            self.node.tiers.stop()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
        if self._grower.stop():
            self._arena.close()

    async def _listen_http(self) -> list[socket.socket]:
        """Listen for HTTP; the process of a server that was just killed may hold the port yet."""
        address = TcpAddress(self._config.http_host, self._config.http_port)
        deadline_s = self._clock.monotonic_s() + _HTTP_PORT_WAIT_S
        while True:
            try:
                return listen_tcp(address)
            except ConfigError as error:
                if "taken" not in str(error) or self._clock.monotonic_s() > deadline_s:
                    text = str(named(error, address)).replace("--port", "--http-port")
                    raise ConfigError(text.replace("--host", "--http-host")) from error
            await asyncio.sleep(_HTTP_PORT_POLL_S)

    def _make_http(self) -> ChildProcess:
        # It keeps our listening sockets open, so while it is away connections wait.
        fds = [sock.fileno() for sock in self._http_sockets]
        config = self._config
        aliases = [tuple(alias) for alias in self._aliases]
        arguments = (
            fds, config.log_level, config.admin_token_file, config_page(config), aliases,
        )  # fmt: skip
        return ChildProcess(
            Program("HTTP", "kvcellar.server.http.process", fds, arguments),
            attach=self._attach_child,
            on_end=self._count_restart,
            clock=self._clock,
        )

    def _make_tiers(self) -> Tiers:
        node = self.node
        return Tiers(
            self._config, node.store, node.roster, arena_fd=self._arena.fd, awake=node.awake
        )

    def _unix_address(self, port: int) -> str:
        if self._config.socket_dir is None:
            return f"@kvcellar/{port}/{self.node.boot_id.hex()[:8]}"
        folder = Path(self._config.socket_dir)
        try:
            # Only its last part: a mistyped path is to be seen, not made.
            folder.mkdir(mode=0o700)
            _log.info("socket folder made", folder=str(folder))
        except FileExistsError:
            pass
        except FileNotFoundError as error:
            raise ConfigError(
                f"--socket-dir {folder}: {folder.parent} is not there: make it, or correct the path"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--socket-dir {folder}: cannot make the folder: {error.strerror}"
            ) from error
        return str(folder / f"{port}.sock")

    def _attach_child(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        assert self._listener is not None
        hello = Hello(
            0,
            protocol_version=PROTOCOL_VERSION,
            role=Role.TOOL,
            client_id=uuid.uuid4().bytes,
            instance_id="",
            pid=0,
            software=f"kvcellar {__version__} http",
        )
        client = self._listener.attach_child(sock, hello, on_lost)
        if self._http_watch is not None:
            self._http_watch.attached(client)

    def _count_restart(self) -> None:
        self.node.meters.http_restarts += 1

    def _set_checks(self, listener: UnixListener, http: HttpWatch) -> None:
        self.node.waits_for_bytes = lambda: self._grower.waits_for_bytes
        self.node.checks = {
            "arena": lambda: self._grower.failure or "",
            "door": self._door.check,
            "http": http.check,
            "socket": listener.check,
        }

    def _log_start(self, port: int, http_port: int) -> None:
        config = self._config
        _log.info(
            "started",
            version=__version__,
            node=config.instance_id,
            boot_id=self.node.boot_id.hex()[:8],
            engines=str(TcpAddress(config.host, port)),
            socket=self.node.address,
            http=f"http://{TcpAddress(config.http_host, http_port)}".replace("tcp://", ""),
            l1=format_bytes(config.l1_bytes),
            step=format_bytes(self._arena.step_bytes),
            eviction=config.eviction_policy,
            chunk_tokens=config.chunk_tokens,
            uids=",".join(str(uid) for uid in sorted({os.getuid(), 0, *config.client_uids})),
        )


def _listen(address: TcpAddress) -> list[socket.socket]:
    try:
        return listen_tcp(address)
    except ConfigError as error:
        raise named(error, address) from error


def _watermark(node: Node) -> Watermark | None:
    config = node.config
    if config.eviction_watermark is None or config.eviction_ratio is None:
        return None
    return Watermark(
        node.store,
        size_bytes=node.arena.size_bytes,
        watermark=config.eviction_watermark,
        ratio=config.eviction_ratio,
    )


def _from_thread(
    loop: asyncio.AbstractEventLoop, act: Callable[[int, int], None], offset: int, size: int
) -> None:
    # The loop may have ended while the grower finished its last step.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act, offset, size)


def _raise_descriptor_limit() -> None:
    """Allow as many connections as the system does: each takes a socket and a pidfd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    wanted = min(wanted, _DESCRIPTORS_WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keep_collections_short() -> None:
    """Keep the garbage collector from walking the whole catalogue.

    Nothing in the catalogue is a cycle, and a full collection of a million entries stops the loop
    for a third of a second. The young generations are still collected.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 20, 1_000_000)
