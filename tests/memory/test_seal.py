"""The seal against its definition in plain Python, and against every way a slot can be wrong."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory import seal as module
from kvcellar.memory.seal import (
    ROW_WORDS,
    copy_and_sum,
    finish,
    kernels,
    lane_weights,
    partial_sum,
    seal,
    warm_up,
)

MASK = (1 << 64) - 1
KEY = bytes(range(32))
ROW_BYTES = 4 * ROW_WORDS
TILE_BYTES = 64 * ROW_BYTES


def mix(index):
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def defined_sum(data, first):
    """The sum as the module's docstring defines it, word by word."""
    data = bytes(data) + bytes(-len(data) % 4)
    total = 0
    for position in range(0, len(data), 4):
        index = first + position // 4
        weight = mix(index % 1024) * mix(1024 + index // 1024)
        total += weight * int.from_bytes(data[position : position + 4], "little")
    return total & MASK


def defined_seal(data, key, shard):
    head = b"kvcellar-seal-1" + key + shard.to_bytes(4, "little") + len(data).to_bytes(8, "little")
    return defined_sum(data, 0) + int.from_bytes(blake3(head).digest()[:8], "little") & MASK


def noise(size_bytes, seed=1):
    return random.Random(seed).randbytes(size_bytes)


@pytest.fixture(params=["numpy", "numba"])
def _implementation(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "kernels", lambda: None)
    else:
        assert warm_up(), "numba belongs to the environment of the tests"


both = pytest.mark.usefixtures("_implementation")


# Published values: another implementation that gives these implements the same seal.

VECTORS = [
    (b"", bytes(32), 0, 0xD642EDBACC7750FF),
    (b"\x01", bytes(32), 0, 0xA0398212F82CD09F),
    (b"kvcellar", KEY, 0, 0x21FC8DB53E21780D),
    (b"kvcellar", KEY, 1, 0x0B63592F69EF5214),
    (bytes(4096), KEY, 7, 0x74401EA0528A2237),
    (bytes(range(256)) * 16, KEY, 0, 0x42D1AE4F3350A881),
    (bytes(range(256)) * 33 + b"\xff\xfe\xfd", KEY[::-1], 3, 0x4A63048C1263D908),
    (b"\xff" * 1_048_576, KEY, 4_294_967_295, 0x9714F8F93946E0D7),
]


@both
@pytest.mark.parametrize(("data", "key", "shard", "expected"), VECTORS)
def test_the_published_values(data, key, shard, expected):
    assert seal(data, key, shard) == expected


def test_the_published_weights():
    assert [hex(int(weight)) for weight in lane_weights()[:3]] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f5",
        "0x6c45d188009454f",
    ]
    assert lane_weights().tolist() == [mix(index) for index in range(1024)]


# The same value, however it is computed.


@given(
    data=st.binary(max_size=3 * ROW_BYTES + 7),
    first=st.one_of(st.integers(0, 3 * ROW_WORDS), st.integers(0, 1 << 40)),
)
@settings(max_examples=150)
def test_three_implementations_agree(data, first):
    words_bytes = len(data) // 4 * 4
    expected = defined_sum(data, first)
    assert partial_sum(data, first) == expected
    words = np.frombuffer(data[:words_bytes], "<u4") if words_bytes else np.empty(0, "<u4")
    by_numpy = module._sum_words(words, first)
    assert by_numpy == defined_sum(data[:words_bytes], first)
    assert by_numpy == int(kernels().sum_words(words, lane_weights(), first))


