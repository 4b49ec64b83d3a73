"""gpu_worker: top_k, top_p and min_p: which tokens of a row may still be drawn.

The three apply in this order, each to what the one before has left. Tokens are ordered by logit, ties by id, so that
exactly k tokens survive top_k and the same ones on every device:

    top_k   the first k
    top_p   those with less than top_p of the mass before them, so at least one
    min_p   those at least min_p times as probable as the most probable one

A full sort of a vocabulary is slow on a CPU (36 to 85 ms for 16 rows of 49,152) and hardly ever needed: the tokens that
top_k or top_p cannot reach are found by comparing with a threshold and left out before sorting. The result is the same
to the last bit, because masses are sums of integers. On a CUDA device, where finding out how many are left would mean
to wait for the device, all are sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SELECTED = 1024
"""Up to this k the k-th largest logit is looked for before sorting; beyond it looking costs as much as sorting."""

_REACHED = 2.0**-20
"""A mass this close to top_p has reached it: 0.5 + 0.25 is 0.75 whatever the last bit of an exponential says."""

_NUM_PRUNINGS = 2  # the first leaves some thousands of tokens, the second some hundreds


@dataclass(frozen=True, slots=True)
class FilterLimits:
    """The limits of some rows.

    Attributes:
        top_ks: [num_rows] int64, 0 is off.
        top_ps: [num_rows] float64 in (0, 1], 1 is off.
        min_ps: [num_rows] float64 in [0, 1], 0 is off.
        largest_top_k: the largest of top_ks, known on the host.
        has_min_p: whether any min_p is on, known on the host.
    """

    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    largest_top_k: int
    has_min_p: bool

    def select(self, rows: Tensor) -> FilterLimits:
        """The limits of some rows only."""
        return FilterLimits(
            self.top_ks[rows], self.top_ps[rows], self.min_ps[rows], self.largest_top_k, self.has_min_p
        )  # fmt: skip

    def least_weights(self, largest: Tensor) -> Tensor:
        """The weight below which min_p removes a token, [num_rows, 1], given the largest weights ([num_rows, 1])."""
        return (self.min_ps[:, None] * largest.to(torch.float64)).ceil().to(torch.int64)


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """Tokens that may be drawn, num_tokens of each row; what fills up a shorter row has weight 0 and exponent -inf.

    Attributes:
        ids: [num_rows, num_tokens] int64.
        exponents: [num_rows, num_tokens] float32, what to sort by.
        weights: [num_rows, num_tokens] int64, see `sampler.fixed_point_weights`.
        totals: [num_rows, 1] int64, weight of the whole row, tokens that were left out included.
    """

    ids: Tensor
    exponents: Tensor
    weights: Tensor
    totals: Tensor

    @classmethod
    def whole(cls, exponents: Tensor, weights: Tensor) -> WeightedRows:
        """The whole vocabulary ([num_rows, vocab_size] both)."""
        ids = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
        return cls(ids, exponents, weights, weights.sum(1, keepdim=True))

    def where(self, mask: Tensor) -> WeightedRows:
        """Only the tokens where mask ([num_rows, num_tokens] bool, on a CPU) is set, in order, moved together."""
        rows, columns = mask.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=mask.shape[0])
        places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        shape = (mask.shape[0], int(counts.max()))
        ids, weights = self.ids.new_zeros(shape), self.weights.new_zeros(shape)
        exponents = self.exponents.new_full(shape, -math.inf)
        for target, source in ((ids, self.ids), (exponents, self.exponents), (weights, self.weights)):
            target[rows, places] = source[rows, columns]
        return WeightedRows(ids, exponents, weights, self.totals)

    def sorted(self) -> WeightedRows:
        """The most probable token first; ties stay in the order of ids."""
        exponents, order = self.exponents.sort(dim=1, descending=True, stable=True)
        return WeightedRows(self.ids.gather(1, order), exponents, self.weights.gather(1, order), self.totals)


def most_probable(rows: WeightedRows, limits: FilterLimits) -> WeightedRows:
    """What top_k, top_p and min_p leave: the most probable token first, weight 0 for all that may not be drawn."""
    if rows.weights.is_cpu:
        for _ in range(_NUM_PRUNINGS):
            rows = prune(rows, limits)
    return cut(rows.sorted(), limits)


def prune(rows: WeightedRows, limits: FilterLimits) -> WeightedRows:
    """Leaves out tokens that `cut` would certainly remove; how many is a matter of speed only.

    Where top_k is on: those below the k-th largest. Else those so small that all of them together fit into the mass
    that top_p gives away.
    """
    has_top_k = limits.top_ks > 0
    left_out = rows.totals.squeeze(1) - rows.weights.sum(1)
    spare = ((1 - _reached(limits.top_ps)) * rows.totals.squeeze(1).to(torch.float64)).to(torch.int64) - left_out
    thresholds = (spare // rows.weights.shape[1]).clamp_(min=1).masked_fill_(has_top_k, 0)
    mask = rows.weights >= thresholds[:, None]
    width = min(limits.largest_top_k, MAX_SELECTED, rows.exponents.shape[1])
    can_select = has_top_k & (limits.top_ks <= width)
    if bool(can_select.any()):
        largest = rows.exponents.topk(width, dim=1).values
        last = largest.gather(1, (limits.top_ks - 1).clamp(0, width - 1)[:, None])
        mask &= rows.exponents >= last.masked_fill(~can_select[:, None], -math.inf)
    return rows.where(mask)


def cut(rows: WeightedRows, limits: FilterLimits) -> WeightedRows:
    """Gives weight 0 to the tokens that may not be drawn. The rows are sorted."""
    places = torch.arange(rows.weights.shape[1], device=rows.weights.device)
    has_top_k = (limits.top_ks > 0)[:, None]
    weights = rows.weights.masked_fill(has_top_k & (places >= limits.top_ks[:, None]), 0)
    running = weights.cumsum(1)
    totals = torch.where(has_top_k, running[:, -1:], rows.totals)
    reached = (_reached(limits.top_ps)[:, None] * totals.to(torch.float64)).ceil().to(torch.int64)
    is_off = (limits.top_ps >= 1)[:, None]
    is_past = (running - weights >= reached.clamp_(min=1)) & ~is_off
    if limits.has_min_p:
        is_past |= weights < limits.least_weights(weights[:, :1])
    return WeightedRows(rows.ids, rows.exponents, weights.masked_fill(is_past, 0), rows.totals)


def _reached(top_ps: Tensor) -> Tensor:
    return (top_ps - _REACHED).clamp(min=0)
