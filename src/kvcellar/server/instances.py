"""Who is here: client processes, and the engine instances that they form.

A client is a process that said hello, by the 16 bytes it made for itself; it may come over several
connections, one after the other. An instance has one seat for a scheduler half and one for each
rank, and each seat counts its holders. When another process takes a seat whose holder lives on (an
engine restarted under its old name before the old one ended), the newest wins, and everyone whose
seat has had fewer holders loses it: that is the old generation, whose ranks and the new ones must
never be mixed in one chunk. No sockets and no store in here: `node` acts on what changes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from kvcellar.errors import LimitError, MismatchError, NotRegisteredError
from kvcellar.keys.digest import NamespaceId
from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.gate import GateFigures
from kvcellar.protocol.messages import Hello, Reply, Role
from kvcellar.server.bounds import CLIENTS_MAX
from kvcellar.store.entries import OwnerId

__all__ = ["Client", "Connection", "Instance", "Roster"]


class Connection(Protocol):
    """A client's connection, as far as the roster needs to know it."""

    def close(self) -> None:
        """Close it at once; nothing more is read from it."""
        ...

    def push(self, reply: Reply) -> None:
        """Send a reply that could not be given when its request came."""
        ...


class Client:
    """One client process.

    Attributes:
        owner: the store's name for it.
        hello: what it said last.
        instance: where it has a seat; None for tools and for those that lost theirs.
        connection: the newest; None while it is away.
        pidfd: watches its process; owned by the roster's user; None for the server's own child.
        newer: pid of the process that took its seat, 0 while it holds it.
        turn: how many clients have had its seat, itself included.
        heard_s: when it sent its last ping, by `Node.awake`.
    """

    __slots__ = ("connection", "heard_s", "hello", "instance", "newer", "owner", "pidfd", "turn")

    def __init__(self, owner: OwnerId, hello: Hello, pidfd: int | None) -> None:
        self.owner = owner
        self.hello = hello
        self.pidfd = pidfd
        self.connection: Connection | None = None
        self.instance: Instance | None = None
        self.newer = 0
        self.turn = 0
        self.heard_s = 0.0


class Instance:
    """One engine process group.

    Attributes:
        name: its instance id.
        world_size: ranks.
        scheduler: who has the scheduler's seat.
        workers: who has each rank's seat.
        namespace: what the scheduler bound; None before.
        shard_bytes: of a chunk of that namespace, one KV group after the other.
        spans: of the KV groups of that namespace.
        holders: the ranks that hold each shard of a chunk; each rank one until bound otherwise.
        chunk_tokens: of that namespace.
        refusal: why its namespace was refused; empty where it was not.
        counts: what its scheduler half counts, as it said last.
        gate: what its gate has decided, as it said last; None before.
    """

    __slots__ = (
        "_turns",
        "chunk_tokens",
        "counts",
        "gate",
        "holders",
        "name",
        "namespace",
        "refusal",
        "scheduler",
        "shard_bytes",
        "spans",
        "workers",
        "world_size",
    )
    namespace: NamespaceId | None
    gate: GateFigures | None

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.scheduler: Client | None = None
        self.workers: dict[int, Client] = {}
        self.namespace = None
        self.shard_bytes: tuple[int, ...] = ()
        self.spans: tuple[int, ...] = (0,)
        self.holders = [[rank] for rank in range(world_size)]
        self.chunk_tokens = 0
        self.refusal = ""
        self.counts: Mapping[str, int] = {}
        self.gate = None
        self._turns: Counter[int] = Counter()

    def members(self) -> Iterator[Client]:
        """Yield everyone with a seat."""
        if self.scheduler is not None:
            yield self.scheduler
        yield from self.workers.values()

    def take(self, client: Client) -> list[Client]:
        """Give a client the seat that its hello asks for, and return those who lost theirs."""
        is_scheduler = client.hello.role == Role.SCHEDULER
        seat = -1 if is_scheduler else client.hello.rank
        self._turns[seat] += 1
        client.turn = self._turns[seat]
        client.instance = self
        holder = self.scheduler if is_scheduler else self.workers.get(client.hello.rank)
        lost: list[Client] = []
        if holder is not None:
            lost = [member for member in self.members() if member.turn < client.turn]
            for member in lost:
                self.leave(member)
        if is_scheduler:
            self.scheduler = client
        else:
            self.workers[client.hello.rank] = client
        return lost

    def leave(self, client: Client) -> None:
        """Free a client's seat."""
        if self.scheduler is client:
            self.scheduler = None
            # What one process bound says nothing about the next one's model.
            self.namespace = None
        elif self.workers.get(client.hello.rank) is client:
            del self.workers[client.hello.rank]

    def layouts(self) -> tuple[ShardLayout, ...]:
        """Return the layouts in rank order, nothing until every rank is here."""
        if len(self.workers) < self.world_size:
            return ()
        return tuple(
            layout for rank in range(self.world_size) for layout in self.workers[rank].hello.layouts
        )

    def writers(self, turn: int) -> tuple[OwnerId, ...]:
        """Return the owner of the rank that writes each shard; see `Reserve.turn`.

        Raises:
            NotRegisteredError: a rank is not here.
        """
        if len(self.workers) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in self.workers]
            raise NotRegisteredError(
                f"rank {missing[0]} of instance {self.name!r} is not registered: "
                "its worker must say hello first"
            )
        return tuple(self.workers[ranks[turn % len(ranks)]].owner for ranks in self.holders)


