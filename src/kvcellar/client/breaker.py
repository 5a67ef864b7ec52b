"""Tells when a server that does not answer should not be asked any more.

A frozen server costs each request its whole deadline. After some silent deadlines in a row the
breaker opens: callers go on without the cache at once, and the link's keeper alone goes on asking,
until an answer comes. Touched by every thread that calls the server.
"""

import threading

__all__ = ["Breaker"]


class Breaker:
    """Counts silent deadlines in a row; thread-safe."""

    __slots__ = ("_lock", "_silences", "_silences_max", "is_open")

    def __init__(self, silences_max: int = 3) -> None:
        self._lock = threading.Lock()
        self._silences = 0
        self._silences_max = silences_max
        self.is_open = False

    def note_silence(self) -> bool:
        """Note that a deadline passed without an answer; True when that opened the breaker."""
        with self._lock:
            self._silences += 1
            if self.is_open or self._silences < self._silences_max:
                return False
            self.is_open = True
            return True

    def note_answer(self) -> bool:
        """Note an answer, on time or late; True when that closed the breaker."""
        if not self._silences:
            # The usual case costs a step's thread no lock; a silence in the same moment counts.
            return False
        with self._lock:
            self._silences = 0
            was_open, self.is_open = self.is_open, False
            return was_open
