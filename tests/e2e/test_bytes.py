"""What is stored are the right bytes, whatever happens to the blocks, and damage is found.

Two engines share a server. 'late' has few blocks and its copies start two seconds late, so that
preemption, aborts and the reuse of blocks come between a chunk's computation and its copy; 'plain'
has room, copies at once, and computes the same chunks afresh to compare with. Load policy: the
default, 'recompute'.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from tests.e2e.cellar import Cellar
from tests.e2e.device import DEVICE
from tests.e2e.engine import Engine, assert_same_answer, start_together
from tests.e2e.node import own_transfer, watched
from tests.e2e.peek import CHUNK_TOKENS, Peek, Place
from tests.e2e.processes import eventually
from tests.e2e.tiny_model import KV_BYTES_A_TOKEN

pytestmark = pytest.mark.e2e

CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_A_TOKEN
COPY_DELAY_S = 2.0
HEARTBEAT_S = 0.5
BACK_S = 4 * HEARTBEAT_S + 3.0
"""Until hits begin again after a restart, on a machine that is busy."""
LATE_TOKENS = 24 * 128
ROOM_TOKENS = 160 * 128


@dataclass
class Node:
    """One server, the engine whose copies are late, and the one to compare with."""

    cellar: Cellar
    late: Engine
    plain: Engine

    def restart(self) -> None:
        """Start the server again, and wait until both engines can store there.

        An engine binds its namespace with a request after its connection is back, and that request
        itself may end before anything of it could be stored.
        """
        self.cellar.start_and_wait()
        eventually(self._is_bound, BACK_S, what="both engines back")

    def _is_bound(self) -> bool:
        for engine in (self.late, self.plain):
            engine.complete([3], max_tokens=1)
        instances = self.cellar.status()["kvcellar"]["instances"]
        return len(instances) == 2 and all(instance["namespace"] for instance in instances)


@pytest.fixture(scope="module")
def shared(tiny, folder, stopping) -> Node:
    cellar = stopping(Cellar("node", folder=folder, l1_gb=1))
    cellar.start_and_wait()
    delayed = {"testing.copy_delay_s": COPY_DELAY_S, "save_decode_cache": True}
    late = Engine(
        "late",
        tiny,
        folder=folder,
        transfer=own_transfer(cellar, heartbeat_s=HEARTBEAT_S, **delayed),
        options=[
            *("--max-model-len", "2048", "--max-num-batched-tokens", "512"),
            *("--num-gpu-blocks-override", DEVICE.blocks(LATE_TOKENS), "--max-num-seqs", "8"),
        ],
    )
    plain = Engine(
        "plain",
        tiny,
        folder=folder,
        transfer=own_transfer(cellar, eager_prefetch=True, heartbeat_s=HEARTBEAT_S),
        options=[
            *("--max-model-len", "2048"),
            *("--num-gpu-blocks-override", DEVICE.blocks(ROOM_TOKENS)),
        ],
    )
    start_together(stopping(late), stopping(plain))
    return Node(cellar, late, plain)


@pytest.fixture
def node(shared) -> Node:
    """The module's node with nothing cached anywhere."""
    if not shared.cellar.is_alive:
        shared.restart()
    shared.cellar.wait_until_quiet(10 * COPY_DELAY_S)
    shared.cellar.clear()
    for engine in (shared.late, shared.plain):
        if engine.is_alive:
            engine.reset_prefix_cache()
    return shared


@pytest.fixture
def peek(node) -> Iterable[Peek]:
    with Peek(node.cellar, shard_bytes=[CHUNK_BYTES]) as peek:
        yield peek


