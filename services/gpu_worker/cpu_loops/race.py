"""gpu_worker: the draw of one row among its kept tokens, as `draw` has it, in compiled code."""

from __future__ import annotations

import math

import numpy as np

from services.gpu_worker.cpu_loops.jit import Floats, Ints, compiled, floats
from services.gpu_worker.cpu_loops.probable import ID_MASK, ids_within
from services.gpu_worker.random_numbers import FRACTION_BITS, MULTIPLIERS, SHIFTS, STEP

_NUM_CLASSES = 42  # bit lengths from 0 to 41
_NUM_SUMS = 4  # of each class, in turn: adding to the same number again and again waits for memory

NUM_MASSES = _NUM_SUMS * _NUM_CLASSES
"""Numbers that a draw takes notes in."""

ALL = -1

_STEP = np.uint64(STEP)
_FIRST_SHIFT, _SECOND_SHIFT, _LAST_SHIFT = (np.uint64(shift) for shift in SHIFTS)
_FIRST, _SECOND = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_LEFT_OVER = np.uint64(64 - FRACTION_BITS)
_UNIT = 2.0**-FRACTION_BITS
_BELOW_ONE = 126  # of a float32: the exponent of what has bit length 0


@compiled
def _word_at(key: np.uint64, position: np.int64) -> np.uint64:
    """See `random_numbers.key_at`."""
    word = key + np.uint64(position + 1) * _STEP
    word = (word ^ (word >> _FIRST_SHIFT)) * _FIRST
    word = (word ^ (word >> _SECOND_SHIFT)) * _SECOND
    return word ^ (word >> _LAST_SHIFT)


@compiled
def _number(word: np.uint64) -> float:
    """In [0, 1)."""
    return np.float64(word >> _LEFT_OVER) * _UNIT


@compiled
def _bit_length(weight: np.float32) -> int:
    """Of the weight, rounded down."""
    bits = np.int64(np.float32(weight).view(np.int32) >> 23) - _BELOW_ONE
    return int(bits) if bits > 0 else 0


@compiled
def _class_of(masses: Ints, number: float) -> int:
    """The bit length in which `number` of the total lies, the heaviest first. It adds the sums of masses up."""
    total = np.int64(0)
    for bits in range(_NUM_CLASSES):
        masses[bits] += masses[bits + _NUM_CLASSES] + masses[bits + 2 * _NUM_CLASSES] + masses[bits + 3 * _NUM_CLASSES]
        total += masses[bits]
    left = min(np.int64(number * np.float64(total)), total - 1)
    bits = _NUM_CLASSES - 1
    while left >= masses[bits]:
        left -= masses[bits]
        bits -= 1
    return bits


@compiled
def _first_to_arrive(members: Ints, num: int, weights: Floats, stream: np.uint64) -> int:
    """The id among [num] members whose waiting time is the shortest."""
    token, soonest = members[0] & ID_MASK, np.inf
    for i in range(num):
        index = members[i] & ID_MASK
        number, weight = _number(_word_at(stream, index)), np.floor(np.float64(weights[index]))
        if number <= soonest * weight:  # else its waiting time, which is not shorter than this, is not the shortest
            time = -math.log1p(-number) / weight
            if time < soonest:
                token, soonest = index, time
    return int(token)


@compiled
def draw(keys: Ints, num: int, tokens: tuple[int, int], least: np.int64, at: tuple[int, int], masses: Ints) -> int:
    """The token drawn of one row.

    Args:
        keys: [count]; the first of them are those of the tokens that may be drawn; overwritten.
        num: how many; `ALL`: all tokens may be.
        tokens: the address of the weights of all, before they are rounded down, and their count.
        least: tokens with less weight (>= 1) are not drawn either; one that may be drawn has so much.
        at: the key of the answer's stream of numbers, the position of the token.
        masses: [NUM_MASSES], for notes.
    """
    weights = floats(tokens[0], tokens[1])
    masses[:] = 0
    for i in range(tokens[1] if num == ALL else num):
        weight = weights[i if num == ALL else keys[i] & ID_MASK]
        whole = np.int64(weight)
        masses[i % _NUM_SUMS * _NUM_CLASSES + _bit_length(weight)] += whole if whole >= least else np.int64(0)
    stream = _word_at(np.uint64(at[0]), at[1])
    drawn = _class_of(masses, _number(stream))
    if num == ALL:
        lightest = np.float32(2.0 ** (drawn - 1))
        num = ids_within(tokens[0], tokens[1], np.float32(0), lightest, np.float32(2) * lightest, keys)
    num_members = np.int64(0)
    for i in range(num):
        key = keys[i]
        weight = weights[key & ID_MASK]
        keys[num_members] = key
        num_members += np.int64(_bit_length(weight) == drawn and np.int64(weight) >= least)
    token: int = _first_to_arrive(keys, num_members, weights, stream)
    return token
