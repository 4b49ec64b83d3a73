"""gpu_worker: picks one token a row as a function of (seed, choice, position, logits) and of nothing else.

A row's token does not depend on which rows are beside it, in what order, or on the number of threads: everything across
the vocabulary is either elementwise, a maximum, or a sum of integers (probabilities are 40-bit fixed point numbers).

    greedy rows      the first of the largest logits; they pay for nothing else
    drawing rows     from all tokens, or those that min_p leaves (see `draw`)
    filtering rows   top_k, then top_p, then min_p on what is left (see `nucleus` and, for CPUs, `likely_tokens`), drawn
                     in the same way

On a CPU with numba `cpu_loops.sampling` does all of it in one loop, of which this here is the reference.

It holds no state and decides nothing about a request. A row without a usable maximum (all NaN, or an infinity) is
flagged and harms nobody; where only some logits are NaN, those get probability 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.draw import draw_kept, draw_places
from services.gpu_worker.likely_tokens import RowLimits, kept_tokens
from services.gpu_worker.nucleus import WEIGHT_BITS, FilterLimits, most_probable
from services.gpu_worker.uploads import to_host

GREEDY_TEMPERATURE = 1e-5
"""At or below this a request is greedy: the draw could not differ, and dividing by it would overflow."""

CHUNK = 256
"""Logits reduced at once when looking for the largest."""

_LEAST_EXPONENT = -50.0  # weight 0 already; exponentials that underflow take a CPU 80 times as long
_MAX_BLOCK = 2**22  # logits drawn from at once: bounds the scratch memory to about 300 MB
_CACHED_BLOCK = 2**18  # those that a CPU filters at once: what it writes of them is still in its cache when it is read


NUM_COLUMNS = 7
"""Of `DrawnRows.columns`."""


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows of a step that draw, all in the same way; the other rows are greedy.

    Attributes:
        columns: [NUM_COLUMNS, num_drawn] int64 on the device of the logits, for each row: which row of the logits it
            is, its key (see `random_numbers.stream_key`), the position of the token to pick (how many tokens the
            request has so far), top_k, and the bits of float64 temperature (> GREEDY_TEMPERATURE), top_p and min_p.
        has_min_p: whether any min_p is on, known on the host.
        is_filtering: whether a top_k or top_p is on in each of them, or in none.
    """

    columns: Tensor
    has_min_p: bool
    is_filtering: bool

    def __len__(self) -> int:
        return self.columns.shape[1]

    @property
    def rows(self) -> Tensor:
        """[num_drawn] int64, which rows of the logits."""
        return self.columns[0]

    @property
    def keys(self) -> Tensor:
        """[num_drawn] int64."""
        return self.columns[1]

    @property
    def positions(self) -> Tensor:
        """[num_drawn] int64."""
        return self.columns[2]

    @property
    def temperatures(self) -> Tensor:
        """[num_drawn] float32."""
        return self.columns[4].view(torch.float64).to(torch.float32)

    @property
    def limits(self) -> FilterLimits:
        """top_k, top_p and min_p."""
        top_ps, min_ps = self.columns[5:].view(torch.float64)
        return FilterLimits(self.columns[3], top_ps, min_ps, self.has_min_p)

    def select(self, index: Tensor) -> DrawnRows:
        """Some of them, by their places in the columns ([n] int64, or [num_drawn] bool on a CPU)."""
        return DrawnRows(self.columns[:, index], self.has_min_p, self.is_filtering)

    def blocks(self, num_rows: int) -> list[DrawnRows]:
        """The same in blocks of at most `num_rows` rows."""
        if len(self) <= num_rows:
            return [self]
        return [
            DrawnRows(block, self.has_min_p, self.is_filtering) for block in torch.split(self.columns, num_rows, dim=1)
        ]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was picked: token_ids [num_rows] int64 (0 for a failed row), is_failed [num_rows] bool."""

    token_ids: Tensor
    is_failed: Tensor

    def among(self, first: int, end: int) -> SampledTokens:
        """Those of the rows [first, end)."""
        return SampledTokens(self.token_ids[first:end], self.is_failed[first:end])

    def to_host(self) -> SampledTokens:
        """The same on the host, perhaps only once the device has come this far."""
        return SampledTokens(to_host(self.token_ids), to_host(self.is_failed))

    def lists(self, rows: slice) -> tuple[list[int], list[bool]]:
        """Those of some rows as plain numbers, once they are on the host."""
        return self.token_ids[rows].tolist(), self.is_failed[rows].tolist()


def sample(logits: Tensor, groups: Sequence[DrawnRows]) -> SampledTokens:
    """Picks a token for each row.

    On a CUDA device nothing here waits for the device.

    Args:
        logits: [num_rows, vocab_size] float32, vocab_size <= 2**20; not changed.
        groups: the rows that draw.
    """
    if not logits.is_cpu:
        logits = torch.where(logits.isnan(), -math.inf, logits)
    maxima, token_ids = row_maxima(logits)
    is_failed = ~maxima.isfinite()
    if logits.is_cpu and bool(is_failed.any()):
        logits = torch.where(logits.isnan(), -math.inf, logits)
        maxima, token_ids = row_maxima(logits)
        is_failed = ~maxima.isfinite()
        groups = [group.select(~is_failed[group.rows]) for group in groups]
    for group in groups:
        draw, most_logits = _draw, _MAX_BLOCK
        if group.is_filtering:
            draw, most_logits = (_draw_likely, _CACHED_BLOCK) if logits.is_cpu else (_draw_filtered, _MAX_BLOCK)
        for block in group.blocks(max(1, most_logits // logits.shape[1])) if len(group) else ():
            exponents = _exponents(logits, maxima, block.rows)
            token_ids[block.rows] = draw(exponents, unrounded_weights(exponents, block.temperatures), block)
    return SampledTokens(token_ids.masked_fill(is_failed, 0), is_failed)


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the first id that has it; NaN if the row holds a NaN.

    In two levels: torch's reductions that return an index are ten times slower on a CPU than those that do not.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        [num_rows] of the same type, [num_rows] int64.
    """
    vocab_size = logits.shape[1]
    width = min(CHUNK, vocab_size)
    maxima = chunk_maxima(logits)
    chunks = maxima.argmax(1, keepdim=True)
    # The last chunk may be short: read the full width up to the end of the row, its own ids are the last ones.
    starts = (chunks * width).clamp_(max=vocab_size - width)
    ids = starts + torch.arange(width, device=logits.device)
    places = logits.gather(1, ids).argmax(1, keepdim=True)
    return maxima.gather(1, chunks).squeeze(1), (starts + places).squeeze(1)


