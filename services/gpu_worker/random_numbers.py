"""gpu_worker: the random numbers of sampling, a pure function of (seed, choice, position).

SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a counter-based generator: its n-th output is a mix of
`key + n * STEP`, so any position of any answer can be computed alone, on any device, in 64-bit integer arithmetic that
wraps the same everywhere. The key of an answer is a mix of its seed and its choice, made once when it takes a row.

It keeps no state. There is no other source of randomness in this process.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 2**64
STEP = 0x9E3779B97F4A7C15  # odd, 2**64 / golden ratio: the increment of SplitMix64
_CHOICE_STEP = 0xD1B54A32D192ED03  # another odd constant, so that choices do not walk along positions
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
FRACTION_BITS = 53  # what a float64 in [0, 1) can hold


def stream_key(seed: int, choice: int) -> int:
    """The key of one answer's stream of numbers, in [-2**63, 2**63).

    Args:
        seed: any int64; 0 and negative ones are seeds like any other.
        choice: which of a request's answers, >= 0.
    """
    return _signed(_mix((_mix((seed + STEP) % _WORD) + (choice + 1) * _CHOICE_STEP) % _WORD))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """One number for each row.

    Args:
        keys: [num_rows] int64, see `stream_key`.
        positions: [num_rows] int64 >= 0, the position of the token to draw.

    Returns:
        [num_rows] float64 in [0, 1), multiples of 2**-53.
    """
    words = stream_key_at(keys, positions)
    return _shifted(words, 64 - FRACTION_BITS).to(torch.float64).mul_(2.0**-FRACTION_BITS)


def stream_key_at(keys: Tensor, positions: Tensor) -> Tensor:
    """The 64 bits that `uniform` takes its number from: a key for a stream of its own, [num_rows] int64."""
    words = keys + (positions + 1) * _signed(STEP)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        words = (words ^ _shifted(words, shift)) * _signed(multiplier)
    return words ^ _shifted(words, SHIFTS[-1])


def number_at(key: int, position: int) -> float:
    """The number that `uniform` gives, for one row on the host."""
    return (key_at(key, position) % _WORD >> 64 - FRACTION_BITS) * 2.0**-FRACTION_BITS


def key_at(key: int, position: int) -> int:
    """The same as `stream_key_at`, for one row on the host."""
    return _signed(_mix((key + (position + 1) * STEP) % _WORD))


def numbers_at(key: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The numbers of one key at some positions, as `uniform` gives them, on the host."""
    words = np.uint64(key % _WORD) + (positions + 1).astype(np.uint64) * np.uint64(STEP)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    words ^= words >> np.uint64(SHIFTS[-1])
    return (words >> np.uint64(64 - FRACTION_BITS)).astype(np.float64) * 2.0**-FRACTION_BITS


def _shifted(words: Tensor, shift: int) -> Tensor:
    """A logical shift to the right: int64 tensors shift arithmetically, so the copies of the sign are masked off."""
    return torch.bitwise_and(words >> shift, 2 ** (64 - shift) - 1)


def _mix(word: int) -> int:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        word = ((word ^ (word >> shift)) * multiplier) % _WORD
    return word ^ (word >> SHIFTS[-1])


def _signed(word: int) -> int:
    """The same 64 bits read as an int64, which is what tensors hold."""
    return word - _WORD if word >= _WORD // 2 else word
