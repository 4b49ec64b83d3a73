"""gpu_worker: draws one token of each row by its weight, so that rounding hardly ever changes which.

Logits of a row alone and in a batch differ in their last bits. Walking up the running sum in the order of ids would let
the errors of the probable tokens move the borders between all the improbable ones. So it goes in two stages:

    class   tokens whose weights have the same bit length; by the uniform number, the heaviest class first
    token   within the class the first to arrive in a race: an exponential waiting time for each token, by its weight,
            from a number that is a function of (key, position, id)

A class is left for another by an error of a whole class's mass, a race turns by the error of a single weight.

It holds no state.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.gpu_worker.likely_tokens import KeptTokens
from services.gpu_worker.random_numbers import key_at, number_at, numbers_at, stream_key_at, uniform

_NUM_CLASSES = 42  # bit lengths 41 (a weight of 2**40) to 0 (weight 0), in this order
_EXPONENT_BIAS = 1022  # of a float64: the bit length of an integer is its exponent less this
_LAST_EXPONENT = _EXPONENT_BIAS + _NUM_CLASSES - 1
_MANTISSA_BITS = 52
_HALF_BITS = 20  # of a weight


def draw_places(weights: Tensor, ids: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The place of the token drawn in each row.

    Args:
        weights: [num_rows, num_tokens] int64 in [0, 2**40]; of a row without any weight some place is drawn.
        ids: [num_rows, num_tokens] int64, the tokens that these are of.
        keys: [num_rows] int64, see `random_numbers.stream_key`.
        positions: [num_rows] int64, position of the token to pick.

    Returns:
        [num_rows, 1] int64.
    """
    classes = weight_classes(weights)
    in_class = classes == _draw_classes(weights, classes, keys, positions)
    race = race_among_few if weights.is_cpu else race_among_all
    return race(weights, in_class, ids, stream_key_at(keys, positions))


def draw_kept(kept: KeptTokens, key: int, position: int) -> int:
    """The token drawn of one row's, as `draw_places` draws it; on the host.

    Args:
        kept: its tokens, some of which have a weight.
        key: see `random_numbers.stream_key`.
        position: of the token to pick.
    """
    bit_lengths = np.frexp(kept.weights.astype(np.float64))[1]
    drawn = _draw_bit_length(kept.weights, bit_lengths, number_at(key, position))
    in_class = np.flatnonzero(bit_lengths == drawn)
    ids, weights = kept.ids[in_class], kept.weights[in_class]
    if len(ids) == 1:
        return int(ids[0])
    times = -np.log1p(-numbers_at(key_at(key, position), ids)) / weights
    return int(ids[times.argmin()])


def _draw_bit_length(weights: NDArray[np.int64], bit_lengths: NDArray[np.int32], number: float) -> int:
    """The class in which `number` of the total lies."""
    high = np.bincount(bit_lengths, weights >> _HALF_BITS, _NUM_CLASSES)  # float64 sums of these are exact
    low = np.bincount(bit_lengths, weights & (2**_HALF_BITS - 1), _NUM_CLASSES)
    masses = (high.astype(np.int64) << _HALF_BITS) + low.astype(np.int64)
    running = masses[::-1].cumsum()
    total = int(running[-1])
    target = min(int(number * float(total)), total - 1)
    return _NUM_CLASSES - 1 - int(running.searchsorted(target, side="right"))


def race_among_all(weights: Tensor, in_class: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The winner of each row, [num_rows, 1] int64, where all run: how many are in the class only the device knows.

    Args:
        weights: [num_rows, num_tokens] int64.
        ids: [num_rows, num_tokens] int64.
        in_class: [num_rows, num_tokens] bool, who can win.
        keys: [num_rows] int64, of the streams that the waiting times are from.
    """
    return _first_to_arrive(weights.masked_fill(~in_class, 0), uniform(keys[:, None], ids))


def race_among_few(weights: Tensor, in_class: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The same winner where only those of the class run; on a CPU."""
    rows, places = in_class.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weights))
    columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    shape = (len(weights), max(1, int(counts.max())))  # a row with nobody in its class has place 0
    left, moved = weights.new_zeros(shape), weights.new_zeros(shape)
    numbers = torch.zeros(shape, dtype=torch.float64)
    left[rows, columns] = weights[rows, places]
    moved[rows, columns] = places
    numbers[rows, columns] = uniform(keys[rows], ids[rows, places])
    return moved.gather(1, _first_to_arrive(left, numbers))


def weight_classes(weights: Tensor) -> Tensor:
    """41 less the bit length of each weight: 0 for the heaviest, 41 for weight 0. int64 like the weights.

    Whatever a failed row holds in place of weights is given some class too.
    """
    exponents = weights.to(torch.float64).view(torch.int64) >> _MANTISSA_BITS
    return exponents.clamp_(_EXPONENT_BIAS, _LAST_EXPONENT).neg_().add_(_LAST_EXPONENT)


def _draw_classes(weights: Tensor, classes: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The class of each row in which u of the total lies: [num_rows, 1] int64."""
    masses = weights.new_zeros((len(weights), _NUM_CLASSES)).scatter_add_(1, classes, weights)
    running = masses.cumsum(1)
    totals = running[:, -1:]
    numbers = uniform(keys, positions)[:, None]
    targets = torch.minimum((numbers * totals.to(torch.float64)).to(torch.int64), totals - 1)
    return torch.searchsorted(running, targets, right=True).clamp_(max=_NUM_CLASSES - 1)


def _first_to_arrive(weights: Tensor, numbers: Tensor) -> Tensor:
    """The place of the shortest waiting time: [num_rows, 1] int64; what has no weight never arrives."""
    times = torch.log1p(-numbers).neg_().div_(weights.to(torch.float64))
    return times.masked_fill_(weights == 0, math.inf).argmin(1, keepdim=True)