def chunk_maxima(logits: Tensor) -> Tensor:
    """The largest logit of each `CHUNK` ids, the last of which may be fewer: [num_rows, num_chunks]."""
    vocab_size = logits.shape[1]
    body = vocab_size - vocab_size % CHUNK
    parts = [torch.unflatten(logits[:, :body], 1, (-1, CHUNK)).amax(2)] if body else []
    if body < vocab_size:
        parts.append(logits[:, body:].amax(1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unrounded_weights(exponents: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities up to a common factor: exp(exponent / temperature) * 2**40. Rounded down they are the weights.

    Args:
        exponents: [num_rows, vocab_size] float32 <= 0, logits less their row's maximum.
        temperatures: [num_rows] float32 > 0.

    Returns:
        [num_rows, vocab_size] float32 in [0, 2**40]; 2**40 for the most probable token.
    """
    scaled = (exponents / temperatures[:, None]).clamp_(min=_LEAST_EXPONENT)
    return scaled.exp_().mul_(2.0**WEIGHT_BITS)


def fixed_point_weights(unrounded: Tensor) -> Tensor:
    """The weights as integers, int64."""
    return unrounded.to(torch.int64)


def total_weights(unrounded: Tensor) -> list[int]:
    """The sum of each row's weights."""
    totals: list[float] = unrounded.trunc().to(torch.float64).sum(1).tolist()
    if max(totals) < 2.0**53:  # nearly always: then no sum on the way was rounded
        return [int(total) for total in totals]
    exact: list[int] = fixed_point_weights(unrounded).sum(1).tolist()
    return exact


def _exponents(logits: Tensor, maxima: Tensor, rows: Tensor) -> Tensor:
    """Logits of some rows less their maxima, [num_rows, vocab_size]."""
    if logits.is_cpu and len(rows) == 1:  # nothing has to be gathered
        return logits[int(rows)].sub(maxima[rows])[None]
    return logits.index_select(0, rows).sub_(maxima[rows, None])


def _draw(exponents: Tensor, unrounded: Tensor, drawn: DrawnRows) -> Tensor:
    weights = fixed_point_weights(unrounded)
    if drawn.limits.has_min_p:
        weights.masked_fill_(weights < drawn.limits.least_weights(weights.amax(1, keepdim=True)), 0)
    ids = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    return draw_places(weights, ids, drawn.keys, drawn.positions).squeeze(1)


def _draw_filtered(exponents: Tensor, unrounded: Tensor, drawn: DrawnRows) -> Tensor:
    kept = most_probable(exponents, fixed_point_weights(unrounded), drawn.limits)
    places = draw_places(kept.weights, kept.ids, drawn.keys, drawn.positions)
    return kept.ids.gather(1, places).squeeze(1)


def _draw_likely(exponents: Tensor, unrounded: Tensor, drawn: DrawnRows) -> Tensor:
    """The same as `_draw_filtered`, row by row: on a CPU it need not sort all tokens."""
    limits = drawn.limits
    by_row = (drawn.temperatures, limits.top_ks, limits.top_ps, limits.min_ps)
    limits_of_rows = map(RowLimits, *(column.tolist() for column in by_row))
    kept = map(kept_tokens, exponents.numpy(), unrounded.numpy(), total_weights(unrounded), limits_of_rows)
    return torch.tensor(list(map(draw_kept, kept, drawn.keys.tolist(), drawn.positions.tolist())))
