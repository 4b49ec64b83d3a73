"""gpu_worker: products of inputs with a matrix of codes (see `dot_tile`).

Each thread rounds all inputs for itself: that costs less than to wait for another. Of many rows some go through all
columns of a thread before the next ones do, so that they stay in a cache. With AVX2 and no VNNI they go through
`many_rows` instead.
"""

from __future__ import annotations

from typing import Any

from services.gpu_worker.cpu_loops.dot_tile import TILE_COLUMNS, TILE_ROWS, dot_tile, goes_by_groups, takes_whole_inputs
from services.gpu_worker.cpu_loops.jit import compiled, floats, integers, loop, share, thread
from services.gpu_worker.cpu_loops.many_rows import many_rows_bytes, multiply_many
from services.gpu_worker.cpu_loops.rounded_group import GROUP, round_group

_ROWS_TOGETHER = 128
"""Most rows whose rounded inputs a thread keeps."""

_FEW_ROWS = 4
"""Up to so many rows all inputs keep 15 bits beside codes of 4: few wait for memory, not for multiplications."""

_GROUP_BYTES = 2 * GROUP + 8
"""Of rounded inputs: two parts, a factor, a sum."""

_WIDENS = takes_whole_inputs(8)
_GOES_BY_GROUPS = goes_by_groups()


@compiled
def _are_many(bits: int, rows: int) -> bool:
    return _GOES_BY_GROUPS and rows > (_FEW_ROWS if bits == 4 else 1)


@compiled
def _add_bias(out: int, bias: int, rows: int, columns: int) -> None:
    """To 16 columns of out."""
    addends = floats(bias, TILE_COLUMNS)
    for row in range(rows):
        sums = floats(out + 4 * row * columns, TILE_COLUMNS)
        for k in range(TILE_COLUMNS):
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
def _multiply(
    bits: int, rows: int, c: int, s: int, inputs: int, factors: int, totals: int, groups: int, out: int, step: int,
) -> None:  # fmt: skip
    """One tile of a matrix, times all rows."""
    row = 0
    while row < rows:
        i, f, t = inputs + 2 * row * groups * GROUP, factors + 4 * row * groups, totals + 4 * row * groups
        o = out + 4 * row * step
        together = TILE_ROWS if row + TILE_ROWS <= rows else 2 if row + 2 <= rows else 1
        dot_tile(bits, together, c, s, i, f, t, groups, o, step)
        row += together


def scratch_bytes(num_bits: int, rows: int, groups: int) -> int:
    """What each thread works in, for `GRID_PRODUCT`."""
    if _are_many(num_bits, rows):
        return many_rows_bytes(rows, groups)
    return min(rows, _ROWS_TOGETHER) * groups * _GROUP_BYTES


@loop
def GRID_PRODUCT(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, columns] = x [rows, groups * 32] times codes of `bits` bits, plus bias [columns] unless 0.

    Each thread works in `room` bytes of scratch: see `scratch_bytes`.
    """
    bits, x, codes, scales, out, scratch, room, rows, groups, tiles, bias = integers(pointer, 11)
    inputs = scratch + thread() * room
    if _are_many(bits, rows):
        multiply_many(bits, x, codes, scales, out, inputs, rows, groups, tiles, bias)
        return
    width, columns, most = groups * GROUP, tiles * TILE_COLUMNS, min(rows, _ROWS_TOGETHER)
    factors = inputs + 2 * most * width
    totals = factors + 4 * most * groups
    first, end = share(tiles)
    for row in range(0, rows, _ROWS_TOGETHER):
        count = min(_ROWS_TOGETHER, rows - row)
        _round(bits, x + 4 * row * width, count * groups, inputs, factors, totals)
        for tile in range(first, end):
            c = codes + tile * groups * bits * 64
            s = scales + tile * groups * (64 if bits == 4 else 32)
            o = out + 4 * (row * columns + tile * TILE_COLUMNS)
            _multiply(bits, count, c, s, inputs, factors, totals, groups, o, columns)
            if bias != 0:
                _add_bias(o, bias + 4 * TILE_COLUMNS * tile, count, columns)