def test_late_copies_store_what_was_computed(node, peek, prompt, at_once):
    source = random.Random(5)
    before = node.late.counters()

    def ask(tokens: list[int], max_tokens: int) -> list[int]:
        return [*tokens, *node.late.complete(tokens, max_tokens=max_tokens).tokens]

    def hang_up(tokens: list[int], after_tokens: int) -> list[int]:
        node.late.abort_stream(tokens, after_tokens, max_tokens=600)
        return tokens

    # Two fit into the pool when they begin and not when they have grown. Three are asked for: one
    # that is all but done when the next arrives leaves two that begin together.
    sequences = at_once([lambda: ask(prompt(1150), 600)] * 3)
    assert (node.late.counters() - before).preemptions > 0
    actions = []
    for index in range(24):
        tokens, count = prompt(source.randrange(300, 1200)), source.randrange(1, 300)
        if index % 3 == 2:
            actions.append(lambda tokens=tokens, count=count: hang_up(tokens, count % 9))
        else:
            actions.append(lambda tokens=tokens, count=count: ask(tokens, count))
    sequences += at_once(actions)
    eventually(node.late.is_idle, 10, what="an idle engine")
    node.cellar.wait_until_quiet(20 * COPY_DELAY_S)

    stored = peek.stored(sequences)
    assert len(stored) == node.cellar.objects() >= 10, "a chunk is stored that nobody asked for"

    node.cellar.clear()
    for tokens in sequences:
        node.plain.complete(tokens[:2040], max_tokens=1)
    node.cellar.wait_until_quiet()
    afresh = peek.stored(sequences)
    assert stored.keys() <= afresh.keys()
    for key, data in stored.items():
        np.testing.assert_allclose(
            np.frombuffer(data, np.float32),
            np.frombuffer(afresh[key], np.float32),
            atol=DEVICE.kv_tolerance,
        )


def flip_first_bit(peek: Peek, place: Place, _: Place) -> None:
    peek.flip_bit(place, 0)


def flip_last_bit(peek: Peek, place: Place, _: Place) -> None:
    peek.flip_bit(place, place.size_bytes * 8 - 1)


