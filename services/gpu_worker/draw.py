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

import torch
from torch import Tensor

from services.gpu_worker.random_numbers import stream_key_at, uniform

_NUM_CLASSES = 42  # bit lengths 41 (a weight of 2**40) to 0 (weight 0), in this order
_EXPONENT_BIAS = 1022  # of a float64: the bit length of an integer is its exponent less this
_MANTISSA_BITS = 52


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
    last = _EXPONENT_BIAS + _NUM_CLASSES - 1
    return exponents.clamp_(_EXPONENT_BIAS, last).neg_().add_(last)


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
