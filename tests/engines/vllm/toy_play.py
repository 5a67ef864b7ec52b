"""A random day of an engine: arrivals, aborts, resets, late and failing copies, few blocks."""

import random

from tests.engines.vllm.toy_engine import BLOCK_TOKENS, ToyEngine
from tests.engines.vllm.toy_model import VOCABULARY
from tests.engines.vllm.toy_worker import Delays

PROMPT_MAX = 400
REQUESTS_MAX = 30


class Day:
    """Everything that a seed decides."""

    def __init__(self, seed, groups=1):
        self.chance = random.Random(seed)
        self.groups = max(1, groups)
        self.blocks = self.pick(24, 40, 64) * self.groups
        fails = self.chance.random() < 0.3
        self.delays = Delays(
            load=lambda: self.pick(0, 0, 1, 3),
            store=lambda: self.pick(0, 1, 2, 6),
            load_fails=lambda: fails and self.chance.random() < 0.3,
            store_fails=lambda: fails and self.chance.random() < 0.3,
        )
        self.texts = [
            [self.chance.randrange(VOCABULARY) for _ in range(PROMPT_MAX)] for _ in range(3)
        ]

    def pick(self, *choices):
        return self.chance.choice(choices)

    def engine(self, model, port, options, specs):
        return ToyEngine(
            model,
            port,
            specs=specs,
            blocks=self.blocks,
            ranks=self.pick(1, 1, 2) * (len(port) if isinstance(port, list) else 1),
            is_shared=self.pick(True, False),
            is_async=self.pick(True, False),
            is_second_runner=self.pick(True, False),
            step_tokens=self.pick(20, 64, 128),
            running_max=self.pick(2, 6),
            prefix_caching=self.pick(True, True, False),
            delays=self.delays,
            options={
                "kvcellar.save_decode_cache": self.pick(True, False),
                "kvcellar.eager_prefetch": self.pick(True, False),
                **options,
            },
        )

    def prompt(self):
        """Return a prompt that shares its beginning with others, and sometimes its middle not."""
        longest = min(PROMPT_MAX, (self.blocks // self.groups - 3) * BLOCK_TOKENS - 30)
        prompt = self.pick(*self.texts)[: self.chance.randrange(1, longest)]
        if self.chance.random() < 0.3:
            prompt[self.chance.randrange(len(prompt))] = 5
        return prompt


def play(model, port, seed, *, actions=250, disturb=None, options=None, specs=()):
    """Live through a seed's day, and return the engine after everything was found in order.

    Args:
        model: a toy model's folder.
        port: a server's, or a list of several servers'.
        seed: decides everything.
        actions: how many steps, arrivals and so on.
        disturb: called before each, to make the server misbehave.
        options: of the connector.
        specs: of the KV groups, see `make_spec`.
    """
    day = Day(seed, len(specs))
    with day.engine(model, port, options or {}, specs) as engine:
        if day.chance.random() < 0.8:
            engine.wait_bound()
        ids = []
        for _ in range(actions):
            if disturb is not None:
                disturb()
            _act(day, engine, ids)
        engine.settle()
        look_back(engine)
        return engine


def look_back(engine):
    """Ask everything once more without vLLM's own cache: all that was stored is loaded and seen."""
    engine.reset()
    for asked in list(engine.asked.values()):
        engine.add(asked.prompt + asked.said, 1)
    engine.settle()


def _act(day, engine, ids):
    what = day.chance.random()
    if what < 0.25 and len(ids) < REQUESTS_MAX:
        params = day.pick(None, None, None, {"kvcellar.skip_save": True})
        ids.append(engine.add(day.prompt(), day.pick(1, 2, 20), params=params))
    elif what < 0.3 and ids:
        engine.abort(day.pick(*ids))
    elif what < 0.38:
        engine.scheduler.reset_prefix_cache(reset_connector=day.chance.random() < 0.1)
    else:
        engine.step()