def flip_sign_in_the_middle(peek: Peek, place: Place, _: Place) -> None:
    peek.flip_bit(place, (place.size_bytes // 8 * 4 + 3) * 8 + 7)


def zero(peek: Peek, place: Place, _: Place) -> None:
    peek.write(place, bytes(place.size_bytes))


def shift_by_one_float(peek: Peek, place: Place, _: Place) -> None:
    data = peek.read(place)
    peek.write(place, data[4:] + data[:4])


def swap_with_other(peek: Peek, place: Place, other: Place) -> None:
    mine, others = peek.read(place), peek.read(other)
    peek.write(place, others)
    peek.write(other, mine)


def keep_what_was_there_before(peek: Peek, place: Place, other: Place) -> None:
    """A stale generation: whole, well-formed KV of another chunk that used to lie there."""
    peek.write(place, peek.read(other))


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize(
    "damage",
    [
        flip_first_bit,
        flip_last_bit,
        flip_sign_in_the_middle,
        zero,
        shift_by_one_float,
        swap_with_other,
        keep_what_was_there_before,
    ],
)
def test_damage_is_found_counted_and_recomputed(
    node, peek, prompt, damage: Callable[[Peek, Place, Place], None], chunk
):
    tokens, others = prompt(900), prompt(300)
    expected = node.plain.complete(tokens)
    node.plain.complete(others)
    node.cellar.wait_for_objects(4)
    places = [place for (place,) in peek.find(peek.keys(tokens))]
    ((other,),) = peek.find(peek.keys(others))
    damaged = node.cellar.metric("kvcellar_damaged_chunks_total")
    damage(peek, places[chunk], other)
    node.plain.reset_prefix_cache()

    answer, counted = watched(node.plain, lambda: node.plain.complete(tokens))

    assert counted.external_hits == 768, "the load was tried"
    assert_same_answer(answer, expected)
    eventually(
        lambda: node.cellar.metric("kvcellar_damaged_chunks_total") == damaged + 1,
        5,
        what="one more damaged chunk counted",
    )
    # Stored anew: the next one finds all of it, and it is right.
    node.cellar.wait_for_objects(4)
    node.plain.reset_prefix_cache()
    again, counted = watched(node.plain, lambda: node.plain.complete(tokens))
    assert counted.external_hits == 768
    assert_same_answer(again, expected)
    assert node.cellar.metric("kvcellar_damaged_chunks_total") == damaged + 1
    assert node.plain.is_alive


def test_an_abort_while_loading_frees_lease_and_blocks(node, prompt, at_once):
    """The blocks that a late load still writes are nobody else's until it has ended."""
    tokens = prompt(1300)
    others = [prompt(700) for _ in range(6)]
    expected = [node.plain.complete(other) for other in others]
    node.plain.complete(tokens)
    node.cellar.wait_for_objects(5 + 6 * 2)
    node.cellar.clear()
    node.plain.reset_prefix_cache()
    node.plain.complete(tokens)
    node.cellar.wait_for_objects(5)
    before = node.late.counters()
    since: list[float] = []

    def is_loading() -> bool:
        """A lookup has its lease for a step of the scheduler, a late load much longer."""
        if node.cellar.holdings()["leases"] != 1:
            since.clear()
            return False
        since.append(time.monotonic())
        return since[-1] - since[0] > COPY_DELAY_S / 3

    node.late.hang_up(tokens, when=is_loading)
    answers = at_once([lambda other=other: node.late.complete(other) for other in others])

    for answer, wanted in zip(answers, expected, strict=True):
        assert_same_answer(answer, wanted)
    assert (node.late.counters() - before).external_hits == 1280
    eventually(node.late.is_idle, 5, what="an idle engine")
    node.cellar.wait_until_quiet(10 * COPY_DELAY_S)
    node.late.reset_prefix_cache()


def test_a_load_does_not_fail_because_the_server_dies(node, prompt, at_once):
    tokens = prompt(1300)
    expected = node.plain.complete(tokens)
    node.cellar.wait_for_objects(5)

    def kill() -> None:
        eventually(lambda: node.cellar.holdings()["leases"] == 1, 10, what="a load's lease")
        node.cellar.kill()

    (hit, counted), _ = at_once(
        [lambda: watched(node.late, lambda: node.late.complete(tokens)), kill]
    )

    assert counted.external_hits == 1280
    assert_same_answer(hit, expected)
    # Loaded, not recomputed: the old arena is mapped for as long as a copy reads it.
    assert "load failed" not in node.late.output()


def test_a_store_of_the_last_boot_never_reaches_the_next(node, prompt, at_once):
    tokens = prompt(1000)

    def kill() -> None:
        node.cellar.wait_for_writers()
        node.cellar.kill()

    at_once([lambda: node.late.complete(tokens, max_tokens=1), kill])
    node.restart()
    time.sleep(COPY_DELAY_S)

    assert node.cellar.objects() == 0
    node.cellar.wait_until_quiet()
    node.late.reset_prefix_cache(3 * COPY_DELAY_S)


def test_an_engine_killed_while_it_stores_leaves_nothing(node, peek, prompt, at_once):
    """The last test of the module: it ends the engine whose copies are late."""
    tokens, other = prompt(1000), prompt(600)
    node.plain.complete(other)
    node.cellar.wait_for_objects(2)
    used = node.cellar.metric("kvcellar_l1_used_bytes")

    def kill() -> None:
        node.cellar.wait_for_writers()
        node.late.kill_all()
        node.cellar.wait_until_quiet()

    at_once([lambda: node.late.complete_or_break(tokens), kill])

    assert node.cellar.objects() == 2
    assert node.cellar.metric("kvcellar_l1_used_bytes") == used
    assert peek.find(peek.keys(tokens)) == []
    answer = node.plain.complete(tokens)
    node.cellar.wait_for_objects(5)
    node.plain.reset_prefix_cache()
    hit, counted = watched(node.plain, lambda: node.plain.complete(tokens))
    assert counted.external_hits == 768
    assert_same_answer(hit, answer)
