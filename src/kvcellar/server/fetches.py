"""Fetches: what a lookup found missing in the arena comes in from the tiers, while engines go on.

A lookup that ends early begins a fetch. The tiers are asked how far they reach; then the chunks
come in batches: slots are reserved for the life of the tier process as their writer, the tier
process fills them, and each batch is committed with the seals that were read and verified. Whoever
waits gets one answer, at the end of the fetch or at its own deadline, and no failure of a tier is
more than a shorter answer. Keys that another fetch is reading are not read twice. A prefetch is a
fetch that no lookup began: it lets engines' fetches go first, and what it brings is to stay.
Everything runs on the control loop and returns at once. Used by `tiers` and `requests`.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kvcellar.clock import Clock
from kvcellar.errors import NotRegisteredError
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import AwaitFetch, ChunkState, Lookup, LookupReply
from kvcellar.protocol.tier_messages import Find, Found, Read, ReadDone, Run, TierAnswer
from kvcellar.server.fetch_legs import Leg, Legs
from kvcellar.server.fetch_records import Batch, Fetch, Later, Prefix, Waiter
from kvcellar.server.instances import Client, Instance
from kvcellar.server.tier_line import TierAsker
from kvcellar.server.tier_meters import TierMeters
from kvcellar.store.entries import OwnerId
from kvcellar.store.grants import coming_as_oldest, look_again, stay_oldest
from kvcellar.store.machine import Store
from kvcellar.units import MIB

__all__ = ["FetchOptions", "Fetches"]

FETCHES_MAX = 1_024
"""Fetches that are known, unfinished and finished ones that nobody has asked about."""
KEYS_MAX_BYTES = 64 * MIB
"""The keys of all of them."""
WAIT_MAX_S = 60.0
BATCHES_AT_ONCE = 2
"""Batches of one fetch that are read at once: the tiers never wait for the control loop."""
BATCH_BYTES = 64 * MIB


class FetchOptions(NamedTuple):
    """What a user may set.

    Attributes:
        codec: the form of the arena's chunks.
        in_flight_max: fetches that read at once; others wait for their turn.
        is_retaining: what was fetched stays like anything else; otherwise it is the first to
            leave after it was read.
    """

    codec: str
    in_flight_max: int
    is_retaining: bool


class Fetches:
    """All fetches of a server."""

    def __init__(
        self,
        store: Store,
        meters: TierMeters,
        asker: TierAsker,
        options: FetchOptions,
        *,
        clock: Clock,
        later: Callable[[float, Callable[[], None]], Later],
    ) -> None:
        """Prepare.

        Args:
            store: where chunks come to lie.
            meters: counted in.
            asker: passes questions to the tier process.
            options: see there.
            clock: for writers' ages and the histogram.
            later: as `loop.call_later`.
        """
        self._store = store
        self._meters = meters
        self._asker = asker
        self._options = options
        self._clock = clock
        self._later = later
        self._fetches: dict[int, Fetch] = {}
        self._queue: deque[Fetch] = deque()
        self._patient: deque[Fetch] = deque()
        self._prefetching = 0
        self._reading: dict[bytes, Batch] = {}
        self._keys_bytes = 0
        self._last = 0
        self._is_pumping = False
        self.in_flight = 0
        """Fetches that are reading now."""

    @property
    def in_flight_max(self) -> int:
        """Return how many fetches may read at once."""
        return self._options.in_flight_max

    @property
    def queued(self) -> int:
        """Return how many fetches wait for their turn."""
        return len(self._queue) + len(self._patient)

    def begin(
        self,
        client: Client,
        owner: OwnerId,
        instance: Instance,
        lookup: Lookup,
        found: int,
    ) -> int:
        """Begin to fetch what a lookup did not find; return the handle, 0 where nothing is begun.

        Args:
            client: who looked up.
            owner: the life of the tier process.
            instance: the client's, bound.
            lookup: what the client asked.
            found: leading chunks that are in the arena.
        """
        assert instance.namespace is not None, instance.name
        prefix = Prefix(
            instance.namespace,
            instance.shard_bytes,
            instance.spans,
            lookup.tenant,
            lookup.keys,
            found,
        )
        return self._begin(client, owner, prefix, None)

    def prefetch(self, owner: OwnerId, prefix: Prefix, on_end: Callable[[], None]) -> bool:
        """Begin to fetch what nobody has looked up; return whether it is begun.

        Args:
            owner: the life of the tier process.
            prefix: what to fetch.
            on_end: called once, later, when nothing more will come.
        """
        return self._begin(None, owner, prefix, on_end) > 0

    def _begin(
        self,
        client: Client | None,
        owner: OwnerId,
        prefix: Prefix,
        on_end: Callable[[], None] | None,
    ) -> int:
        keys, found = prefix.keys, prefix.found
        if not self._has_place(len(keys)):
            return 0
        legs = Legs(keys, prefix.spans, prefix.shard_bytes, found=found)
        leg = legs.next(self._has)
        if leg is None:
            return 0
        self._last += 1
        fetch = Fetch(
            self._last, client, prefix.namespace, legs, prefix.tenant, leg, found, owner,
            began_s=self._clock.monotonic_s(), on_end=on_end,
        )  # fmt: skip
        if not self._find(fetch, leg):
            return 0
        self._fetches[fetch.handle] = fetch
        self._keys_bytes += len(keys)
        self._meters.fetches += 1
        return fetch.handle

    def wait(self, client: Client, request: AwaitFetch) -> LookupReply | None:
        """Return what a fetch came to, or None: then the client's connection gets it later."""
        fetch = self._fetches.get(request.fetch)
        if fetch is None or fetch.client is not client or client.connection is None:
            return LookupReply(request.id, 0, 0, b"")
        if fetch.is_over or request.wait_s <= 0:
            return self._answer(client, fetch, request.id)
        waiter = Waiter(client.connection, request.id)
        wait_s = min(request.wait_s, WAIT_MAX_S)
        waiter.alarm = self._later(wait_s, lambda: self._expire(fetch, waiter))
        fetch.waiters.append(waiter)
        return None

    def give_up(self) -> None:
        """End every fetch as it is: the tiers were emptied, or the tier process is gone."""
        self._queue.clear()
        self._patient.clear()
        for fetch in list(self._fetches.values()):
            fetch.end = fetch.at
            if not fetch.is_over:
                self._end(fetch)

    def forget(self, keys: AbstractSet[bytes]) -> None:
        """Fetch these chunks no more, nor what comes after them: they were deleted."""
        for fetch in self._fetches.values():
            if not fetch.is_over:
                places = range(fetch.at, fetch.end)
                fetch.end = next((at for at in places if fetch.key(at) in keys), fetch.end)
        for key in keys & self._reading.keys():
            self._reading[key].is_void = True

    def _has_place(self, keys_bytes: int) -> bool:
        """Make place for one more fetch at the cost of those that nobody asked about."""
        while len(self._fetches) >= FETCHES_MAX or self._keys_bytes + keys_bytes > KEYS_MAX_BYTES:
            oldest = next((fetch for fetch in self._fetches.values() if fetch.is_over), None)
            if oldest is None:
                return False
            self._forget(oldest)
        return True

    def _forget(self, fetch: Fetch) -> None:
        if self._fetches.pop(fetch.handle, None) is not None:
            self._keys_bytes -= len(fetch.legs.keys)

    def _has(self, key: bytes) -> bool:
        entry = self._store.catalog.entries.get(key)
        return entry is not None and bool(entry.refs)

    def _find(self, fetch: Fetch, leg: Leg) -> bool:
        """Ask how far the tiers reach in a leg."""
        fetch.leg, fetch.at, fetch.end = leg, leg.start, len(leg.keys) // KEY_BYTES
        fetch.runs = []
        return self._asker.ask(
            lambda id_: Find(id_, leg.keys, leg.start), lambda answer: self._found(fetch, answer)
        )

    def _end_leg(self, fetch: Fetch) -> None:
        """Go on with the next leg of a fetch; end it where there is none."""
        fetch.legs.end(fetch.end)
        leg = fetch.legs.next(self._has)
        if leg is None or not self._find(fetch, leg):
            self._end(fetch)

    def _found(self, fetch: Fetch, answer: TierAnswer | None) -> None:
        if fetch.is_over:
            return
        runs = answer.runs if isinstance(answer, Found) else ()
        fetch.runs = _ends(fetch.at, runs)
        fetch.end = min(fetch.end, fetch.runs[-1][0]) if fetch.runs else fetch.at
        if fetch.at >= fetch.end:
            self._end_leg(fetch)
        elif fetch.is_reading:
            self._go_on(fetch)
        else:
            (self._queue if fetch.client is not None else self._patient).append(fetch)
            self._pump()

    def _pump(self) -> None:
        """Let those have their turn that wait for one; one that ends at once calls this again."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self.in_flight < self._options.in_flight_max and (fetch := self._next()):
                fetch.is_reading = True
                self.in_flight += 1
                self._prefetching += fetch.client is None
                self._go_on(fetch)
        finally:
            self._is_pumping = False

    def _next(self) -> Fetch | None:
        """Return whose turn it is: a prefetch when no engine waits, and never in all places."""
        if self._queue:
            return self._queue.popleft()
        if self._patient and self._prefetching < max(1, self._options.in_flight_max // 2):
            return self._patient.popleft()
        return None

    def _go_on(self, fetch: Fetch) -> None:
        """Ask for the next batches; end the leg where there are none."""
        if not fetch.runs:
            # It is not known yet how far the tiers reach in this leg.
            return
        while not fetch.is_over and fetch.at < fetch.end and fetch.out < BATCHES_AT_ONCE:
            other = self._reading.get(fetch.key(fetch.at))
            if other is not None:
                # Another fetch reads it: wait until that batch is over, then look again.
                if fetch not in other.followers:
                    other.followers.append(fetch)
                return
            self._read(fetch)
        if not fetch.is_over and fetch.at >= fetch.end and not fetch.out:
            self._end_leg(fetch)

    def _read(self, fetch: Fetch) -> None:
        start, (stop, tier) = fetch.at, self._stretch(fetch)
        keys = fetch.leg.keys[start * KEY_BYTES : stop * KEY_BYTES]
        try:
            reserved = self._store.reserve(
                fetch.owner,
                fetch.namespace,
                keys,
                parent=fetch.legs.parents(fetch.leg, start),
                writers=(fetch.owner,) * len(fetch.shard_bytes),
                now_s=self._clock.monotonic_s(),
                request=0,
                tenant=fetch.tenant,
                groups=fetch.legs.groups(fetch.leg, stop - start),
            )
        except NotRegisteredError:
            fetch.end = fetch.at
            return
        fetch.at = stop
        states = reserved.states
        # Nobody can use what lies behind a chunk that an engine is storing, or behind no memory.
        gap = next(
            (i for i, s in enumerate(states) if s in {ChunkState.BUSY, ChunkState.FULL}), None
        )
        if gap is not None:
            fetch.end = min(fetch.end, start + gap)
        if not reserved.reservation:
            return
        places = [start + i for i, state in enumerate(states) if state == ChunkState.RESERVED]
        batch = Batch(fetch, reserved.reservation, places)
        wanted = b"".join([fetch.key(place) for place in places])
        is_sent = self._asker.ask(
            lambda id_: Read(
                id_,
                tier,
                fetch.namespace,
                fetch.shard_bytes,
                self._options.codec,
                wanted,
                reserved.offsets,
            ),
            lambda answer: self._done(batch, answer),
        )
        if not is_sent:
            self._drop(batch)
            fetch.end = min(fetch.end, start)
            return
        fetch.out += 1
        for place in places:
            self._reading[fetch.key(place)] = batch

    def _stretch(self, fetch: Fetch) -> tuple[int, int]:
        """Return where the next batch ends, and the tier that has it."""
        end, tier = next(run for run in fetch.runs if run[0] > fetch.at)
        chunk_bytes = sum(fetch.shard_bytes)
        count = max(1, min(BATCH_BYTES // chunk_bytes, self._asker.batch_max))
        stop = min(end, fetch.end, fetch.at + count)
        for place in range(fetch.at + 1, stop):
            if fetch.key(place) in self._reading:
                return place, tier
        return stop, tier

    def _done(self, batch: Batch, answer: TierAnswer | None) -> None:
        fetch = batch.fetch
        fetch.out -= 1
        keys = [fetch.key(place) for place in batch.places]
        for key in keys:
            self._reading.pop(key, None)
        count = answer.count if isinstance(answer, ReadDone) and not batch.is_void else 0
        if isinstance(answer, ReadDone) and count == len(keys):
            self._commit(batch, keys, answer.seals)
            fetch.came += keys
            self._meters.fetched_chunks += count
        elif answer is not None:
            # Without an answer the slots wait for the end of the process that may write to them.
            self._drop(batch)
            fetch.end = min(fetch.end, batch.places[count])
            # Slots of one reservation become visible together: what was good is read once more.
            fetch.at = min(fetch.at, batch.places[0])
        else:
            fetch.end = min(fetch.end, batch.places[0])
        for follower in batch.followers:
            self._go_on(follower)
        self._go_on(fetch)

    def _commit(self, batch: Batch, keys: list[bytes], seals: tuple[bytes, ...]) -> None:
        owner = batch.fetch.owner
        with contextlib.ExitStack() as stack:
            if not self._options.is_retaining and batch.fetch.client is not None:
                stack.enter_context(coming_as_oldest(self._store, owner, keys))
            for shard, sealed in enumerate(seals):
                self._store.commit(owner, batch.reservation, shard, sealed)

    def _drop(self, batch: Batch) -> None:
        for shard in range(len(batch.fetch.shard_bytes)):
            self._store.abort(batch.fetch.owner, batch.reservation, shard)

    def _end(self, fetch: Fetch) -> None:
        fetch.is_over = True
        if fetch.is_reading:
            self.in_flight -= 1
            self._prefetching -= fetch.client is None
            self._meters.fetch_s.observe(self._clock.monotonic_s() - fetch.began_s)
        waiters, fetch.waiters = fetch.waiters, []
        for waiter in waiters:
            self._tell(fetch, waiter)
        if fetch.on_end is not None:
            self._forget(fetch)
            fetch.on_end()
        self._pump()

    def _expire(self, fetch: Fetch, waiter: Waiter) -> None:
        if waiter in fetch.waiters:
            self._meters.fetches_late += 1
            fetch.waiters.remove(waiter)
            self._tell(fetch, waiter)

    def _tell(self, fetch: Fetch, waiter: Waiter) -> None:
        if waiter.alarm is not None:
            waiter.alarm.cancel()
        # Over a newer connection nobody waits for this answer.
        client = fetch.client
        if client is not None and client.connection is waiter.connection:
            waiter.connection.push(self._answer(client, fetch, waiter.request_id))

    def _answer(self, client: Client, fetch: Fetch, request_id: int) -> LookupReply:
        if fetch.is_over:
            self._forget(fetch)
        try:
            hit = look_again(
                self._store,
                client.owner,
                fetch.namespace,
                fetch.legs.keys,
                request=request_id,
                found=fetch.found,
            )
        except NotRegisteredError:
            return LookupReply(request_id, 0, 0, b"")
        if not self._options.is_retaining and hit.lease:
            stay_oldest(self._store, fetch.came)
        return LookupReply(request_id, hit.count, hit.lease, hit.refs)


def _ends(start: int, runs: tuple[Run, ...]) -> list[tuple[int, int]]:
    found = []
    for run in runs:
        start += run.count
        found.append((start, run.tier))
    return found
