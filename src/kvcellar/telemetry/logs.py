"""Log lines: a constant event name and fields as key=value, on the standard library's logging.

A constant event can be searched and counted, its fields can be cut out by any tool, and a process
that kvcellar is a guest in (an engine) keeps its own logging setup: only the commands call
`setup_logging`. Every package takes its `EventLog` from here. `OncePer` is for events that a peer
can cause at will, so that nobody fills a disk by knocking.
"""

import logging
import sys
from collections.abc import Mapping

from kvcellar.clock import Clock

__all__ = ["EventLog", "OncePer", "format_fields", "setup_logging", "speak_through"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_SECRET = frozenset({"authorization", "cache_salt", "password", "secret", "token", "token_ids"})
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@/._:+-,[]%#")


def setup_logging(level: str) -> None:
    """Send this process's log lines to standard error.

    Args:
        level: DEBUG, INFO, WARNING or ERROR.
    """
    logging.basicConfig(level=level, format=_FORMAT, stream=sys.stderr, force=True)


def speak_through(host: str) -> None:
    """Have the program that kvcellar is a guest in print kvcellar's lines as its own.

    A library's loggers have no handler there: warnings would come out bare, without level, time
    or process, and what is less would be lost. May be called any number of times.

    Args:
        host: name of the host's logger, set up already.
    """
    ours, hosts = logging.getLogger("kvcellar"), logging.getLogger(host)
    if not hosts.handlers:
        return
    for handler in hosts.handlers:
        ours.addHandler(handler)
    ours.setLevel(hosts.getEffectiveLevel())


def format_fields(fields: Mapping[str, object]) -> str:
    """Return fields as `key=value`, values quoted where they would be ambiguous.

    A field whose name says that it is a secret is masked, so that a slip in a caller cannot put
    one on a disk.
    """
    return " ".join(
        f"{name}=***" if name in _SECRET else f"{name}={_quoted(value)}"
        for name, value in fields.items()
    )


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and _PLAIN.issuperset(text):
        return text
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', "'") + '"'


class EventLog:
    """A logger that takes an event and its fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log what only someone who debugs kvcellar itself wants to see."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log what an operator would miss: a start, a stop, an arrival, a loss."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log what an operator should look into; kvcellar goes on."""
        self._log(logging.WARNING, event, fields)

    def error(
        self, event: str, *, exception: BaseException | None = None, **fields: object
    ) -> None:
        """Log a failure once, where it is handled.

        Args:
            event: the constant name.
            exception: its traceback is printed as well.
            fields: what identifies the case.
        """
        self._log(logging.ERROR, event, fields, exception)

    def _log(
        self,
        level: int,
        event: str,
        fields: Mapping[str, object],
        exception: BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            text = f"{event} {format_fields(fields)}" if fields else event
            # The line names the caller's file: this method and `info` above it are skipped.
            self._logger.log(level, "%s", text, exc_info=exception, stacklevel=3)


class OncePer:
    """Lets an event through once an interval for each of a bounded number of subjects."""

    def __init__(self, clock: Clock, interval_s: float, *, subjects_max: int = 64) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._subjects_max = subjects_max
        self._seen: dict[str, tuple[float, int]] = {}

    def admit(self, subject: str) -> int | None:
        """Return how many were held back since the last that passed, or None to hold this back."""
        now_s = self._clock.monotonic_s()
        last = self._seen.get(subject)
        if last is not None and now_s - last[0] < self._interval_s:
            self._seen[subject] = (last[0], last[1] + 1)
            return None
        if last is None and len(self._seen) >= self._subjects_max:
            del self._seen[min(self._seen, key=lambda name: self._seen[name][0])]
        self._seen[subject] = (now_s, 0)
        return last[1] if last is not None else 0
