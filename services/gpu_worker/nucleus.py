"""gpu_worker: top_k, top_p and min_p: which tokens of a row may still be drawn.

The three apply in this order, each to what the one before has left. Tokens are ordered by logit, ties by id, so that
exactly k tokens survive top_k and the same ones on every device:

    top_k   the first k
    top_p   those with less than top_p of the mass before them, so at least one
    min_p   those at least min_p times as probable as the most probable one

All are sorted here: nothing waits for the device to say how many are left. On a CPU, where a full sort takes some
milliseconds a row, `likely_tokens` finds the same by sorting few; masses are sums of integers, so it is the same to
the last token, and this is its reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_BITS = 40
"""A weight is 2**40 for the most probable token; with 2**20 of them a sum still fits into 63 bits."""

REACHED_SLACK = 2.0**-20
"""A mass this close to top_p has reached it: 0.5 + 0.25 is 0.75 whatever the last bit of an exponential says."""


@dataclass(frozen=True, slots=True)
class FilterLimits:
    """The limits of some rows.

    Attributes:
        top_ks: [num_rows] int64, 0 is off.
        top_ps: [num_rows] float64 in (0, 1], 1 is off.
        min_ps: [num_rows] float64 in [0, 1], 0 is off.
        has_min_p: whether any min_p is on, known on the host.
    """

    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    has_min_p: bool

    def least_weights(self, largest: Tensor) -> Tensor:
        """The weight below which min_p removes a token, [num_rows, 1], given the largest weights ([num_rows, 1])."""
        return (self.min_ps[:, None] * largest.to(torch.float64)).ceil().to(torch.int64)


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """Tokens by probability, the most probable first, ties by id.

    Attributes:
        ids: [num_rows, num_tokens] int64.
        weights: [num_rows, num_tokens] int64, see `sampler.fixed_point_weights`; 0 for what may not be drawn.
    """

    ids: Tensor
    weights: Tensor


def most_probable(exponents: Tensor, weights: Tensor, limits: FilterLimits) -> WeightedRows:
    """What top_k, top_p and min_p leave of rows.

    Args:
        exponents: [num_rows, vocab_size] float32, what to sort by.
        weights: [num_rows, vocab_size] int64.
        limits: of the rows.
    """
    order = exponents.sort(dim=1, descending=True, stable=True).indices
    weights = weights.gather(1, order)
    places = torch.arange(weights.shape[1], device=weights.device)
    has_top_k = (limits.top_ks > 0)[:, None]
    weights = weights.masked_fill(has_top_k & (places >= limits.top_ks[:, None]), 0)
    running = weights.cumsum(1)
    reached = (_reached(limits.top_ps)[:, None] * running[:, -1:].to(torch.float64)).ceil().to(torch.int64)
    is_off = (limits.top_ps >= 1)[:, None]
    is_past = (running - weights >= reached.clamp_(min=1)) & ~is_off
    if limits.has_min_p:
        is_past |= weights < limits.least_weights(weights[:, :1])
    return WeightedRows(order, weights.masked_fill(is_past, 0))


def _reached(top_ps: Tensor) -> Tensor:
    return (top_ps - REACHED_SLACK).clamp(min=0)
