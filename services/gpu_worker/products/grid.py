"""gpu_worker: products with matrices kept as codes, through a compiled loop of our own (see `cpu_loops.dot_tile`).

The weights are those of the file, not rounded again. Inputs are rounded to 15 bits, with a factor for each 32 of them;
sums and results are in float32.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.weight_grid import GROUP, WeightGrid

_TILE = 16  # rows of a matrix that the loop takes together
BYTES_OF_8_WEIGHTS = {4: 5, 8: 8.5}
"""Of a matrix, by bits: its codes, and for 32 weights a scale of 2 bytes, with 4 bits a minimum of 2 as well."""

_LARGEST_LOSS = 2.0**-10  # of scales in half precision, beside the largest of them


def fits_grid_loop(grid: WeightGrid) -> bool:
    """Whether the loop can take the matrix here, and half precision holds its scales."""
    if grid.codes.shape[0] % _TILE or not has_grid_loop():
        return False
    return all(_fits_half(numbers) for numbers in (grid.scales, grid.minimums))


def has_grid_loop() -> bool:
    """Whether loops can run here, and this processor has instructions for this one."""
    if loops_problem():
        return False
    from services.gpu_worker.cpu_loops.dot_tile import dot_instructions  # only where there is numba

    return dot_instructions() is not None


class GridProjection:
    """A `Projection` over codes; inputs and results are in float32.

    Args:
        grid: the matrix, one that `fits_grid_loop`.
        bias: [out_features] float32 or None.
    """

    def __init__(self, grid: WeightGrid, bias: Tensor | None) -> None:
        from services.gpu_worker.cpu_loops.grid_loop import GRID_PRODUCT, scratch_bytes  # only where there is numba
        from services.gpu_worker.cpu_loops.team import TEAM

        assert TEAM is not None
        self._team, self._loop = TEAM, GRID_PRODUCT
        self._scratch_bytes = scratch_bytes
        self._num_bits = grid.num_bits
        self._codes = _in_tiles(grid)
        parts = (grid.scales, grid.minimums) if grid.num_bits == 4 else (grid.scales,)
        self._scales = torch.stack([_by_tile(part) for part in parts], dim=2).to(torch.float16)
        self._out_features, self._in_features = grid.codes.shape
        self._bias = None if bias is None else bias.contiguous()
        self.num_bytes = self._codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        x = x.contiguous()
        num_rows, num_groups = x.shape[0], self._in_features // GROUP
        out = torch.empty(num_rows, self._out_features)
        room = self._scratch_bytes(self._num_bits, num_rows, num_groups)
        numbers = (
            self._num_bits, x.data_ptr(), self._codes.data_ptr(), self._scales.data_ptr(), out.data_ptr(),
            self._team.scratch(torch.get_num_threads() * room), room, num_rows, num_groups,
            self._out_features // _TILE, 0 if self._bias is None else self._bias.data_ptr(),
        )  # fmt: skip
        self._team.run(self._loop, array("q", numbers), True)
        return out


def _in_tiles(grid: WeightGrid) -> Tensor:
    """[tiles, groups, 8, 16, 4] codes, quad by quad; of 4 bits [tiles, groups, 4, 64], two quads in each byte."""
    num_rows, num_columns = grid.codes.shape
    tiles, groups = num_rows // _TILE, num_columns // GROUP
    quads = grid.codes.view(tiles, _TILE, groups, 8, 4).permute(0, 2, 3, 1, 4).contiguous()
    if grid.num_bits == 8:
        return quads
    low, high = quads.view(tiles, groups, 4, 2, 64).unbind(3)
    return low | (high << 4)


def _by_tile(numbers: Tensor) -> Tensor:
    """[tiles, groups, 16] of [rows, groups]."""
    return numbers.view(-1, _TILE, numbers.shape[1]).transpose(1, 2)


def _fits_half(numbers: Tensor) -> bool:
    lost = (numbers.to(torch.float16).to(torch.float32) - numbers).abs().max()
    return bool(lost <= _LARGEST_LOSS * numbers.abs().max())
