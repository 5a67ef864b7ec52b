"""Who is here: client processes, and the engine instances that they form.

A client is a process that said hello, by the 16 bytes it made for itself; it may come over several
connections, one after the other. An instance has one seat for a scheduler half and one for each
rank. When a seat is taken by another process while its holder lives on (an engine restarted under
its old name before the old one ended), the newest wins and the whole old generation loses its
seats, for its ranks and the new ones must never be mixed in one chunk. No sockets and no store in
here: `node` acts on what changes.
"""

from collections.abc import Iterator
from typing import Protocol

from kvcellar.errors import LimitError, MismatchError, NotRegisteredError
from kvcellar.keys.digest import NamespaceId
from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.messages import Hello, Role
from kvcellar.server.bounds import CLIENTS_MAX
from kvcellar.store.entries import OwnerId

__all__ = ["Client", "Connection", "Instance", "Roster"]


class Connection(Protocol):
    """A client's connection, as far as the roster needs to know it."""

    def close(self) -> None:
        """Close it at once; nothing more is read from it."""
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
    """

    __slots__ = ("connection", "hello", "instance", "newer", "owner", "pidfd")

    def __init__(self, owner: OwnerId, hello: Hello, pidfd: int | None) -> None:
        self.owner = owner
        self.hello = hello
        self.pidfd = pidfd
        self.connection: Connection | None = None
        self.instance: Instance | None = None
        self.newer = 0


class Instance:
    """One engine process group.

    Attributes:
        name: its instance id.
        world_size: ranks.
        scheduler: who has the scheduler's seat.
        workers: who has each rank's seat.
        namespace: what the scheduler bound; None before.
        chunk_tokens: of that namespace.
    """

    __slots__ = ("chunk_tokens", "name", "namespace", "scheduler", "workers", "world_size")
    namespace: NamespaceId | None

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.scheduler: Client | None = None
        self.workers: dict[int, Client] = {}
        self.namespace = None
        self.chunk_tokens = 0

    def members(self) -> Iterator[Client]:
        """Yield everyone with a seat."""
        if self.scheduler is not None:
            yield self.scheduler
        yield from self.workers.values()

    def layouts(self) -> tuple[ShardLayout, ...]:
        """Return the layouts in rank order, nothing until every rank is here."""
        if len(self.workers) < self.world_size:
            return ()
        found = (self.workers[rank].hello.layout for rank in range(self.world_size))
        return tuple(layout for layout in found if layout is not None)

    def writers(self) -> tuple[OwnerId, ...]:
        """Return the ranks' owners in rank order.

        Raises:
            NotRegisteredError: a rank is not here.
        """
        if len(self.workers) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in self.workers]
            raise NotRegisteredError(
                f"rank {missing[0]} of instance {self.name!r} is not registered: "
                "its worker must say hello first"
            )
        return tuple(self.workers[rank].owner for rank in range(self.world_size))


class Roster:
    """All clients and instances; every change of seats goes through here."""

    def __init__(self, *, clients_max: int = CLIENTS_MAX) -> None:
        self.instances: dict[str, Instance] = {}
        self._clients: dict[bytes, Client] = {}
        self._clients_max = clients_max
        self._owners = 0

    def __len__(self) -> int:
        return len(self._clients)

    def clients(self) -> list[Client]:
        """Return everyone who is known."""
        return list(self._clients.values())

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
        self._owners += 1
        client = Client(OwnerId(self._owners), hello, pidfd)
        self._clients[hello.client_id] = client
        return client

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
        if instance is not None and not _fits(instance, client, hello):
            lost = [member for member in instance.members() if member is not client]
            for member in lost:
                member.newer = hello.pid
                member.instance = None
            instance = None
        if instance is None:
            instance = self.instances[hello.instance_id] = Instance(
                hello.instance_id, hello.world_size
            )
        _take_seat(instance, client, hello)
        return lost

    def remove(self, client: Client) -> None:
        """Forget a client that is gone for good; its seat is free."""
        self._clients.pop(client.hello.client_id, None)
        instance = client.instance
        client.instance = None
        if instance is None:
            return
        if instance.scheduler is client:
            instance.scheduler = None
        if instance.workers.get(client.hello.rank) is client:
            del instance.workers[client.hello.rank]
        if not any(instance.members()) and self.instances.get(instance.name) is instance:
            del self.instances[instance.name]


def _identity(hello: Hello) -> tuple[str, str, int, int]:
    return hello.role, hello.instance_id, hello.rank, hello.world_size


def _fits(instance: Instance, client: Client, hello: Hello) -> bool:
    """Return whether the seat is free or the client's own."""
    if instance.world_size != hello.world_size:
        return False
    if hello.role == Role.SCHEDULER:
        return instance.scheduler in {None, client}
    return instance.workers.get(hello.rank, client) is client


def _take_seat(instance: Instance, client: Client, hello: Hello) -> None:
    client.instance = instance
    if hello.role == Role.WORKER:
        instance.workers[hello.rank] = client
    elif instance.scheduler is not client:
        instance.scheduler = client
        # What another process bound says nothing about this one's model.
        instance.namespace = None
