"""Requests in the background of a fault: each answer is compared, and none may fail.

Threads ask an engine for prompts whose answers are known, and now and then empty the engine's own
cache so that lookups, loads and stores go on all the time. Used by the tests of faults.
"""

import random
import threading
import time
from collections.abc import Sequence
from typing import Self

import httpx
from tests.e2e.engine import Answer, Engine, assert_same_answer

__all__ = ["Load"]

RESET_EVERY = 6
THREADS = 2


class Load:
    """Runs while its `with` block does; leaving the block raises what went wrong in it.

    Attributes:
        count: requests answered so far.
        slowest_s: the longest that one took.
    """

    def __init__(self, engine: Engine, cases: Sequence[tuple[list[int], Answer]]) -> None:
        """Prepare it.

        Args:
            engine: whom to ask.
            cases: prompts and the answers that they must get.
        """
        self._engine = engine
        self._cases = list(cases)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed),), daemon=True)
            for seed in range(THREADS)
        ]
        self.count = 0
        self.slowest_s = 0.0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"
        if self._errors:
            raise self._errors[0]

    def go_on(self, seconds: float) -> None:
        """Let it run for a while; ends early, with the error, when a request goes wrong."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._errors:
            time.sleep(0.02)
        if self._errors:
            raise self._errors[0]

    def _run(self, source: random.Random) -> None:
        try:
            while not self._is_over.is_set():
                self._ask(source)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread.
            self._errors.append(error)
            self._is_over.set()

    def _ask(self, source: random.Random) -> None:
        tokens, expected = source.choice(self._cases)
        started = time.monotonic()
        answer = self._engine.complete(tokens)
        took_s = time.monotonic() - started
        assert_same_answer(answer, expected)
        with self._lock:
            self.count += 1
            self.slowest_s = max(self.slowest_s, took_s)
            is_time_to_reset = self.count % RESET_EVERY == 0
        if is_time_to_reset:
            # Whether it succeeds depends on what runs just now; both are part of the load.
            with httpx.Client(base_url=self._engine.http.base_url, timeout=30) as client:
                client.post("/reset_prefix_cache").raise_for_status()
