"""The node's state in one place, and what arrivals, departures and deaths do to it.

Sockets end in `handshake` and `session`; the catalogue is in `store`; this is between them. It
decides who may come in, ends what a client held when it leaves, and knows what every page shows.
Everything here runs on the control loop and returns at once.
"""

import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvcellar import __version__
from kvcellar.clock import Clock
from kvcellar.config.server import ServerConfig
from kvcellar.errors import MalformedError, MismatchError
from kvcellar.layout.shard import EXACT, INT8, ShardLayout
from kvcellar.protocol.limits import GROUPS_MAX, LAYOUT_REGIONS_MAX, TEXT_MAX, WORLD_SIZE_MAX
from kvcellar.protocol.messages import PROTOCOL_VERSION, Hello, Role, Welcome
from kvcellar.server.awake import AwakeClock
from kvcellar.server.instances import Client, Connection, Roster
from kvcellar.server.meters import Meters
from kvcellar.server.recent import Recent
from kvcellar.server.tiers import Tiers
from kvcellar.store.machine import Store
from kvcellar.telemetry.logs import EventLog

__all__ = ["ArenaShape", "Deaths", "Node", "check_version"]

_FIDELITIES = {"raw": EXACT, "int8": INT8}

CLIENT_ID_BYTES = 16

_log = EventLog("kvcellar.server")


class ArenaShape(msgspec.Struct, frozen=True):
    """The arena as it was planned at start: bytes in all, and of one growth step."""

    size_bytes: int
    step_bytes: int

    @property
    def steps(self) -> int:
        """Return how many steps there will be."""
        return -(-self.size_bytes // self.step_bytes)


class Deaths(Protocol):
    """What the node needs of `deaths.DeathWatch`."""

    def watch(self, client: Client, on_death: Callable[[Client], None]) -> None:
        """Call `on_death` when the client's process ends."""
        ...

    def unwatch(self, client: Client) -> None:
        """Stop watching, and close the client's pidfd."""
        ...


class Node:
    """Everything that one server knows.

    Attributes:
        config: what the user said.
        boot_id: 16 bytes, new for each start.
        store: the catalogue.
        roster: who is here.
        meters: counters and histograms.
        recent: the last lookups and namespaces, for explanations.
        tiers: behind the arena; None where none is configured.
        arena: its planned shape.
        clock: tells the time.
        awake: the same without what this process slept through, to judge others' silence by.
        steps_ready: growth steps that hold memory, from the first on.
        failures: by part, what broke for good; pages show it and /healthcheck fails.
        checks: by part, what is wrong with it now (empty text: nothing), asked for each page.
        waits_for_bytes: memory that the arena waits for, asked for each page.
        address: of the Unix socket.
    """

    tiers: Tiers | None

    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        *,
        arena: ArenaShape,
        deaths: Deaths,
        clock: Clock,
    ) -> None:
        self.config = config
        self._deaths = deaths
        self.boot_id = os.urandom(16)
        self.store = store
        self.roster = Roster()
        self.meters = Meters()
        self.recent = Recent()
        self.tiers = None
        self.arena = arena
        self.clock = clock
        self.awake = AwakeClock(clock)
        self.steps_ready = 0
        self.failures: dict[str, str] = {}
        self.checks: dict[str, Callable[[], str]] = {}
        self.waits_for_bytes: Callable[[], int] = lambda: 0
        self.address = ""
        self.started_s = clock.monotonic_s()

    def step_arrived(self, offset: int, size_bytes: int) -> None:
        """Let the store use a growth step whose memory is there."""
        self.store.add_step(offset, size_bytes)
        self.steps_ready += 1

    def admit(
        self, hello: Hello, *, pidfd: int | None, connection: Connection
    ) -> tuple[Client, Welcome]:
        """Let a client in, over its first connection or a newer one.

        Args:
            hello: what it said.
            pidfd: of its process; the node's from here on, whatever comes of it.
            connection: replaces the one it may have had.

        Raises:
            MismatchError: another protocol version, or its seat belongs to a newer process.
            MalformedError: a field is wrong.
            LimitError: too many clients.
        """
        client = self.roster.find(hello.client_id)
        is_new = client is None
        try:
            check_version(hello.protocol_version)
            _check_hello(hello)
            if client is None:
                client = self.roster.add(hello, pidfd)
                self._deaths.watch(client, self.client_died)
                pidfd = None
            lost = self.roster.seat(client, hello)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        if client.connection is not None:
            self._disconnect(client)
        client.connection = connection
        for member in lost:
            _log.warning(
                "seat taken over", instance=hello.instance_id, pid=member.hello.pid, by=hello.pid
            )
            self._disconnect(member)
        _log_arrival(hello, is_new=is_new)
        return client, self.welcome(hello.id)

    @property
    def fidelity(self) -> str:
        """The lossiest form in which L1 may give chunks back."""
        return _FIDELITIES[self.config.l1_codec]

    def welcome(self, request_id: int) -> Welcome:
        """Return the server's side of a handshake."""
        return Welcome(
            request_id,
            protocol_version=PROTOCOL_VERSION,
            boot_id=self.boot_id,
            node=self.config.instance_id,
            chunk_tokens=self.config.chunk_tokens,
            fidelity=self.fidelity,
            arena_bytes=self.arena.size_bytes,
            step_bytes=self.arena.step_bytes,
        )

    def connection_lost(self, client: Client, connection: Connection) -> bool:
        """Note that a connection ended; return whether the client is forgotten with it.

        Read leases end with the connection. Reservations stay, for the client's copies may still
        run, until it comes again, commits, or dies.
        """
        if client.connection is not connection:
            return False
        client.connection = None
        self.store.reader_left(client.owner)
        if client.hello.role != Role.TOOL:
            return False
        self.forget(client)
        return True

    def forget(self, client: Client) -> None:
        """End everything that a client held: it is dead, or has said that it touches nothing."""
        self.store.owner_died(client.owner)
        self.roster.remove(client)
        self._deaths.unwatch(client)
        self._close(client)

    def client_died(self, client: Client) -> None:
        """End everything that a dead process held."""
        self.meters.client_deaths += 1
        if client.hello.role != Role.TOOL:
            _log.info(
                "client died",
                role=client.hello.role,
                instance=client.hello.instance_id,
                pid=client.hello.pid,
            )
        self.forget(client)

    def parts(self) -> dict[str, str]:
        """Return, by part, what is wrong with it; empty text where nothing is."""
        found = {name: check() for name, check in self.checks.items()}
        return found | self.failures

    def degraded(self) -> dict[str, str]:
        """Return, by part, what is wrong with it and costs nothing but misses."""
        return {} if self.tiers is None else {"tiers": self.tiers.check()}

    def _disconnect(self, client: Client) -> None:
        self.store.reader_left(client.owner)
        self._close(client)

    def _close(self, client: Client) -> None:
        connection = client.connection
        client.connection = None
        if connection is not None:
            connection.close()


