"""What a client must know before it dials: where the server is, how patient to be, who it is.

Made by the connector from the engine's configuration and by the tools from their flags. Values are
checked here, when the program starts, so that a mistake is an error with a name and not a client
that never connects.
"""

from dataclasses import dataclass

from kvcellar.errors import ConfigError
from kvcellar.layout.shard import ShardLayout
from kvcellar.protocol.limits import TEXT_MAX, WORLD_SIZE_MAX
from kvcellar.protocol.messages import PROTOCOL_VERSION, Hello, Role
from kvcellar.transport.address import TcpAddress, parse_server_address

__all__ = ["ClientOptions", "Identity"]

_ROLES = (Role.SCHEDULER, Role.WORKER, Role.TOOL)
_DURATION_MIN_S = 0.01
_DURATION_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where the server is and how long to wait for it.

    Attributes:
        host: name or IP address of the server's TCP door, `tcp://` before it or not.
        port: its port, as number or text.
        heartbeat_s: seconds between heartbeats; a restarted server is found within one of them.
        timeout_s: the longest that any call may wait, whatever its caller asks for.
        connect_timeout_s: the longest that each step of connecting may take.

    Raises:
        ConfigError: a value makes no sense; the message names it and the fix.
    """

    host: str = "localhost"
    port: int | str = 5555
    heartbeat_s: float = 10.0
    timeout_s: float = 300.0
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _ = self.address
        for name in ("heartbeat_s", "timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not _DURATION_MIN_S <= value <= _DURATION_MAX_S:
                raise ConfigError(
                    f"{name}={value!r}: write seconds, from {_DURATION_MIN_S:g} to "
                    f"{_DURATION_MAX_S:g}"
                )

    @property
    def address(self) -> TcpAddress:
        """The server's TCP door."""
        return parse_server_address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is; the fields are those of `Hello`.

    Raises:
        ConfigError: a field makes no sense; the message names it and the fix.
    """

    role: str
    instance_id: str
    software: str
    model: str = ""
    rank: int = 0
    world_size: int = 1
    layouts: tuple[ShardLayout, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ConfigError(f"role={self.role!r}: choose one of {', '.join(_ROLES)}")
        for name in ("instance_id", "software", "model"):
            if len(getattr(self, name)) > TEXT_MAX:
                raise ConfigError(f"{name} is longer than {TEXT_MAX} characters: shorten it")
        if not 1 <= self.world_size <= WORLD_SIZE_MAX:
            raise ConfigError(f"world_size={self.world_size}: 1 to {WORLD_SIZE_MAX} ranks are kept")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is not below world_size={self.world_size}")
        if bool(self.layouts) != (self.role == Role.WORKER):
            raise ConfigError("layouts: a worker says how its shards lie, and nobody else does")

    def hello(self, request_id: int, *, client_id: bytes, pid: int) -> Hello:
        """Return the first message of a connection."""
        return Hello(
            request_id,
            protocol_version=PROTOCOL_VERSION,
            role=self.role,
            client_id=client_id,
            instance_id=self.instance_id,
            pid=pid,
            software=self.software,
            model=self.model,
            rank=self.rank,
            world_size=self.world_size,
            layouts=self.layouts,
        )
