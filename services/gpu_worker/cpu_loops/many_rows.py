"""gpu_worker: a product of many rows with codes, for processors with AVX2 and no VNNI (see `group_sums`).

With codes of 4 bits inputs are multiplied in two parts. A rounding error grows with the largest input of its group, and
a few groups have inputs far larger than the others: these keep 15 bits, the others 8 (docs/decisions, number 14).
Rounded inputs lie group by group, and of each group the low parts of those rows together that have one.
"""

from __future__ import annotations

import numpy as np

from services.gpu_worker.cpu_loops.dot_tile import TILE_COLUMNS
from services.gpu_worker.cpu_loops.group_sums import (
    NUMBER_BYTES,
    WIDE_BYTES,
    add_group,
    copy_part,
    sum_of_part,
    take_apart,
    write_sums,
)
from services.gpu_worker.cpu_loops.jit import Floats, compiled, floats, int32s, num_threads, share
from services.gpu_worker.cpu_loops.rounded_group import GROUP, round_group

_ROWS_TOGETHER = 128
"""Most rows whose rounded inputs and sums stay in a core's caches."""

_ROWS_OF_A_THREAD = 8
"""Fewer are not given to a thread of its own: it takes all codes apart for them."""

_BELOW_AVERAGE = np.float32(0.999)  # where all are as large, all stay fine, however the last digits are rounded
_LINE = 64  # bytes, of a cache
_PART = GROUP + 4  # bytes of a high or low part, with its factor
_NUMBERS = 8  # bytes beside both: what minimums are multiplied by; which row a low part belongs to
_ROUNDED = 2 * GROUP + 8  # bytes of a group of one row: both parts, a step, a sum


