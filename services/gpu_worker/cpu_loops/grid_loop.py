"""gpu_worker: products of inputs with a matrix of codes (see `dot_tile`).

Each thread rounds all inputs for itself: that costs less than to wait for another. Of many rows some go through all
columns of a thread before the next ones do, so that they stay in a cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.dot_tile import TILE_ROWS, dot_tile, skips_low_parts, takes_whole_inputs
from services.gpu_worker.cpu_loops.jit import compiled, floats, int32s, integers, loop, share, thread
from services.gpu_worker.cpu_loops.rounded_group import GROUP, drop_low_part, round_group

ROWS_TOGETHER = 128
"""Most rows whose rounded inputs a thread keeps."""

FINE_ROWS = 4
"""Up to so many rows all inputs keep 15 bits: a product of few waits for memory, not for multiplications."""

GROUP_BYTES = 2 * GROUP + 12
"""Of rounded inputs: two parts, a factor, a sum, and whether there is a low part."""

_BELOW_AVERAGE = np.float32(0.999)  # where all are as large, all stay fine, however the last digits are rounded

_WIDENS = takes_whole_inputs(8)
_SKIPS = skips_low_parts(4)


@compiled
def _add_bias(out: int, bias: int, rows: int, columns: int) -> None:
    """To 16 columns of out."""
    addends = floats(bias, 16)
    for row in range(rows):
        sums = floats(out + 4 * row * columns, 16)
        for k in range(16):
            sums[k] += addends[k]


@compiled
def _round(bits: int, x: int, groups: int, inputs: int, factors: int, totals: int) -> None:
    """So many groups of inputs, as a product with codes of `bits` bits takes them."""
    for i in range(groups):
        if bits == 8 and _WIDENS:
            round_group(16, x + 4 * GROUP * i, inputs + 2 * GROUP * i, factors + 4 * i, totals + 4 * i)
        else:
            round_group(8, x + 4 * GROUP * i, inputs + 2 * GROUP * i, factors + 4 * i, totals + 4 * i)


@compiled
def _choose_parts(is_fine: bool, groups: int, inputs: int, factors: int, totals: int, lows: int) -> None:
    """Of one row. Unless all are to stay fine, groups whose largest input is well below average are left with 8 bits.

    A rounding error grows with the largest input of its group, and a few groups have inputs far larger than the others.
    """
    steps, has_low = floats(factors, groups), int32s(lows, groups)
    limit = np.float32(0)
    for i in range(groups):
        limit += steps[i] * steps[i]
    limit *= _BELOW_AVERAGE / np.float32(groups)
    for i in range(groups):
        has_low[i] = 1
        if not is_fine and steps[i] * steps[i] <= limit:
            has_low[i] = 0
            drop_low_part(inputs + 2 * GROUP * i, totals + 4 * i)


@compiled
def _multiply(
    bits: int, rows: int, c: int, s: int, inputs: int, factors: int, totals: int, lows: int, groups: int, out: int,
    step: int,
) -> None:  # fmt: skip
    """One tile of a matrix, times all rows."""
    row = 0
    while row < rows:
        i, f, t = inputs + 2 * row * groups * GROUP, factors + 4 * row * groups, totals + 4 * row * groups
        low, o = lows + 4 * row * groups, out + 4 * row * step
        together = TILE_ROWS if row + TILE_ROWS <= rows else 2 if row + 2 <= rows else 1
        dot_tile(bits, together, c, s, i, f, t, low, groups, o, step)
        row += together


@loop
def GRID_PRODUCT(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, columns] = x [rows, groups * 32] times codes of `bits` bits, plus bias [columns] unless 0."""
    bits, x, codes, scales, out, scratch, rows, groups, tiles, bias = integers(pointer, 10)
    width, columns, most = groups * GROUP, tiles * 16, min(rows, ROWS_TOGETHER)
    inputs = scratch + thread() * most * groups * GROUP_BYTES
    factors = inputs + 2 * most * width
    totals = factors + 4 * most * groups
    lows = totals + 4 * most * groups
    is_fine = not _SKIPS or bits != 4 or rows <= FINE_ROWS
    first, end = share(tiles)
    for row in range(0, rows, ROWS_TOGETHER):
        count = min(ROWS_TOGETHER, rows - row)
        _round(bits, x + 4 * row * width, count * groups, inputs, factors, totals)
        for k in range(count):
            first_group = k * groups
            i, f, t = inputs + 2 * GROUP * first_group, factors + 4 * first_group, totals + 4 * first_group
            _choose_parts(is_fine, groups, i, f, t, lows + 4 * first_group)
        for tile in range(first, end):
            c = codes + tile * groups * bits * 64
            s = scales + tile * groups * (64 if bits == 4 else 32)
            o = out + 4 * (row * columns + tile * 16)
            _multiply(bits, count, c, s, inputs, factors, totals, lows, groups, o, columns)
            if bias != 0:
                _add_bias(o, bias + 64 * tile, count, columns)
