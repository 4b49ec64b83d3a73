"""gpu_worker: the logits of one row on their way to a draw: the largest, weights, and which may be drawn.

As in `nucleus`, tokens are ordered by exponent (the logit less the largest one), ties by id. Here that order is the
order of integers, keys: the bits of the exponent's magnitude, and behind them the id. Nothing is sorted: a row of keys
is cut into two parts again and again, as in quicksort, but only the part that the last kept token is in is cut further.

A NaN counts as -inf. All of it works on one row and in memory that the caller brings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.jit import (
    Floats,
    Ints,
    compiled,
    compiled_exactly,
    compiled_without_nan,
    exponential,
    floats,
)
from services.gpu_worker.cpu_loops.token_bits import NUM_BITS, bits_within, lowest_bit
from services.gpu_worker.nucleus import REACHED_SLACK, WEIGHT_BITS

LANE_TOKENS = 16
"""The largest of so many logits, which lie far apart, is a peak."""

ID_BITS = 20
ID_MASK = 2**ID_BITS - 1
ONE = 2.0**WEIGHT_BITS
_LEAST_EXPONENT = np.float32(-50.0)
_WEIGHTLESS = np.float32(-28.0)  # the exponential of this is less than 2**-40
_BLOCK = 4096  # weights of so many tokens are added up as float64 without rounding
_SCATTER = 40503  # pivots are taken from places that have nothing to do with the order of the keys


@compiled
def find_peaks(logits: Floats, count: int, peaks: Floats, num_peaks: int) -> np.float32:
    """The largest of each lane, into [num_peaks], and of all; -inf where all are NaN.

    num_peaks = ceil(count / LANE_TOKENS); lane i has every num_peaks-th token from the i-th on.
    """
    for i in range(num_peaks):
        peaks[i] = np.float32(-np.inf)
    start = 0
    while start < count:
        part = logits[start:]
        for i in range(min(num_peaks, count - start)):
            peaks[i] = part[i] if part[i] > peaks[i] else peaks[i]
        start += num_peaks
    most: np.float32 = _largest(peaks, num_peaks)
    return most


@compiled_without_nan
def _largest(values: Floats, count: int) -> np.float32:
    most = np.float32(values[0])
    for i in range(1, count):
        most = max(most, np.float32(values[i]))
    return most


@compiled
def ids_within(numbers: int, count: int, less: np.float32, least: np.float32, end: np.float32, ids: Ints) -> int:
    """The ids, in order, whose numbers, [count] float32 at an address, have least <= number - less < end; how many."""
    num, start = 0, 0
    values = floats(numbers, count)
    while start + NUM_BITS <= count:
        bits = bits_within(numbers + 4 * start, less, least, end)
        while bits != 0:
            ids[num] = start + lowest_bit(bits)
            num += 1
            bits &= bits - 1
        start += NUM_BITS
    for index in range(start, count):
        if least <= values[index] - less < end:
            ids[num] = index
            num += 1
    return num


@compiled
def first_of_largest(row: tuple[int, int, int, int], most: np.float32, lanes: Ints) -> int:
    """The first id that has the largest logit. `row`: see `keep_probable`; `lanes` is [num_peaks], for notes."""
    logits, peaks, count, num_peaks = row
    values, first = floats(logits, count), count
    for i in range(ids_within(peaks, num_peaks, np.float32(0), most, np.float32(np.inf), lanes)):
        index = lanes[i]
        while values[index] != most:
            index += num_peaks
        first = min(first, index)
    return first


@compiled_exactly
def _weigh_block(logits: Floats, count: int, most: np.float32, temperature: np.float32, weights: Floats) -> None:
    for i in range(count):
        scaled = (logits[i] - most) / temperature
        scaled = scaled if scaled > _LEAST_EXPONENT else _LEAST_EXPONENT  # a NaN too
        weights[i] = exponential(scaled) * np.float32(ONE)


@compiled
def _total_of_block(weights: Floats, count: int) -> np.int64:
    total = 0.0
    for i in range(count):
        total += np.float64(np.floor(weights[i]))
    return np.int64(total)


@compiled
def weigh(logits: Floats, count: int, most: np.float32, temperature: np.float32, weights: Floats) -> np.int64:
    """Weights before they are rounded down (see `sampler.unrounded_weights`), into [count]; the sum of the weights."""
    total = np.int64(0)
    for start in range(0, count, _BLOCK):
        num = min(_BLOCK, count - start)
        _weigh_block(logits[start:], num, most, temperature, weights[start:])
        total += _total_of_block(weights[start:], num)
    return total


@compiled
def _keys_above(logits: int, count: int, most: np.float32, least: np.float32, keys: Ints) -> int:
    """The keys of the tokens, [count] logits at an address, whose exponents are at least so large; how many."""
    num: int = ids_within(logits, count, most, least, np.float32(np.inf), keys)
    values = floats(logits, count)
    for i in range(num):
        exponent = values[keys[i]] - most
        keys[i] |= np.int64(np.float32(exponent).view(np.int32) & np.int32(0x7FFFFFFF)) << ID_BITS
    return num


@compiled
def _first_keys(keys: Ints, count: int, weights: Floats, reached: np.int64) -> np.int64:
    """Moves the least keys to the front: all before which there is less mass than `reached` (>= 1); how many.

    A key's mass is its token's weight; without any weights ([0]) it is 1.
    """
    begin, end, before, turn = np.int64(0), np.int64(count), np.int64(0), 0
    while begin < end:
        turn += 1
        place = begin + turn * _SCATTER % (end - begin)
        pivot = keys[place]
        keys[place] = keys[end - 1]
        middle, mass = begin, np.int64(0)
        for i in range(begin, end - 1):
            key = keys[i]
            is_less = key < pivot
            keys[i] = keys[middle]
            keys[middle] = key
            of_key = np.int64(weights[key & ID_MASK]) if len(weights) else np.int64(1)
            middle += np.int64(is_less)
            mass += of_key if is_less else np.int64(0)
        keys[end - 1] = keys[middle]
        keys[middle] = pivot
        if before + mass >= reached:
            end = middle
        else:
            before += mass + (np.int64(weights[pivot & ID_MASK]) if len(weights) else np.int64(1))
            begin = middle + 1
    return begin


@compiled
def _least_of_first(peaks: int, num_peaks: int, most: np.float32, wanted: int, keys: Ints) -> np.float32:
    """An exponent that at least `wanted` tokens reach, because so many peaks do; -inf where there are fewer."""
    none = floats(peaks, 0)
    if wanted > num_peaks:
        return np.float32(-np.inf)
    num = _keys_above(peaks, num_peaks, most, np.float32(-np.inf), keys)
    last = np.int64(0)
    for i in range(_first_keys(keys, num, none, np.int64(wanted))):
        last = max(last, keys[i])
    least: np.float32 = floats(peaks, num_peaks)[last & ID_MASK] - most
    return least


@compiled
def _reached(top_p: float, mass: np.int64) -> np.int64:
    return max(np.int64(1), np.int64(np.ceil(max(top_p - REACHED_SLACK, 0.0) * np.float64(mass))))


@compiled
def keep_probable(row: tuple[int, int, int, int], weights: Floats, total: int, limits: Any, keys: Ints) -> int:
    """The keys of the tokens that top_k and top_p leave, to the front of `keys` in any order; how many.

    Args:
        row: the addresses of the row's logits and of its peaks (see `find_peaks`), how many there are of each.
        weights: [count] of its tokens, before they are rounded down.
        total: the sum of its weights.
        limits: the largest logit, temperature, top_k, top_p.
        keys: [count].
    """
    logits, peaks, count, num_peaks = row
    most, temperature, top_k, top_p = limits
    least = _WEIGHTLESS * temperature
    if top_k > 0:
        least = max(least, _least_of_first(peaks, num_peaks, most, top_k, keys))
    elif top_p < 1:
        # All tokens below this together have less than the mass that may be left out, even if they are all there are.
        share = 0.99 * (1 - top_p) * np.float64(total) / ONE / np.float64(count)
        least = max(least, np.float32(math.log(max(share, 1e-30))) * temperature)
    num: int = _keys_above(logits, count, most, least, keys)
    mass = np.int64(total)
    if top_k > 0:
        num = _first_keys(keys, num, weights[:0], np.int64(top_k))
        mass = np.int64(0)
        for i in range(num):
            mass += np.int64(weights[keys[i] & ID_MASK])
    if top_p < 1:
        num = _first_keys(keys, num, weights, _reached(top_p, mass))
    return num
