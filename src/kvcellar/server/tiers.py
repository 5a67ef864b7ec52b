"""The control process's side of the tiers: the tier process's lives, and what crosses to it.

Everything that does I/O to a tier is in the tier process, which `child` starts again whenever it
ends. Each of its lives is an owner of the store: it writes to the slots that fetches reserved and
reads those that write-behind leased, so its death, which the kernel reports, ends both exactly. One
that says nothing for some seconds counts as absent; one that stays silent is killed. Neither costs
more than misses, and nothing in here waits. Wired by `control`, used by `requests` and `facts`.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from kvcellar.clock import Clock
from kvcellar.config.server import ServerConfig
from kvcellar.errors import ConfigError
from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.protocol.messages import Lookup
from kvcellar.protocol.tier_messages import (
    Configure,
    Delete,
    Deleted,
    Ready,
    Refused,
    Report,
    SetQuotas,
    TierAnswer,
    TierFacts,
    TierQuestion,
    Wipe,
)
from kvcellar.server.child import ChildProcess, Program
from kvcellar.server.fetches import Fetches, FetchOptions
from kvcellar.server.instances import Client, Instance, Roster
from kvcellar.server.tier_line import TierLine
from kvcellar.server.tier_meters import TierMeters
from kvcellar.server.writebehind import WriteBehind
from kvcellar.store.entries import OwnerId
from kvcellar.store.machine import Store
from kvcellar.store.reservations import Reservation
from kvcellar.telemetry.logs import EventLog
from kvcellar.tiers.adapters import Adapter, read_adapter

__all__ = ["Tiers"]

START_WAIT_S = 15.0
"""How long the server's start waits for the tiers; then it serves without them until they come."""
OWNED_WAIT_S = 2.0
"""The tier process of a server that was just killed may hold a folder for a moment yet."""
START_TRIES = 3
"""After so many ends of the tier process the start waits for it no longer."""
SILENT_S = 3.0
"""Without a report for so long, nothing is asked any more."""
HANG_S = 10.0
"""Without a report for so long, the process is killed and started again."""
WATCH_S = 0.5
OWNED_RETRY_S = 0.1

_log = EventLog("kvcellar.server")


