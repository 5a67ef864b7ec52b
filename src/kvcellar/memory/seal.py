"""The seal of a slot: one 64-bit number that says whether its bytes are those that were stored.

The writer of a shard computes it while it copies, and commits it; every reader computes it over
the bytes that it uses and compares, so that a flipped bit, and a slot that was swapped, shifted,
cut or given to another chunk, is a miss and not a wrong answer. Worker halves, tools and tests
call this; the server only keeps the numbers. Here are two implementations for a CPU, numpy and
numba (several times faster, where it is installed); a GPU kernel has to give the same values.

Definition, all arithmetic modulo 2^64:

* The bytes, padded with zeros to a multiple of four, are little-endian uint32 words x[0..n).
* mix(j) is the j-th output of splitmix64 from state zero, made odd:
  z = (j + 1) * 0x9E3779B97F4A7C15; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB; mix = (z ^ z >> 31) | 1.
* The weight of word i is w[i] = mix(i % 1024) * mix(1024 + i // 1024): a *lane* weight times a
  *row* weight. A row is 1024 words, a page of 4096 bytes.
* sum = w[0] * x[0] + w[1] * x[1] + ...; partial sums of any ranges of words add up to it, so it
  does not depend on who adds which words in which order.
* seal = sum + the first 8 bytes (little-endian) of
  blake3(b"kvcellar-seal-1" + key (32 bytes) + shard (uint32 LE) + length in bytes (uint64 LE)).

Why these weights: they are odd, so a change within one word, a single flipped bit included, is
always found. No two lane weights, and no two row weights of a shard up to 256 MiB, have a sum or
a difference that 2^33 divides, so two flipped bits, and the exchange of two different words,
within a row or within a lane are always found as well. Cheaper-looking weights, one Weyl sequence
folded by xor, are odd too, but their differences repeat: 65,536 words apart, two of them are
equal once in 2.5 million, so what is changed at two places and changed back that far behind them
would escape that often; of these weights a million differences held no two equal ones. Lane times
row also costs least: the inner loop is one multiply-add a word with a table of 8 KiB (43 GB/s in
cache where the other needs 26), and a GPU kernel keeps its lanes' weights in registers.
"""

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

__all__ = [
    "ROW_WORDS",
    "WORD_BYTES",
    "Bytes",
    "Kernels",
    "copy_and_sum",
    "finish",
    "kernels",
    "lane_weights",
    "partial_sum",
    "row_weights",
    "seal",
    "warm_up",
]

WORD_BYTES = 4
ROW_WORDS = 1024

Bytes = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Anything contiguous that shows its bytes without a copy."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# 64 rows as uint64 are 512 KiB: with their source they stay in a core's second-level cache.
_TILE_ROWS = 64
_WORD = np.dtype("<u4")
_COMPILING = threading.Lock()

Words = npt.NDArray[np.uint32]
Weights = npt.NDArray[np.uint64]


class Kernels(NamedTuple):
    """The compiled functions, for kernels of an engine that gather or scatter pages themselves.

    All are numba dispatchers without the GIL, callable from other compiled functions too. Words
    are uint32[n], C-contiguous and aligned, lanes are `lane_weights()`, first is the index of the
    first word in its shard; each returns its part of the sum as uint64.

    Attributes:
        sum_words: (words, lanes, first) -> sum.
        copy_words: (source, target, lanes, first) -> sum of what it copied; each source word
            is read once, so the sum is that of the copy even if the source changes meanwhile.
    """

    sum_words: Callable[[Words, Weights, int], int]
    copy_words: Callable[[Words, Words, Weights, int], int]


def seal(view: Bytes, key: bytes, shard: int) -> int:
    """Return the seal of a whole shard.

    Args:
        view: the shard's bytes.
        key: the chunk's 32 bytes.
        shard: the shard's index in its chunk, from 0.
    """
    length_bytes = view.nbytes if isinstance(view, memoryview | np.ndarray) else len(view)
    return finish(partial_sum(view, 0), key, shard, length_bytes)


