"""What memory answers is told to the tiers, so that the busiest chunks are not the first to leave.

A lookup that memory answers alone asks no tier, and to a tier its chunks would look unused: the
system prompt that everybody sends would leave the disk first. A lookup only notes its keys; a
timer sends them on, a prefix no more often than every few seconds, so much at a time as costs the
tier process some milliseconds. What is too much is not told, and counted. Used by `tiers`, on the
control loop.
"""

from kvcellar.clock import Clock
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.tier_messages import TierAnswer, Touch, Touched
from kvcellar.server.tier_line import TierAsker
from kvcellar.server.tier_meters import TierMeters

__all__ = ["AGAIN_S", "NOTED_MAX", "NOTED_MAX_BYTES", "TOUCHED_MAX", "Touches"]

NOTED_MAX = 1_024
"""Prefixes that wait to be told."""
NOTED_MAX_BYTES = 4 * 1024 * 1024
TOUCHED_MAX = 8_192
"""Chunks that are told at once; of a longer prefix its beginning."""
AGAIN_S = 10.0
"""How long a prefix that was told counts as used."""


class Touches:
    """The prefixes that were used and of which the tiers do not know yet."""

    def __init__(self, meters: TierMeters, asker: TierAsker, clock: Clock) -> None:
        """Prepare.

        Args:
            meters: counted in.
            asker: passes questions to the tier process.
            clock: says when a prefix may be told again.
        """
        self._meters = meters
        self._asker = asker
        self._clock = clock
        # By a prefix's last key, which names all of it: the keys, and how many of them.
        self._noted: dict[bytes, tuple[bytes, int]] = {}
        self._noted_bytes = 0
        self._told: dict[bytes, float] = {}
        self._is_out = False

    def note(self, keys: bytes, count: int) -> None:
        """Note that the leading `count` of some keys were used; costs a microsecond."""
        last = keys[(count - 1) * KEY_BYTES : count * KEY_BYTES]
        if last in self._noted:
            return
        if len(self._noted) >= NOTED_MAX or self._noted_bytes + len(keys) > NOTED_MAX_BYTES:
            self._meters.untold_lookups += 1
            return
        self._noted[last] = (keys, count)
        self._noted_bytes += len(keys)

    def send(self) -> None:
        """Tell some of them, the first that were used first; called by a timer."""
        now_s = self._clock.monotonic_s()
        while self._told and now_s - next(iter(self._told.values())) >= AGAIN_S:
            del self._told[next(iter(self._told))]
        if self._is_out or not self._noted:
            return
        prefixes, room = [], TOUCHED_MAX
        for last, (keys, count) in list(self._noted.items()):
            told = min(count, TOUCHED_MAX)
            if last not in self._told:
                if told > room:
                    break
                room -= told
                prefixes.append(keys[: told * KEY_BYTES])
                self._told[last] = now_s
            del self._noted[last]
            self._noted_bytes -= len(keys)
        if prefixes:
            self._ask(prefixes)

    def life_ended(self) -> None:
        """Tell the next life of the tier process everything anew."""
        self._told.clear()

    def _ask(self, prefixes: list[bytes]) -> None:
        def answered(answer: TierAnswer | None) -> None:
            self._is_out = False
            if isinstance(answer, Touched):
                self._meters.told_chunks += sum(map(len, prefixes)) // KEY_BYTES
            else:
                self._meters.untold_lookups += len(prefixes)

        self._is_out = self._asker.ask(lambda id_: Touch(id_, tuple(prefixes)), answered)
        if not self._is_out:
            answered(None)