class Tiers:
    """All tiers of a server; it only exists where at least one is configured.

    Attributes:
        count: how many are configured.
        keeps_quotas: whether any of them bounds what tenants hold.
        meters: what is counted here.
        fetches: from the tiers into the arena.
        writes: from the arena into the tiers.
        facts: what each tier reported last; empty before the first report of this life.
        failure: what broke for good inside of the server; empty text while nothing has.
    """

    def __init__(
        self, config: ServerConfig, store: Store, roster: Roster, *, arena_fd: int, clock: Clock
    ) -> None:
        """Prepare; nothing happens before `start`.

        Raises:
            ConfigError: an adapter is not one.
        """
        adapters = _read_adapters(config)
        self._config = config
        self._store = store
        self._roster = roster
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(
            Program("tier", "kvcellar.tiers.process", [arena_fd], [arena_fd, config.log_level]),
            attach=self._attach,
            on_end=self._ended,
            clock=clock,
        )
        self.meters = meters = TierMeters()
        self.count = len(adapters)
        self._absent = tuple(
            TierFacts(adapter.options.name, adapter.kind, is_complete=False) for adapter in adapters
        )
        self.keeps_quotas = any(adapter.options.is_isolated for adapter in adapters)
        self._quotas: dict[str, int] = {}
        self.fetches = Fetches(
            store,
            meters,
            self,
            FetchOptions(
                config.l1_codec,
                config.l2_prefetches_max,
                is_retaining=config.l2_prefetch_policy == "retain",
            ),
            clock=clock,
            later=self._loop.call_later,
        )
        self.writes = WriteBehind(
            store,
            meters,
            self,
            codec=config.l1_codec,
            l1_bytes=config.l1_bytes,
            is_skipping_l1=config.l2_store_policy == "skip_l1",
        )
        self.facts: tuple[TierFacts, ...] = ()
        self.failure = ""
        self._line: TierLine | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._owner = OwnerId(0)
        self._heard_s = 0.0
        self._wipes = 0
        self._retries = 0
        self._refusal: Refused | None = None
        self._first_s = clock.monotonic_s()
        self._settled = asyncio.Event()
        self._watching: asyncio.TimerHandle | None = None

    @property
    def batch_max(self) -> int:
        """Return how many chunks one question may carry."""
        return min((tier.batch_max for tier in self.facts), default=1)

    @property
    def is_up(self) -> bool:
        """Return whether the tier process serves and has said so a moment ago."""
        return bool(self.facts) and self._clock.monotonic_s() - self._heard_s < SILENT_S

    def check(self) -> str:
        """Return what is wrong with the tiers, empty text where nothing is; nothing but misses."""
        if self.failure:
            return self.failure
        if self._refusal is not None:
            return self._refusal.message
        if not self.facts:
            return self._child.check() or "the tier process starts"
        if not self.is_up:
            silent_s = self._clock.monotonic_s() - self._heard_s
            return f"the tier process has said nothing for {silent_s:.0f} s"
        return "; ".join(f"{tier.name}: {tier.trouble}" for tier in self.facts if tier.trouble)

    @property
    def shown(self) -> tuple[TierFacts, ...]:
        """Return what pages show of each tier: also while no life of the process has reported."""
        if self.facts:
            return self.facts
        trouble = self.check()
        return tuple(msgspec.structs.replace(tier, trouble=trouble) for tier in self._absent)

    def start(self) -> None:
        """Start the tier process."""
        self._child.start()
        self._watching = self._loop.call_later(WATCH_S, self._watch)

    async def wait(self) -> None:
        """Wait until the tiers are there, for a bounded time.

        Raises:
            ConfigError: they cannot be built as configured.
        """
        try:
            async with asyncio.timeout(START_WAIT_S):
                await self._settled.wait()
        except TimeoutError:
            _log.warning("tiers are not there yet", reason=self.check())
        if self._refusal is not None:
            raise ConfigError(self._refusal.message)

    def stop(self) -> None:
        """End the tier process; blocks for a moment."""
        if self._watching is not None:
            self._watching.cancel()
        if self._line is not None:
            self._line.close()
        self._child.stop()

    def ask(
        self, make: Callable[[int], TierQuestion], on_answer: Callable[[TierAnswer | None], None]
    ) -> bool:
        """Ask the tier process; see `TierLine.ask`."""
        if self._line is None or not self.is_up or self.failure:
            return False

        def guarded(answer: TierAnswer | None) -> None:
            try:
                on_answer(answer)
            except Exception as error:  # noqa: BLE001 - the tiers end here, the server goes on.
                self.failure = f"an internal error in the tiers: {error!r}; restart the server"
                _log.error("internal error", exception=error, part="tiers")

        return self._line.ask(make, guarded)

    def begin_fetch(self, client: Client, instance: Instance, lookup: Lookup, found: int) -> int:
        """Begin to fetch what a lookup did not find; return the handle, 0 where nothing is begun.

        Args:
            client: the scheduler half that looked up.
            instance: its instance, bound.
            lookup: what it asked.
            found: leading chunks that are in the arena.
        """
        if self._wipes:
            # What is being removed must not come back.
            return 0
        return self.fetches.begin(client, self._owner, instance, lookup, found)

    def committed(self, reservation: Reservation) -> None:
        """Write chunks behind that have just become visible."""
        self.writes.offer(self._owner if self.is_up else OwnerId(0), reservation)

    def set_quota(self, tenant: str, limit_bytes: int | None) -> None:
        """Bound what a tenant may hold in each tier, now and in later lives of their process."""
        if limit_bytes is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = limit_bytes
        self._send_quotas({tenant: limit_bytes})

    def tenant_bytes(self, tenant: str) -> int:
        """Return what a tenant with a quota holds in all tiers, as they last said."""
        return sum(tier.tenant_bytes.get(tenant, 0) for tier in self.facts)

    def _send_quotas(self, limits: Mapping[str, int | None]) -> None:
        if self.keeps_quotas and limits:
            self.ask(lambda id_: SetQuotas(id_, dict(limits)), _ignore)

    def remove(self, keys: bytes) -> None:
        """Remove chunks from every tier: their bytes were found damaged."""
        for at in range(0, len(keys), self.batch_max * KEY_BYTES):
            part = keys[at : at + self.batch_max * KEY_BYTES]
            self.ask(partial(Delete, keys=part), _ignore)

    def wipe(self, namespace: NamespaceId | None, on_done: Callable[[int], None]) -> None:
        """Remove every chunk of a namespace, or all there are, from every tier.

        Args:
            namespace: None for all.
            on_done: is told how many went; -1 where the tiers could not be reached.
        """
        self.fetches.give_up()
        self.writes.drop()

        def done(answer: TierAnswer | None) -> None:
            self._wipes -= 1
            on_done(answer.count if isinstance(answer, Deleted) else -1)

        self._wipes += 1
        if not self.ask(lambda id_: Wipe(id_, namespace or b""), done):
            done(None)

    def _attach(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        line = TierLine(on_report=self._reported, on_lost=on_lost)
        self._line, self._owner = line, self._roster.new_owner()
        # The loop keeps only a weak reference to a task.
        self._attaching = self._loop.create_task(self._open(sock, line, on_lost))

    async def _open(self, sock: socket.socket, line: TierLine, on_lost: Callable[[], None]) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: line, sock)
        except OSError:
            sock.close()
            on_lost()
            return
        config = self._config
        line.ask(
            lambda id_: Configure(id_, config.l1_bytes, config.tier_adapters()), self._configured
        )

    def _configured(self, answer: TierAnswer | None) -> None:
        if isinstance(answer, Ready):
            self._refusal = None
            self._take(answer.tiers)
            self._send_quotas(self._quotas)
            self._settled.set()
            _log.info("tiers are there", tiers=",".join(tier.name for tier in answer.tiers))
        elif isinstance(answer, Refused):
            waited_s = self._clock.monotonic_s() - self._first_s
            if (
                answer.code == "tier_owned"
                and not self._settled.is_set()
                and waited_s < OWNED_WAIT_S
            ):
                self._retries += 1
                self._loop.call_later(OWNED_RETRY_S, self._child.kill)
                return
            self._refusal = answer
            if self._settled.is_set():
                _log.error("tiers refused", reason=answer.message)
            self._settled.set()
            self._loop.call_later(HANG_S, self._child.kill)

    def _reported(self, report: Report) -> None:
        if self.facts:
            self._take(report.tiers)

    def _take(self, tiers: tuple[TierFacts, ...]) -> None:
        for tier, before in zip(tiers, self.facts or tiers, strict=True):
            if tier.trouble and not before.trouble:
                _log.warning("tier in trouble", tier=tier.name, reason=tier.trouble)
            elif before.trouble and not tier.trouble:
                _log.info("tier works again", tier=tier.name)
        self.facts = tiers
        self._heard_s = self._clock.monotonic_s()

    def _watch(self) -> None:
        self._watching = self._loop.call_later(WATCH_S, self._watch)
        if self.facts and self._clock.monotonic_s() - self._heard_s > HANG_S:
            _log.warning("tier process hangs", silent_s=HANG_S, pid=self._child.pid)
            self._child.kill()

    def _ended(self) -> None:
        """Free what the life held: the kernel says that it touches no slot any more."""
        self.meters.restarts += 1
        # Those that were ended to ask for the folder again say nothing against the next one.
        if self.meters.restarts - self._retries >= START_TRIES:
            self._settled.set()
        self.facts = ()
        self._line = None
        self.fetches.give_up()
        self.writes.life_ended()
        self._store.owner_died(self._owner)


def _read_adapters(config: ServerConfig) -> list[Adapter]:
    adapters = [
        read_adapter(text, position=position)
        for position, text in enumerate(config.tier_adapters())
    ]
    for note in itertools.chain(*(adapter.notes for adapter in adapters)):
        _log.warning("flag without effect", note=note)
    return adapters


def _ignore(_answer: TierAnswer | None) -> None:
    """Nobody waits for it."""
