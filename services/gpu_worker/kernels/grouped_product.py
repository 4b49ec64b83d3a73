"""gpu_worker: products of many rows, sorted by expert, with a matrix for each expert, in one kernel.

The rows of each expert are cut into tiles. How many there are is not known on the host, only that there are no more
than `most_tiles`; a program finds out on the device which expert its tile belongs to, or that there is none for it.

    ends      0     3 | 3 | 20                experts with 3, 0 and 17 rows
    tiles     t0      |   | t1 t2             of 16 rows
    programs  p0            p1 p2   p3        p3 has nothing to do

The plain way is one product for each expert (`models/feed_forward.py`).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.kernels.pool_tiles import takes_float32

_LEAST_ROWS, _MOST_ROWS = 16, 128  # of a tile
_INNER_BYTES = 128  # of a line of a tile


def grouped_product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each expert by its matrix.

    Args:
        x: [num_rows, in_features] contiguous, rows of one expert side by side.
        stack: [num_experts, out_features, in_features] contiguous.
        ends: [num_experts] int32, one past the last row of each expert; the last is num_rows.

    Returns:
        [num_rows, out_features] in the dtype of x.
    """
    num_rows, width = x.shape
    num_experts, num_columns, _ = stack.shape
    output = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    row_block = tile_rows(num_rows, num_experts)
    column_block = min(128 if row_block >= 64 else 64, max(16, power_of_two(num_columns)))
    grid = (most_tiles(num_rows, num_experts, row_block), -(-num_columns // column_block))
    _multiply_tile[grid](
        x,
        stack,
        ends,
        output,
        num_experts=num_experts,
        num_columns=num_columns,
        width=width,
        expert_block=power_of_two(num_experts),
        row_block=row_block,
        column_block=column_block,
        inner_block=min(_INNER_BYTES // x.element_size(), max(16, power_of_two(width))),
        in_float32=takes_float32(x),
        num_warps=8 if row_block * column_block >= 128 * 128 else 4,
    )
    return output


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: as many as an expert has on average, a power of two."""
    return min(_MOST_ROWS, max(_LEAST_ROWS, power_of_two(-(-num_rows // num_experts))))


def most_tiles(num_rows: int, num_experts: int, row_block: int) -> int:
    """Most tiles that any spread of rows over experts makes: whole ones, and one that is not for each expert in use."""
    return num_rows // row_block + min(num_rows, num_experts)


@kernel
def _multiply_tile(
    x: tl.tensor,
    stack: tl.tensor,
    ends: tl.tensor,
    output: tl.tensor,
    num_experts: tl.constexpr,
    num_columns: tl.constexpr,
    width: tl.constexpr,
    expert_block: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
    inner_block: tl.constexpr,
    in_float32: tl.constexpr,
) -> None:
    """One tile of rows by some columns of its expert's matrix."""
    tile = tl.program_id(0)
    experts = tl.arange(0, expert_block)
    is_expert = experts < num_experts
    group_ends = tl.load(ends + experts, mask=is_expert, other=0)
    group_starts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    num_tiles = tl.where(is_expert, (group_ends - group_starts + row_block - 1) // row_block, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert < num_experts:
        is_mine = experts == expert
        first = tl.sum(tl.where(is_mine, group_starts + (tile - tile_ends + num_tiles) * row_block, 0), 0)
        end = tl.sum(tl.where(is_mine, group_ends, 0), 0)
        rows = (first + tl.arange(0, row_block)).to(tl.int64)
        columns = tl.program_id(1) * column_block + tl.arange(0, column_block)
        inner = tl.arange(0, inner_block)
        is_row = rows < end
        is_column = columns < num_columns
        matrix = stack + expert.to(tl.int64) * num_columns * width
        total = tl.full([row_block, column_block], 0.0, tl.float32)
        for start in range(0, width, inner_block):
            at = start + inner
            is_inner = at < width
            left_places = rows[:, None] * width + at[None, :]
            left = tl.load(x + left_places, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            right_places = columns[:, None] * width + at[None, :]
            right = tl.load(matrix + right_places, mask=is_column[:, None] & is_inner[None, :], other=0.0)
            if in_float32:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total += tl.dot(left, tl.trans(right), input_precision="ieee")
        out = rows[:, None] * num_columns + columns[None, :]
        tl.store(output + out, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
