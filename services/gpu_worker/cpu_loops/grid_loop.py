"""gpu_worker: products of inputs with a matrix of codes (see `dot_tile`).

Each thread rounds all inputs for itself: that costs less than to wait for another, as long as they are not very many.
"""

from __future__ import annotations

from typing import Any

from services.gpu_worker.cpu_loops.dot_tile import dot_tile
from services.gpu_worker.cpu_loops.jit import compiled, floats, integers, loop, share, thread
from services.gpu_worker.cpu_loops.rounded_group import GROUP, round_group


@compiled
def _add_bias(out: int, bias: int, rows: int, columns: int) -> None:
    """To 16 columns of out."""
    addends = floats(bias, 16)
    for row in range(rows):
        sums = floats(out + 4 * row * columns, 16)
        for k in range(16):
            sums[k] += addends[k]


@loop
def GRID_PRODUCT(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, columns] = x [rows, groups * 32] times codes of `bits` bits, plus bias [columns] unless 0."""
    bits, x, codes, scales, out, scratch, rows, groups, tiles, bias = integers(pointer, 10)
    width, columns = groups * GROUP, tiles * 16
    inputs = scratch + thread() * rows * groups * (2 * GROUP + 8)
    factors = inputs + 2 * rows * width
    totals = factors + 4 * rows * groups
    for i in range(rows * groups):
        round_group(x + 4 * GROUP * i, inputs + 2 * GROUP * i, factors + 4 * i, totals + 4 * i)
    first, end = share(tiles)
    for tile in range(first, end):
        c = codes + tile * groups * bits * 64
        s = scales + tile * groups * (64 if bits == 4 else 32)
        row = 0
        while row < rows:
            i, f, t = inputs + 2 * row * width, factors + 4 * row * groups, totals + 4 * row * groups
            o = out + 4 * (row * columns + tile * 16)
            if bits == 4:
                if row + 4 <= rows:
                    dot_tile(4, 4, c, s, i, f, t, groups, o, columns)
                elif row + 2 <= rows:
                    dot_tile(4, 2, c, s, i, f, t, groups, o, columns)
                else:
                    dot_tile(4, 1, c, s, i, f, t, groups, o, columns)
            elif row + 4 <= rows:
                dot_tile(8, 4, c, s, i, f, t, groups, o, columns)
            elif row + 2 <= rows:
                dot_tile(8, 2, c, s, i, f, t, groups, o, columns)
            else:
                dot_tile(8, 1, c, s, i, f, t, groups, o, columns)
            row += 4 if row + 4 <= rows else 2 if row + 2 <= rows else 1
        if bias != 0:
            _add_bias(out + 64 * tile, bias + 64 * tile, rows, columns)