@both
@pytest.mark.parametrize("extra_bytes", [-ROW_BYTES, -4, -1, 0, 1, 4, ROW_BYTES, TILE_BYTES + 5])
@pytest.mark.parametrize("first", [0, 1, ROW_WORDS - 1, 70 * ROW_WORDS])
def test_the_borders_of_rows_and_tiles_do_not_show(extra_bytes, first):
    data = noise(TILE_BYTES + extra_bytes)
    cut = ROW_BYTES + 4 * 13
    whole = partial_sum(data, first)
    parts = partial_sum(data[:cut], first) + partial_sum(data[cut:], first + cut // 4)
    assert whole == parts & MASK
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    indices = np.arange(first, first + len(words), dtype=np.uint64)
    weights = module._mix(indices % 1024) * module._mix(1024 + indices // 1024)
    assert whole == int((weights * words).sum())


@both
@given(data=st.data())
@settings(max_examples=40)
def test_parts_add_up_in_any_order(data):
    words = data.draw(st.integers(0, 3000))
    content = noise(4 * words + data.draw(st.integers(0, 3)), seed=words)
    cuts = sorted(data.draw(st.lists(st.integers(0, words), max_size=6)))
    borders = list(zip([0, *cuts], [*cuts, None], strict=True))
    total = 0
    for start, end in data.draw(st.permutations(borders)):
        piece = content[4 * start : None if end is None else 4 * end]
        total += partial_sum(piece, start)
    assert finish(total, KEY, 2, len(content)) == seal(content, KEY, 2)
    assert seal(content, KEY, 2) == defined_seal(content, KEY, 2)


@both
def test_anything_that_shows_its_bytes_is_sealed():
    data = noise(10_004)
    expected = seal(data, KEY, 0)
    array = np.frombuffer(data, np.uint8)
    wide = array.view(np.uint16).reshape(2, -1)
    for view in (bytearray(data), memoryview(data), array, wide, memoryview(wide), array.copy()):
        assert seal(view, KEY, 0) == expected


@both
@pytest.mark.parametrize("shift_bytes", [1, 2, 3, 4])
def test_an_odd_address_changes_nothing(shift_bytes):
    data = noise(9000)
    room = np.empty(9008, np.uint8)
    view = room[shift_bytes : shift_bytes + 9000]
    assert copy_and_sum(data, view, 5) == partial_sum(data, 5)
    assert view.tobytes() == data
    assert partial_sum(view, 5) == partial_sum(data, 5)
    target = np.empty(9000, np.uint8)
    assert copy_and_sum(view, target, 5) == partial_sum(data, 5)
    assert target.tobytes() == data


@both
@pytest.mark.parametrize("size_bytes", [0, 1, 3, 4, 4095, 4096, 4097, 50_003])
def test_a_copy_gives_the_bytes_and_the_sum_and_touches_nothing_else(size_bytes):
    data = noise(size_bytes)
    room = bytearray(b"\xaa" * (size_bytes + 16))
    target = memoryview(room)[8 : 8 + size_bytes]
    assert copy_and_sum(data, target, 1000) == partial_sum(data, 1000) == defined_sum(data, 1000)
    assert room == b"\xaa" * 8 + data + b"\xaa" * 8


@both
def test_a_copy_into_another_length_is_refused():
    with pytest.raises(AssertionError):
        copy_and_sum(bytes(8), bytearray(12), 0)


def test_an_engine_may_call_the_kernels_from_its_own():
    numba = pytest.importorskip("numba")
    copy_words = kernels().copy_words

    @numba.njit
    def gather(pages, blocks, target, lanes):
        total = np.uint64(0)
        words = pages.shape[1]
        for index in range(blocks.size):
            place = target[index * words : (index + 1) * words]
            total += copy_words(pages[blocks[index]], place, lanes, index * words)
        return total

    pages = np.frombuffer(noise(6144 * 5), np.uint32).reshape(5, -1).copy()
    blocks = np.array([4, 0, 2])
    target = np.empty(3 * pages.shape[1], np.uint32)
    total = int(gather(pages, blocks, target, lane_weights()))
    assert target.tobytes() == pages[blocks].tobytes()
    assert total == partial_sum(target, 0)


# Whatever is wrong with a slot, its seal does not match.


def test_every_flipped_bit_is_found():
    slot = np.frombuffer(noise(2 * ROW_BYTES + 6), np.uint8).copy()
    good = partial_sum(slot, 0)
    missed = []
    for position in range(slot.size):
        for bit in range(8):
            slot[position] ^= 1 << bit
            if partial_sum(slot, 0) == good:
                missed.append((position, bit))
            slot[position] ^= 1 << bit
    assert missed == []
    assert partial_sum(slot, 0) == good


def test_a_flipped_bit_is_found_wherever_it_is_in_a_large_slot():
    slot = np.zeros(1 << 25, np.uint32)  # 128 MiB
    rng = random.Random(3)
    for _ in range(3):
        index, bit = rng.randrange(slot.size), rng.randrange(32)
        slot[index] = np.uint32(1 << bit)
        assert partial_sum(slot, 0) != 0
        slot[index] = 0


def differ_by_less_than_33_bits(weights):
    """Tell whether no sum and no difference of two weights is a multiple of 2^33.

    Then 2^31 times any of them, the least that two flipped top bits or two exchanged words make
    of it, is not zero modulo 2^64.
    """
    residues = np.concatenate([weights, np.uint64(0) - weights]) % np.uint64(1 << 33)
    return len(np.unique(residues)) == 2 * len(weights)


def test_two_flips_and_two_exchanged_words_in_a_row_or_lane_are_always_found():
    assert differ_by_less_than_33_bits(lane_weights())
    rows = module._mix(np.arange(1024, 1024 + (256 << 20) // ROW_BYTES, dtype=np.uint64))
    assert np.all(rows % np.uint64(2) == 1)
    assert differ_by_less_than_33_bits(rows)


def test_differences_of_weights_do_not_repeat():
    """Changes at two places, undone a fixed distance further, must not cancel."""
    indices = np.arange(1 << 17, dtype=np.uint64)

    def weights(at):
        return module._mix(at % 1024) * module._mix(1024 + at // 1024)

    for distance in (1, 512, 1024, 1536, 16384, 65536):
        differences = weights(indices + np.uint64(distance)) - weights(indices)
        assert len(np.unique(differences)) == len(indices), distance


@given(st.integers(0, 4095), st.integers(0, 4095), st.integers(0, 31))
def test_two_exchanged_words_are_found_even_if_one_bit_tells_them_apart(first, second, bit):
    slot = np.full(4096, 0x5A5A5A5A, np.uint32)
    slot[first] ^= np.uint32(1 << bit)
    good = partial_sum(slot, 0)
    slot[[first, second]] = slot[[second, first]]
    assert (partial_sum(slot, 0) == good) == (first == second)


@pytest.mark.parametrize("page_bytes", [4, 128, 2048, 6144, 4096, 65536])
def test_exchanged_pages_are_found(page_bytes):
    pages = np.frombuffer(noise(4 * page_bytes), np.uint8).reshape(4, page_bytes)
    good = seal(pages, KEY, 0)
    for order in ([1, 0, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0], [1, 2, 3, 0], [0, 0, 2, 3]):
        assert seal(np.ascontiguousarray(pages[order]), KEY, 0) != good, order


@pytest.mark.parametrize("shift_bytes", [1, 2, 4, 64, 2048, 4096, 6144, 16384])
def test_shifted_data_is_found(shift_bytes):
    slot = np.frombuffer(noise(32768), np.uint8)
    good = seal(slot, KEY, 0)
    assert seal(np.roll(slot, shift_bytes), KEY, 0) != good
    assert seal(slot.tobytes()[shift_bytes:] + bytes(shift_bytes), KEY, 0) != good


@pytest.mark.parametrize("kept_bytes", [0, 1, 4, 16384, 28672, 32764, 32767])
def test_a_cut_or_half_written_slot_is_found(kept_bytes):
    data = noise(32768)
    good = seal(data, KEY, 0)
    assert seal(data[:kept_bytes], KEY, 0) != good
    assert seal(data[:kept_bytes] + bytes(32768 - kept_bytes), KEY, 0) != good


def test_zeros_at_the_end_count():
    lengths = [0, 1, 3, 4, 5, 4096, 8192]
    assert len({seal(bytes(length), KEY, 0) for length in lengths}) == len(lengths)
    assert len({seal(b"\x01" + bytes(length), KEY, 0) for length in lengths}) == len(lengths)


@given(st.binary(min_size=32, max_size=32), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 40))
def test_the_same_bytes_under_another_name_are_found(key, shard, length_bytes):
    good = finish(0, KEY, 0, 4096)
    same = (key, shard, length_bytes) == (KEY, 0, 4096)
    assert (finish(0, key, shard, length_bytes) == good) == same


def test_neighbouring_names_have_other_seals():
    data = noise(4096)
    good = seal(data, KEY, 1)
    assert seal(data, KEY, 0) != good
    assert seal(data, KEY, 256) != good
    for position in range(32):
        other = bytearray(KEY)
        other[position] ^= 1
        assert seal(data, bytes(other), 1) != good


def test_a_key_that_is_no_key_is_refused():
    with pytest.raises(AssertionError):
        finish(0, KEY[:31], 0, 0)


# What it costs to have it.


def test_numba_is_neither_needed_nor_imported_before_it_is_used():
    code = (
        "import sys\n"
        "from kvcellar.memory import seal\n"
        "assert 'numba' not in sys.modules\n"
        "sys.modules['numba'] = None\n"
        "assert not seal.warm_up()\n"
        "target = bytearray(8)\n"
        "assert seal.copy_and_sum(b'kvcellar', target, 0) == seal.partial_sum(b'kvcellar', 0)\n"
        "assert target == b'kvcellar'\n"
        "print(seal.seal(b'kvcellar', bytes(range(32)), 0))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert int(output.stdout) == seal(b"kvcellar", KEY, 0)
