"""Finds out, in the background, what a folder holds at start.

First everything is counted (names and sizes), so that the cap can be kept; until then nothing is
stored and unknown keys are looked for one by one. Then the headers are read, which says whose each
chunk is and finds those that were cut or swapped. Both in slices, on one thread, with pauses: a
folder may hold a million files, and reads go first.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvcellar.telemetry.logs import EventLog
from kvcellar.tiers.chunk_file import DamagedRecordError, read_header
from kvcellar.tiers.folder import Folder
from kvcellar.tiers.index import ChunkIndex, Presence

__all__ = ["Census"]

_SLICE = 256
_PAUSE_S = 0.001

_Thing = TypeVar("_Thing")

_log = EventLog("kvcellar.tiers")


class Census:
    """One count of one folder."""

    def __init__(
        self,
        folder: Folder,
        index: ChunkIndex,
        *,
        on_counted: Callable[[], None],
        on_damage: Callable[[bytes, str], None],
        discard: Callable[[bytes], object] | None,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            folder: what to read.
            index: takes in what is found.
            on_counted: called once on the thread, when the sums are complete and before anything
                is stored; may raise OSError.
            on_damage: called with the key and the reason for a record that does not pass.
            discard: called for every chunk where none is to be kept; None keeps them.
        """
        self._folder = folder
        self._index = index
        self._on_counted = on_counted
        self._on_damage = on_damage
        self._discard = discard
        self._stopping = threading.Event()
        self._counted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tier-census", daemon=True)

    def start(self) -> None:
        """Begin; call it once."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and wait for the end."""
        self._stopping.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is counted; False when that took longer."""
        return self._counted.wait(timeout_s)

    def _run(self) -> None:
        try:
            found = self._count()
            if not self._stopping.is_set():
                self._order(found)
                self._index.complete()
                self._on_counted()
        except OSError as error:
            # Nothing is stored into a folder that cannot be counted; reads go on.
            _log.error("folder not counted", base_path=self._folder.base, reason=error.strerror)
            return
        finally:
            self._counted.set()
        self._read_headers(found)

    def _count(self) -> list[tuple[float, bytes]]:
        """Take everything in; returns when each chunk was last used, and its key."""
        found: list[tuple[float, bytes]] = []
        for seen in self._slowly(self._folder.walk()):
            if seen.kind == "folder":
                self._index.set_fixed(seen.name, seen.occupied_bytes)
            elif seen.kind == "stray":
                self._index.add_stray(seen.occupied_bytes)
            elif self._discard is not None:
                self._discard(bytes.fromhex(seen.name))
            else:
                key = bytes.fromhex(seen.name)
                self._index.found(key, seen.occupied_bytes)
                found.append((seen.used_s, key))
        return found

    def _order(self, found: list[tuple[float, bytes]]) -> None:
        found.sort(reverse=True)
        for start in range(0, len(found), _SLICE):
            self._index.order_found(key for _, key in found[start : start + _SLICE])

    def _read_headers(self, found: list[tuple[float, bytes]]) -> None:
        """Learn whose each chunk is; newest first, as those are asked for."""
        for _, key in self._slowly(found):
            if self._index.look(key) is not Presence.THERE:
                continue
            try:
                self._index.name(read_header(self._folder.path(key), key))
            except DamagedRecordError as damage:
                self._on_damage(key, str(damage))
            except OSError as error:
                # A read will meet it again, and report it.
                _log.debug("header not read", reason=error.strerror)

    def _slowly(self, things: Iterable[_Thing]) -> Iterator[_Thing]:
        """Yield until told to stop, with a pause after each slice."""
        for number, thing in enumerate(things, 1):
            if self._stopping.is_set():
                return
            yield thing
            if number % _SLICE == 0:
                self._stopping.wait(_PAUSE_S)
