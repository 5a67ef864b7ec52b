"""The load beside which lookups are measured: a store of real bytes and a scraper.

It begins before the measurement does, and what it did is read from what it printed: a load that
was slower than asked for is part of the result.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcellar.bench.figures import median
from kvcellar.bench.programs import Program, Programs

__all__ = ["Load", "rates"]

_READY_S = 60.0


class Load:
    """A running load."""

    def __init__(self, storing: Program, scraping: Program) -> None:
        """Begin to count from now on."""
        self._programs = (storing, scraping)
        self._skipped = [len(rates(_printed(program))) for program in self._programs]

    @classmethod
    @contextmanager
    def running(
        cls, programs: Programs, *, storing: Sequence[str], metrics_url: str
    ) -> Iterator["Load"]:
        """Run a command that stores, and a scraper of a page, and end both at the end.

        Raises:
            BenchError: one of them does not come up.
        """
        scraping = [sys.executable, "-m", "kvcellar.bench.background", "scrape", metrics_url]
        started = [
            programs.start("load-store", storing),
            programs.start("load-scrape", scraping),
        ]
        try:
            for program in started:
                programs.wait_until(program, lambda p=program: _printed(p), timeout_s=_READY_S)  # type: ignore[misc]
            yield cls(*started)
        finally:
            for program in started:
                programs.stop(program)

    def describe(self) -> str:
        """Return what it did since it was made, for a note below a table."""
        stored, scraped = (
            rates(_printed(program))[skipped:]
            for program, skipped in zip(self._programs, self._skipped, strict=True)
        )
        if not stored or not scraped:
            return "the load stood still"
        return f"{median(stored):.2f} GB/s stored, {median(scraped):.0f} scrapes a second"


def rates(text: str) -> list[float]:
    """Return the numbers in a load's output, one a second; other lines are its log."""
    return [
        float(line) for line in text.splitlines() if line.replace(".", "", 1).strip().isdecimal()
    ]


def _printed(program: Program) -> str:
    text = program.log.read_text(encoding="utf-8", errors="replace")
    return text if rates(text) else ""
