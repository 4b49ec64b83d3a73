"""gpu_worker: products of inputs with a matrix of bfloat16, on the registers for tiles (see `tile_registers`).

Few rows are rounded by each thread for itself: that costs less than to wait for another. Of many rows some go through
all columns of a thread before the next ones do, so that they stay in a cache.
"""

from __future__ import annotations

from typing import Any

from services.gpu_worker.cpu_loops.jit import bfloat16s, compiled, floats, integers, loop, rounded, share, thread
from services.gpu_worker.cpu_loops.tile_registers import (
    DEPTH,
    LINE_BYTES,
    SHAPES_BYTES,
    TILE,
    TILE_BYTES,
    multiply_tiles,
    release_registers,
    set_registers,
)

BLOCK_BYTES = 4 * TILE_BYTES
"""Of a thread's scratch, before its rounded inputs: two by two tiles of sums that are still to be rounded."""

_BLOCK_STEP = 2 * LINE_BYTES

_ROWS_TOGETHER = 256


@compiled
def _multiply(rows: int, is_pair: bool, x: int, width: int, weights: int, depths: int, out: int, step: int) -> None:
    """Up to 32 rows by one or two tiles of columns; of fewer than 16 as many as the registers are set for."""
    if rows == 2 * TILE:
        if is_pair:
            multiply_tiles(2, 2, 0, x, 2 * width, LINE_BYTES, weights, depths, out, step)
        else:
            multiply_tiles(2, 1, 0, x, 2 * width, LINE_BYTES, weights, depths, out, step)
    elif is_pair:
        multiply_tiles(1, 2, 0, x, 2 * width, LINE_BYTES, weights, depths, out, step)
    else:
        multiply_tiles(1, 1, 0, x, 2 * width, LINE_BYTES, weights, depths, out, step)


@compiled
def _add_bias(out: int, step: int, bias: int, rows: int, columns: int) -> None:
    addends = floats(bias, columns)
    for row in range(rows):
        sums = floats(out + row * step, columns)
        for k in range(columns):
            sums[k] += addends[k]


@compiled
def _store_rounded(out: int, step: int, block: int, rows: int, columns: int) -> None:
    """Of a block, whose rows are `_BLOCK_STEP` apart."""
    for row in range(rows):
        sums, result = floats(block + _BLOCK_STEP * row, columns), bfloat16s(out + row * step, columns)
        for k in range(columns):
            result[k] = rounded(sums[k])


@loop
def TILE_PRODUCT(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, tiles * 16] = x [rows, depths * 32] times weights, plus bias [tiles * 16] unless 0.

    x has numbers of `bits` bits and out of `out_bits`, float32 or bfloat16. For each thread scratch has `BLOCK_BYTES`
    and, if x is not in bfloat16, room for it.
    """
    (
        x, weights, out, bias, scratch, shapes, rows, depths, tiles, bits, out_bits,
    ) = integers(pointer, 11)  # fmt: skip
    width, columns, size = DEPTH * depths, TILE * tiles, out_bits // 8
    room = 0 if bits == 16 else 2 * rows * width
    block = scratch + thread() * (room + BLOCK_BYTES)
    inputs = x
    if bits == 32:
        inputs = block + BLOCK_BYTES
        given, halves = floats(x, rows * width), bfloat16s(inputs, rows * width)
        for k in range(rows * width):
            halves[k] = rounded(given[k])
    first, end = share((tiles + 1) // 2)
    set_registers(shapes + SHAPES_BYTES * TILE)
    for begin in range(0, rows, _ROWS_TOGETHER):
        stop = min(begin + _ROWS_TOGETHER, rows)
        for pair in range(first, end):
            is_pair = 2 * pair + 1 < tiles
            wide = 2 * TILE if is_pair else TILE
            row = begin
            while row < stop:
                count = 2 * TILE if row + 2 * TILE <= stop else min(TILE, stop - row)
                if count < TILE:
                    set_registers(shapes + SHAPES_BYTES * count)
                result = out + size * (row * columns + 2 * TILE * pair)
                sums, step = (block, _BLOCK_STEP) if out_bits == 16 else (result, 4 * columns)
                at = inputs + 2 * row * width
                _multiply(count, is_pair, at, width, weights + 2 * TILE_BYTES * pair * depths, depths, sums, step)
                if count < TILE:
                    set_registers(shapes + SHAPES_BYTES * TILE)
                if bias != 0:
                    _add_bias(sums, step, bias + 8 * TILE * pair, count, wide)
                if out_bits == 16:
                    _store_rounded(result, 2 * columns, block, count, wide)
                row += count
    release_registers()