def finish(words_sum: int, key: bytes, shard: int, length_bytes: int) -> int:
    """Return the seal for the sum of all of a shard's words.

    Args:
        words_sum: the sum of all partial sums; need not be reduced modulo 2^64.
        key: the chunk's 32 bytes.
        shard: the shard's index in its chunk, from 0.
        length_bytes: the shard's bytes, without padding.
    """
    assert len(key) == 32, len(key)
    prefix = b"kvcellar-seal-1" + key + shard.to_bytes(4, "little")
    digest = blake3(prefix + length_bytes.to_bytes(8, "little")).digest(8)
    return (words_sum + int.from_bytes(digest, "little")) & _MASK


def partial_sum(words_view: Bytes, first_word_index: int) -> int:
    """Return the sum over a range of a shard's words, below 2^64.

    Args:
        words_view: the range's bytes; a length that is no multiple of four is padded with zeros,
            so only a shard's last range may have one.
        first_word_index: where in the shard the range begins, in words.

    Blocks without the GIL. Compiles at the first call in a process unless `warm_up` did. Bytes
    whose address is no multiple of four are summed by numpy.
    """
    data = _as_bytes(words_view)
    body_bytes = data.size // WORD_BYTES * WORD_BYTES
    words = data[:body_bytes].view(_WORD)
    compiled = kernels() if words.flags.aligned else None
    if compiled is None:
        total = _sum_words(words, first_word_index)
    else:
        total = int(compiled.sum_words(words, lane_weights(), first_word_index))
    return _add_tail(total, data[body_bytes:], first_word_index + body_bytes // WORD_BYTES)


def copy_and_sum(source_u8: Bytes, destination_u8: Bytes, first_word_index: int) -> int:
    """Copy a range of a shard and return the sum over its words.

    Args:
        source_u8: the bytes to copy; padded for the sum as in `partial_sum`.
        destination_u8: as many writable bytes elsewhere.
        first_word_index: where in the shard the range begins, in words.

    The sum is that of what arrived, also when another process changes the source meanwhile.
    Blocks without the GIL, with numba at the speed of a plain copy, without at a quarter of it.
    """
    source, destination = _as_bytes(source_u8), _as_bytes(destination_u8)
    assert source.size == destination.size, (source.size, destination.size)
    body_bytes = source.size // WORD_BYTES * WORD_BYTES
    origin, words = (array[:body_bytes].view(_WORD) for array in (source, destination))
    compiled = kernels() if origin.flags.aligned and words.flags.aligned else None
    if compiled is None:
        np.copyto(destination, source)
        total = _sum_words(words, first_word_index)
    else:
        total = int(compiled.copy_words(origin, words, lane_weights(), first_word_index))
        destination[body_bytes:] = source[body_bytes:]
    tail = destination[body_bytes:]
    return _add_tail(total, tail, first_word_index + body_bytes // WORD_BYTES)


def warm_up() -> bool:
    """Compile what there is to compile (about a second, in any thread), once in a process.

    Returns:
        True when compiled functions are used from now on, False when numpy does the work because
        numba is not installed.
    """
    return _compiled() is not None


@cache
def lane_weights() -> Weights:
    """Return the 1024 lane weights, read-only: mix(0), mix(1), ..."""
    weights = _mix(np.arange(ROW_WORDS, dtype=np.uint64))
    weights.flags.writeable = False
    return weights


def row_weights(count: int) -> Weights:
    """Return the weights of the first `count` rows, for kernels that have no loop over rows."""
    return _mix(np.arange(ROW_WORDS, ROW_WORDS + count, dtype=np.uint64))


def kernels() -> Kernels | None:
    """Return the compiled functions, None where numba is missing; compiles at the first call.

    While another thread compiles them it is None as well: numpy is slower than they are, and
    faster than waiting a second for them, or compiling them twice.
    """
    return None if _COMPILING.locked() else _compiled()


@cache
def _compiled() -> Kernels | None:
    # Nothing is cached on disk: a package does not write beside itself, or into a home that may
    # be read-only or shared.
    if sys.byteorder != "little":
        return None
    with _COMPILING:
        try:
            return _compile()
        except ImportError:
            return None


def _compile() -> Kernels:
    from numba import njit, types

    gamma, one = np.uint64(_GAMMA), np.uint64(1)
    multiplier_1, multiplier_2 = np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
    shifts = (np.uint64(30), np.uint64(27), np.uint64(31))

    def weigh_row(row: int) -> np.uint64:
        z = (np.uint64(row + ROW_WORDS) + one) * gamma
        z = (z ^ (z >> shifts[0])) * multiplier_1
        z = (z ^ (z >> shifts[1])) * multiplier_2
        return (z ^ (z >> shifts[2])) | one

    row_weight = njit(nogil=True, inline="always")(weigh_row)

    def sum_words(words: Words, lanes: Weights, first: int) -> np.uint64:
        total, done = np.uint64(0), 0
        while done < words.size:
            row, lane = divmod(first + done, ROW_WORDS)
            count = min(ROW_WORDS - lane, words.size - done)
            weights, part = lanes[lane : lane + count], words[done : done + count]
            row_sum = np.uint64(0)
            for index in range(count):
                row_sum += weights[index] * np.uint64(part[index])
            total += row_sum * row_weight(row)
            done += count
        return total

    def copy_words(source: Words, target: Words, lanes: Weights, first: int) -> np.uint64:
        total, done = np.uint64(0), 0
        while done < source.size:
            row, lane = divmod(first + done, ROW_WORDS)
            count = min(ROW_WORDS - lane, source.size - done)
            weights, part = lanes[lane : lane + count], source[done : done + count]
            copied = target[done : done + count]
            row_sum = np.uint64(0)
            for index in range(count):
                word = part[index]
                copied[index] = word
                row_sum += weights[index] * np.uint64(word)
            total += row_sum * row_weight(row)
            done += count
        return total

    # One version of each: what may be written passes as what is only read.
    words = types.Array(types.uint32, 1, "C", readonly=True)
    target = types.Array(types.uint32, 1, "C")
    lanes = types.Array(types.uint64, 1, "C", readonly=True)
    return Kernels(
        njit(types.uint64(words, lanes, types.int64), nogil=True)(sum_words),
        njit(types.uint64(words, target, lanes, types.int64), nogil=True)(copy_words),
    )


def _sum_words(words: Words, first: int) -> int:
    """Return the sum over `words` with numpy alone, tile by tile so that it stays in cache."""
    lanes = lane_weights()
    total, done = 0, 0
    if first % ROW_WORDS:
        done = min(ROW_WORDS - first % ROW_WORDS, words.size)
        total += _sum_within_row(words[:done], first)
    row_count = (words.size - done) // ROW_WORDS
    rows = words[done : done + row_count * ROW_WORDS].reshape(row_count, ROW_WORDS)
    first_row = (first + done) // ROW_WORDS
    wide = np.empty((min(_TILE_ROWS, row_count), ROW_WORDS), np.uint64)
    for start in range(0, row_count, _TILE_ROWS):
        tile = rows[start : start + _TILE_ROWS]
        wide[: len(tile)] = tile
        row_sums = np.einsum("rl,l->r", wide[: len(tile)], lanes)
        indices = np.arange(len(tile), dtype=np.uint64) + np.uint64(ROW_WORDS + first_row + start)
        total += int((row_sums * _mix(indices)).sum())
    done += row_count * ROW_WORDS
    total += _sum_within_row(words[done:], first + done)
    return total & _MASK


def _sum_within_row(words: Words, first: int) -> int:
    """Return the sum over words that all lie in the row of word `first`."""
    row, lane = divmod(first, ROW_WORDS)
    lane_sum = int((lane_weights()[lane : lane + words.size] * words).sum())
    return lane_sum * _row_weight(row) & _MASK


def _add_tail(total: int, tail: npt.NDArray[np.uint8], word_index: int) -> int:
    """Add the last one to three bytes of a shard, as one word."""
    if tail.size == 0:
        return total
    row, lane = divmod(word_index, ROW_WORDS)
    weight = int(lane_weights()[lane]) * _row_weight(row)
    return (total + weight * int.from_bytes(tail.tobytes(), "little")) & _MASK


def _row_weight(row: int) -> int:
    return int(_mix(np.array([ROW_WORDS + row], np.uint64))[0])


def _mix(indices: Weights) -> Weights:
    """Return mix(j), the module's definition, for each index."""
    z = (indices + np.uint64(1)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _as_bytes(view: Bytes) -> npt.NDArray[np.uint8]:
    if isinstance(view, np.ndarray) and view.dtype == np.uint8 and view.ndim == 1:
        return view
    return np.frombuffer(view, np.uint8)
