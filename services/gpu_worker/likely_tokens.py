"""gpu_worker: on a CPU, what top_k, top_p and min_p leave of a row, found by looking at its likely tokens only.

Nearly always the last token that may be drawn is among the few hundred most probable ones, and those alone have to be
sorted: all that is needed of the others is the sum of their weights, so that it is known where top_p ends. Who is
among the likely is found without sorting all: every 3,072nd token or so, one lane, has a largest logit, its peak. As
many of the highest peaks as have the mass of top_p together say how far down one must look. That there are other tokens
above is no harm; where the row is flat and the peaks do not reach far enough, all of it is sorted.

What is left is the same to the last token, whatever was looked at, as `nucleus.most_probable` leaves: that is the
reference, and what other devices run. Pure: it holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.nucleus import REACHED_SLACK, WEIGHT_BITS

LANE_TOKENS = 16
MAX_PEAKS = 2048
"""The likely tokens are above at most so many of the peaks: that leaves some 3,000 of 49,152."""

_ID_BITS = 20
_MAGNITUDE = np.int32(0x7FFFFFFF)

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """See `nucleus.FilterLimits`: top_k 0, top_p 1.0 and min_p 0.0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens of a row that may be drawn, most probable first, ties by id: [num_kept] both."""

    ids: Int64s
    weights: Int64s


def kept_tokens(exponents: Float32s, unrounded: Float32s, total: int, limits: RowLimits) -> KeptTokens:
    """What the limits leave of a row.

    Args:
        exponents: [vocab_size] <= 0, logits less their maximum; vocab_size <= 2**20.
        unrounded: [vocab_size], what the weights are before they are rounded down (see `sampler`).
        total: the sum of the weights.
        limits: of the row.
    """
    for likely in _tries(exponents, total, limits):
        kept, is_certain = _cut(_sorted(exponents, likely), unrounded, total, limits)
        if is_certain:
            break
    return kept


def _tries(exponents: Float32s, total: int, limits: RowLimits) -> Iterator[Int64s]:
    """Ids of the most probable tokens, all at the second try."""
    num_lanes = len(exponents) // LANE_TOKENS
    if num_lanes:
        peaks = np.sort(exponents[: LANE_TOKENS * num_lanes].reshape(LANE_TOKENS, num_lanes).max(0))[::-1]
        num_enough = limits.top_k or _num_peaks_with(limits.top_p * total, peaks, limits.temperature)
        likely = np.flatnonzero(exponents > peaks[min(num_enough, MAX_PEAKS, num_lanes - 1)])
        if len(likely):  # none is above the peak of a flat row
            yield likely
    yield np.arange(len(exponents))


def _num_peaks_with(weight: float, peaks: Float32s, temperature: float) -> int:
    """How many of the peaks, which descend, have this weight together, roughly; and one more, to see the end there."""
    masses = np.exp(peaks / np.float32(temperature)).cumsum()
    return 2 + int(masses.searchsorted(weight * 2.0**-WEIGHT_BITS))


def _sorted(exponents: Float32s, ids: Int64s) -> Int64s:
    """The ids by exponent, the largest first, ties by id.

    As one sort of integers: where no float is above 0, a smaller magnitude is more, and magnitudes have the order of
    their bits.
    """
    magnitudes = exponents[ids].view(np.int32) & _MAGNITUDE
    keys = magnitudes.astype(np.int64) << _ID_BITS | ids
    keys.sort()
    by_exponent: Int64s = keys & (2**_ID_BITS - 1)
    return by_exponent


def _cut(ids: Int64s, unrounded: Float32s, total: int, limits: RowLimits) -> tuple[KeptTokens, bool]:
    """What is left of the first tokens of a row, and whether nothing behind them is left; as in `nucleus`."""
    weights = unrounded[ids].astype(np.int64)
    is_certain = len(ids) == len(unrounded) or 0 < limits.top_k <= len(ids)
    if limits.top_k:
        weights = weights[: limits.top_k]
    running = weights.cumsum()
    num_kept = len(weights)
    if limits.top_p < 1:
        mass = int(running[-1]) if limits.top_k else total
        reached = max(1, math.ceil(max(limits.top_p - REACHED_SLACK, 0.0) * float(mass)))
        num_kept = int(np.searchsorted(running - weights, reached))
    if not limits.top_k:  # the top_p of what top_k leaves must know all of that
        is_certain |= num_kept < len(ids) or int(running[-1]) == total  # tokens behind have no weight
    ids, weights = ids[:num_kept], weights[:num_kept]
    if limits.min_p:
        is_left = weights >= math.ceil(limits.min_p * float(weights[0]))
        ids, weights = ids[is_left], weights[is_left]
    return KeptTokens(ids, weights), is_certain