def check_version(protocol_version: int) -> None:
    """Refuse another protocol version.

    Raises:
        MismatchError: it names both.
    """
    if protocol_version != PROTOCOL_VERSION:
        raise MismatchError(
            f"the client speaks protocol version {protocol_version}, this server (kvcellar "
            f"{__version__}) speaks {PROTOCOL_VERSION}: install the same kvcellar on both sides"
        )


def _check_hello(hello: Hello) -> None:
    if hello.role not in {Role.SCHEDULER, Role.WORKER, Role.TOOL}:
        raise MalformedError(f"role {hello.role[:32]!r} is none of scheduler, worker, tool")
    if len(hello.client_id) != CLIENT_ID_BYTES:
        raise MalformedError(f"client_id has {len(hello.client_id)} bytes instead of 16")
    for name in ("instance_id", "software", "model"):
        text = getattr(hello, name)
        if len(text) > TEXT_MAX:
            raise MalformedError(f"{name} has {len(text)} characters, over {TEXT_MAX}")
    if hello.role == Role.TOOL:
        return
    if not hello.instance_id:
        raise MalformedError("instance_id is empty")
    if not 1 <= hello.world_size <= WORLD_SIZE_MAX:
        raise MalformedError(f"world_size {hello.world_size} is not from 1 to {WORLD_SIZE_MAX}")
    if not 0 <= hello.rank < hello.world_size:
        raise MalformedError(f"rank {hello.rank} is not below world_size {hello.world_size}")
    if hello.role == Role.WORKER:
        _check_layouts(hello)


def _check_layouts(hello: Hello) -> None:
    if not 1 <= len(hello.layouts) <= GROUPS_MAX:
        raise MalformedError(f"layouts has {len(hello.layouts)} entries, not 1 to {GROUPS_MAX}")
    for layout in hello.layouts:
        _check_layout(layout, hello.rank)


def _check_layout(layout: ShardLayout, rank: int) -> None:
    if layout.rank != rank:
        raise MalformedError(f"layout.rank {layout.rank} is not the hello's rank {rank}")
    if layout.block_tokens < 1:
        raise MalformedError(f"layout.block_tokens {layout.block_tokens} is below 1")
    if not 1 <= len(layout.regions) <= LAYOUT_REGIONS_MAX:
        raise MalformedError(
            f"layout.regions has {len(layout.regions)} entries, not 1 to {LAYOUT_REGIONS_MAX}"
        )
    if any(region.page_bytes < 1 for region in layout.regions):
        raise MalformedError("layout.regions has a region with page_bytes below 1")


def _log_arrival(hello: Hello, *, is_new: bool) -> None:
    if hello.role == Role.TOOL:
        _log.debug("tool connected", pid=hello.pid, software=hello.software)
        return
    _log.info(
        "client registered" if is_new else "client reconnected",
        role=hello.role,
        instance=hello.instance_id,
        rank=f"{hello.rank}/{hello.world_size}",
        pid=hello.pid,
        software=hello.software,
    )