class Roster:
    """All clients and instances; every change of seats goes through here."""

    def __init__(self, *, clients_max: int = CLIENTS_MAX) -> None:
        self.instances: dict[str, Instance] = {}
        self._clients: dict[bytes, Client] = {}
        self._clients_max = clients_max
        self._owners = 0

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, client_id: bytes) -> Client | None:
        """Return the client with this id, if it is known."""
        return self._clients.get(client_id)

    def add(self, hello: Hello, pidfd: int | None) -> Client:
        """Note a new client process, without a seat yet.

        Raises:
            LimitError: too many are known.
        """
        if len(self._clients) >= self._clients_max:
            raise LimitError(
                f"{self._clients_max} client processes are known already: close some of them"
            )
        client = Client(self.new_owner(), hello, pidfd)
        self._clients[hello.client_id] = client
        return client

    def new_owner(self) -> OwnerId:
        """Return an owner of the store that nobody has been yet."""
        self._owners += 1
        return OwnerId(self._owners)

    def seat(self, client: Client, hello: Hello) -> list[Client]:
        """Give a client the seat that its hello asks for, and return those who lost theirs.

        Raises:
            MismatchError: another process took its seat before.
        """
        if client.newer:
            raise MismatchError(
                f"instance {hello.instance_id!r} belongs to the newer process {client.newer} now: "
                "if both engines are to run, give each an engine_id of its own"
            )
        if _identity(client.hello) != _identity(hello):
            raise MismatchError(
                f"client {hello.client_id.hex()} said hello as {_identity(client.hello)} before, "
                f"now as {_identity(hello)}: make a new client_id for another part"
            )
        client.hello = hello
        if hello.role == Role.TOOL:
            return []
        instance = self.instances.get(hello.instance_id)
        lost: list[Client] = []
        if instance is None or instance.world_size != hello.world_size:
            lost = [] if instance is None else list(instance.members())
            instance = Instance(hello.instance_id, hello.world_size)
            self.instances[hello.instance_id] = instance
            instance.take(client)
        elif client.instance is not instance:
            lost = instance.take(client)
        for member in lost:
            member.newer = hello.pid
            member.instance = None
        return lost

    def remove(self, client: Client) -> None:
        """Forget a client that is gone for good; its seat is free."""
        self._clients.pop(client.hello.client_id, None)
        instance = client.instance
        client.instance = None
        if instance is None:
            return
        instance.leave(client)
        if not any(instance.members()) and self.instances.get(instance.name) is instance:
            del self.instances[instance.name]


def _identity(hello: Hello) -> tuple[str, str, int, int]:
    return hello.role, hello.instance_id, hello.rank, hello.world_size