def many_rows_bytes(rows: int, groups: int) -> int:
    """What each thread works in: whole lines."""
    most = min(rows, _ROWS_TOGETHER)
    tile = WIDE_BYTES + NUMBER_BYTES + 4 * TILE_COLUMNS + 4 * most * (TILE_COLUMNS + 1)
    number = tile + groups * (most * (2 * _PART + _NUMBERS) + _ROUNDED + 4)
    return -(-number // _LINE) * _LINE


@compiled
def _average(steps: Floats) -> np.float32:
    """What the square of a step must exceed for its group to keep 15 bits, of one row."""
    limit = np.float32(0)
    for step in steps:
        limit += step * step
    return np.float32(limit * (_BELOW_AVERAGE / np.float32(len(steps))))


@compiled
def _round_rows(
    x: int, rows: int, groups: int, highs: int, lows: int, high_factors: int, low_factors: int, moved: int,
    places: int, counts_at: int, row_at: int,
) -> None:  # fmt: skip
    """Rounds rows and lays them out group by group.

    Args:
        x: address of [rows, groups, 32] float32.
        rows: how many.
        groups: how many.
        highs: of [groups, rows, 32] int8.
        lows: likewise; of each group as many as `counts` says.
        high_factors: of [groups, rows] float32.
        low_factors: likewise.
        moved: of [groups, rows] float32, the sum of a group's rounded inputs.
        places: of [groups, rows] int32, the row that a low part belongs to.
        counts_at: of [groups] int32.
        row_at: of room for one row's groups.
    """
    width = groups * GROUP
    steps_at = row_at + 2 * width
    totals_at = steps_at + 4 * groups
    steps, totals, counts = floats(steps_at, groups), int32s(totals_at, groups), int32s(counts_at, groups)
    number = groups * rows
    of_high, of_low = floats(high_factors, number), floats(low_factors, number)
    sums, rows_of_lows = floats(moved, number), int32s(places, number)
    for g in range(groups):
        counts[g] = 0
    for row in range(rows):
        numbers = x + 4 * row * width
        for g in range(groups):
            round_group(8, numbers + 4 * GROUP * g, row_at + 2 * GROUP * g, steps_at + 4 * g, totals_at + 4 * g)
        limit = _average(steps)
        for g in range(groups):
            at, low, part = g * rows + row, g * rows + counts[g], row_at + 2 * GROUP * g
            copy_part(part, highs + GROUP * at)
            of_high[at] = 128 * steps[g]
            # A low part that is not kept is overwritten by the next one: a branch would often be guessed wrong.
            copy_part(part + GROUP, lows + GROUP * low)
            of_low[low] = steps[g]
            rows_of_lows[low] = row
            is_coarse = steps[g] * steps[g] <= limit
            counts[g] += 0 if is_coarse else 1
            sums[at] = steps[g] * np.float32(128 * sum_of_part(part) if is_coarse else totals[g])


@compiled
def _round_whole(x: int, rows: int, groups: int, inputs: int, factors: int, totals: int) -> None:
    """Rounds rows for codes of 8 bits: inputs [groups, rows, 32] int16, factors and totals [groups, rows]."""
    for row in range(rows):
        for g in range(groups):
            at = g * rows + row
            round_group(
                16, x + 4 * GROUP * (row * groups + g), inputs + 2 * GROUP * at, factors + 4 * at, totals + 4 * at
            )


@compiled
def _multiply_rows(
    bits: int, x: int, codes: int, scales: int, out: int, scratch: int, rows: int, groups: int, first: int, end: int,
    columns: int, bias: int,
) -> None:  # fmt: skip
    """Rows that are rounded together, times tiles [first, end) of 16 columns."""
    number = groups * rows
    wide, numbers = scratch, scratch + WIDE_BYTES
    zeros = numbers + NUMBER_BYTES
    sums_at = zeros + 4 * TILE_COLUMNS
    highs = sums_at + 4 * TILE_COLUMNS * rows
    lows = highs + GROUP * number
    high_factors = lows + GROUP * number
    low_factors = high_factors + 4 * number
    moved = low_factors + 4 * number
    places = moved + 4 * number
    in_order = places + 4 * number
    counts_at = in_order + 4 * rows
    row_at = counts_at + 4 * groups
    if bits == 8:
        _round_whole(x, rows, groups, highs, high_factors, moved)
    else:
        _round_rows(
            x, rows, groups, highs, lows, high_factors, low_factors, moved, places, counts_at, row_at
        )  # fmt: skip
    sums, counts, order = floats(zeros, TILE_COLUMNS * (1 + rows)), int32s(counts_at, groups), int32s(in_order, rows)
    for i in range(len(sums)):
        sums[i] = np.float32(0)
    for row in range(rows):
        order[row] = row
    for tile in range(first, end):
        for g in range(groups):
            at, of_tile = g * rows, tile * groups + g
            factors = high_factors + 4 * at
            if bits == 8:
                take_apart(8, codes + 512 * of_tile, scales + 32 * of_tile, wide, numbers)
                add_group(8, 0, wide, numbers, highs + 2 * GROUP * at, factors, 0, in_order, rows, sums_at)
            else:
                take_apart(4, codes + 256 * of_tile, scales + 64 * of_tile, wide, numbers)
                add_group(4, 1, wide, numbers, highs + GROUP * at, factors, moved + 4 * at, in_order, rows, sums_at)
                add_group(
                    4, 0, wide, numbers, lows + GROUP * at, low_factors + 4 * at, 0, places + 4 * at, counts[g], sums_at
                )
        addends = zeros if bias == 0 else bias + 4 * TILE_COLUMNS * tile
        write_sums(sums_at, rows, addends, out + 4 * TILE_COLUMNS * tile, 4 * columns)


@compiled
def multiply_many(
    bits: int, x: int, codes: int, scales: int, out: int, scratch: int, rows: int, groups: int, tiles: int, bias: int
) -> None:
    """The calling thread's part of `GRID_PRODUCT`, whose arguments these are; scratch is its own.

    Threads share the columns, and each rounds all rows; or they share the rows, and each takes all codes apart, which
    costs about half as much for a tile as rounding does for a row.
    """
    columns, first_row, end_row, first_tile, end_tile = tiles * TILE_COLUMNS, 0, rows, 0, tiles
    if 2 * rows > tiles and rows >= _ROWS_OF_A_THREAD * num_threads():
        first_row, end_row = share(rows)
    else:
        first_tile, end_tile = share(tiles)
    passes = -(-(end_row - first_row) // _ROWS_TOGETHER)
    together = -(-(end_row - first_row) // (4 * max(passes, 1))) * 4  # as many in each, by fours
    for row in range(first_row, end_row, max(together, 1)):
        count = min(together, end_row - row)
        _multiply_rows(
            bits, x + 4 * row * groups * GROUP, codes, scales, out + 4 * row * columns, scratch, count, groups,
            first_tile, end_tile, columns, bias,
        )  # fmt: skip
